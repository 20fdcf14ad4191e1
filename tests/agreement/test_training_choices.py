"""Whoever asks how to train a model within a budget is told the same: ``brim plan``, ``brim train``, ``brim.fit`` and
``brim run`` choose the same way, and promise the same bytes and seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import brim
from brim.cli import main
from brim.core import Hardware, Link, Plan, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.estimation.models import find_model
from brim.measure.capacity import resident_bytes
from brim.models.training_model import make_optimizer, open_training_model
from brim.planning.request import Machine, Request
from brim.planning.strategy.case import TrainingStrategy
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.choose import search_training
from brim.planning.strategy.ladder import Orders
from brim.planning.strategy.search import TrainingSearch
from brim.planning.training import plan_training
from brim.run.fit import Search
from brim.run.plan.search import answer_to
from brim.run.script.decide import Decisions
from brim.run.script.hooks import Call
from brim.run.script.outcome import FITTED, UNTOUCHED
from brim.run.script.settings import Settings
from brim.run.train.session import Terms, training_case
from brim.techniques.streaming.placement import RESIDENT
from brim.units import GIB, MIB
from support.generating import save_words_llama
from support.trainings import write_text

GPU = Hardware(
    name="a card",
    compute=VRAM,
    tiers=(
        Tier(name=VRAM, capacity_bytes=24 * GIB, bytes_per_s=400e9),
        Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=40e9),
        Tier(name=DISK, capacity_bytes=1000 * GIB),
    ),
    links=(
        Link(source=RAM, target=VRAM, bytes_per_s=12e9, duplex_bytes_per_s=10e9),
        Link(source=VRAM, target=RAM, bytes_per_s=12e9, duplex_bytes_per_s=10e9),
        Link(source=DISK, target=RAM, bytes_per_s=3e9),
    ),
    flops_per_s={"float32": 20e12, "bfloat16": 40e12},
)
CPU = Hardware(
    name="a processor",
    compute=RAM,
    tiers=(Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=20e9), Tier(name=DISK, capacity_bytes=1000 * GIB)),
    links=(Link(source=DISK, target=RAM, bytes_per_s=3e9),),
    flops_per_s={"float32": 1e11},
)
MACHINES = {"a GPU": GPU, "a processor": CPU}

# -- a loop of one's own: brim plan file.py:build, brim.fit and brim run

SOURCE = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[Part() for _ in range(4)]), (torch.zeros(1, 512, WIDTH),)
"""
TINY, SMALL = 64, 320  # with fewer bytes than a search is made for, and with more


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, str]:
    """Functions that build a model, by its width."""
    folder = tmp_path_factory.mktemp("factories")
    made = {}
    for width in (TINY, SMALL):
        path = folder / f"of_{width}.py"
        path.write_text(SOURCE.replace("WIDTH", str(width)))
        made[width] = f"{path}:build"
    return made


def built(name: str) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor]]:
    build = find_model(name).factory
    assert build is not None
    model, example = build()
    return model, make_optimizer("adamw", model, 1e-4), example


def told(plan: Plan) -> tuple[Choice, Mapping[str, int], float]:
    """What is chosen (a plan that is in force names the blocks that stay, too), and promised."""
    choice, promise = Choice.of(plan), plan.promise
    moved = {block: where for block, where in choice.streaming.items() if where != RESIDENT}
    return replace(choice, streaming=moved), promise.peak_bytes, promise.step_s


def decided(model: nn.Module, optimizer: torch.optim.Optimizer, example: tuple[torch.Tensor], ram: int) -> Any:
    """What ``brim run`` makes of a model that a program is about to call."""
    decisions = Decisions(Settings(ram=ram), lambda name, why: None)
    with contextlib.redirect_stderr(io.StringIO()):
        outcome = decisions.decide(Call(model=model, called=model, args=example, kwargs={}, optimizers=[optimizer]))
    assert outcome is not None
    return outcome


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("width", "share"), [(TINY, 4.0), (TINY, 0.7), (SMALL, 4.0), (SMALL, 0.9), (SMALL, 0.7), (SMALL, 0.55)]
)
def test_a_loop_of_one_s_own_is_told_the_same_by_plan_fit_and_run(
    width: int, share: float, factories: Mapping[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", str(tmp_path))
    name = factories[width]
    whole = answer_to(Request(model=name, task="train", ram=GIB, top=1)).proposals[0].plan.promise.peak_bytes[RAM]
    ram = int(whole * share)
    answer = answer_to(Request(model=name, task="train", ram=ram, top=1))
    choice, bytes, seconds = told(answer.proposals[0].plan)
    assert (choice == Choice()) == (share > 1)
    document = json.loads(json.dumps(answer.to_json()))
    assert document["plans"][0]["step_s"] == seconds == answer.proposals[0].step_s
    assert document["plans"][0]["peak_bytes"] == bytes

    model, optimizer, example = built(name)
    handle = brim.fit(model, optimizer, ram=ram, device="cpu", example=example)
    assert told(handle.plan) == (choice, bytes, seconds)
    handle.remove()

    model, optimizer, example = built(name)
    outcome = decided(model, optimizer, example, ram)
    assert outcome.choice == (UNTOUCHED if choice == Choice() else FITTED)
    if outcome.plan is None:
        assert outcome.untouched_bytes[RAM] == bytes[RAM]
    else:
        assert told(outcome.plan) == (choice, bytes, seconds)
        model.brim.remove()  # type: ignore[union-attr, operator]


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "share"), [(TINY, 4.0), (TINY, 0.9), (SMALL, 0.8)])
def test_a_loop_of_one_s_own_beside_a_gpu_is_told_the_same_by_plan_and_fit(
    width: int, share: float, factories: Mapping[int, str]
) -> None:
    request = Request(model=factories[width], task="train", top=1)

    def planned(vram: int) -> tuple[Choice, Mapping[str, int], float]:
        on = Machine(hardware=GPU, budget_bytes={VRAM: vram, RAM: GIB, DISK: GIB}, assumed=("all of it",))
        (best,) = plan_training(request, on)
        return told(best.plan)

    vram = int(planned(GIB)[1][VRAM] * share)
    model, optimizer, example = built(factories[width])
    found = Search(model, optimizer, GPU, {VRAM: vram, RAM: GIB, DISK: GIB}, "auto", example, 0).run()
    assert (found.choice, found.prediction.peak_bytes, found.step_s) == planned(vram)


# -- brim's own loop: brim plan and brim train


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """Models of transformers by their width, saved."""
    made = {}
    for width in (TINY, SMALL):
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        made[width] = tmp_path_factory.mktemp("llamas") / str(width)
        LlamaForCausalLM(config).save_pretrained(made[width])
    return made


def trained(request: Request, on: Machine) -> TrainingStrategy:
    """What ``brim train`` chooses."""
    precision = request.precision or ("fp32" if on.hardware.compute == RAM else "bf16-mixed")
    terms = Terms(
        method=request.method, precision=precision, optimizer=request.optimizer, lr=1e-4, batch=request.batch,
        seq=request.seq, seed=0, clip_norm=None, orders=Orders(), hardware=on.hardware, budget_bytes=on.budget_bytes,
        device="auto", disk_folder=None, start_bytes=resident_bytes(),
    )  # fmt: skip
    training_model = open_training_model(Path(request.model), method=request.method, precision=precision, seed=0)
    (found,) = search_training(TrainingSearch(training_case(terms, training_model)))
    return found


def machine(name: str, budget_bytes: int) -> Machine:
    hardware = MACHINES[name]
    budget = {RAM: 16 * GIB, DISK: 100 * GIB, hardware.compute: budget_bytes}
    return Machine(hardware=hardware, budget_bytes=budget, assumed=("all of it",))


# Shares of what tensors take where all is in memory. What a process takes beside them differs from one to another, so
# where RAM is the budget it is given on top.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("width", "where", "share", "options"),
    [
        (TINY, "a GPU", 4.0, {}),
        (TINY, "a GPU", 0.9, {}),
        (TINY, "a processor", 4.0, {}),
        (SMALL, "a GPU", 4.0, {"batch": 4}),
        (SMALL, "a processor", 4.0, {"optimizer": "sgd"}),
        pytest.param(SMALL, "a GPU", 0.9, {}, marks=pytest.mark.slow),
        pytest.param(SMALL, "a GPU", 0.6, {"batch": 4}, marks=pytest.mark.slow),
        pytest.param(SMALL, "a GPU", 0.8, {"precision": "fp32", "batch": 4}, marks=pytest.mark.slow),
    ],
)
def test_brim_s_own_loop_is_told_the_same_by_plan_and_train(
    width: int, where: str, share: float, options: dict[str, Any], llamas: Mapping[int, Path]
) -> None:
    request = Request(model=llamas[width], task="train", top=1, **{"batch": 2, "seq": 128, **options})
    compute = MACHINES[where].compute
    beside = trained(request, machine(where, 8 * GIB)).spent_bytes[compute]
    whole = plan_training(replace(request), machine(where, 8 * GIB))[0].plan.promise.peak_bytes[compute]
    on = machine(where, beside + int((whole - beside) * share) + (64 * MIB if compute == RAM else 0))
    choice, bytes, seconds = told(plan_training(request, on)[0].plan)
    found = trained(request, on)
    assert (found.choice, found.step_s) == (choice, seconds)
    assert found.prediction.peak_bytes.get(VRAM) == bytes.get(VRAM)
    assert found.prediction.peak_bytes[DISK] == bytes[DISK]


@pytest.mark.thorough
def test_pages_and_json_show_the_seconds_that_plan_and_train_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = save_words_llama(tmp_path / "llama", layers=2), write_text(tmp_path / "text.txt")
    options = ["--ram", "4GiB", "--seq", "64", "--json"]
    commands = {
        "plan": ["--task", "train"],
        "train": ["--data", str(text), "--output", str(tmp_path / "out"), "--steps", "2", "--device", "cpu"],
    }
    for command, more in commands.items():
        page = tmp_path / f"{command}.html"
        assert main([command, str(folder), *options, *more, "--html", str(page)]) == 0
        found = json.loads(capsys.readouterr().out)
        promise = (found["plans"][0] if command == "plan" else found)["plan"]["promise"]
        assert repr(promise["step_s"]) in page.read_text()
        if command == "plan":
            assert found["plans"][0]["step_s"] == promise["step_s"]
