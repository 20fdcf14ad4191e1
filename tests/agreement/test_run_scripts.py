"""Programs that know nothing of brim, under budgets of 40 to 60 % of what they take: the same output, bit for bit.

What a program takes is what a run without a budget says of its models: weights, gradients, states, activations and
what kernels take, as budgets count them (of several models the sum). That it really takes that is a test of its own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.run.script.run import run
from brim.run.script.script import Program
from brim.run.script.settings import Settings
from support.launching import OWN, SCRIPTS, Ended, budgeted, hear_interrupts, in_child, plainly, program

# Name, arguments, share of the need. The two models of checkpoints are never there at once: it is half of one.
QUICK = [
    ("plain_loop", (), 0.5),
    ("exits", ("--code", "3", "a", "--", "--ram"), 0.5),
    ("evaluated_first", (), 0.5),
    ("classify_pretrained", (), 0.5),
    ("frozen", (), 0.5),
    ("compiled", (), 0.5),
]
SLOW = [
    ("ema", (), 0.6),
    ("checkpoints", (), 0.25),
    ("dcgan", (), 0.55),
    ("char_rnn", (), 0.55),
    ("word_language_model", (), 0.5),
    ("mnist", ("--epochs", "2"), 0.5),
    ("vae", (), 0.5),
    ("super_resolution", (), 0.5),
    ("seq2seq", (), 0.55),
    ("with_trainer", (), 0.5),
    ("with_peft", (), 0.6),
    ("with_diffusers", (), 0.5),
    ("with_accelerate", (), 0.5),
]


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))


def keeps_to(ended: Ended, budget_bytes: int, *, together: bool) -> None:
    """Every model that was fitted is promised, and held, no more than its share; the shares are no more than all."""
    models = ended.found["models"]
    fitted = [one for one in models if one["choice"] == "fitted"]
    assert fitted, models
    assert (sum if together else max)(one["promised_bytes"]["ram"] for one in models) <= budget_bytes
    for one in fitted:
        assert one["held_bytes"]["ram"] <= one["budget_bytes"]["ram"]
        assert one["untouched_bytes"]["ram"] > one["budget_bytes"]["ram"]


def compared(what: Program, share: float, folder: Path, **settings: Any) -> None:
    plain = plainly(what, folder, measure=False)
    free = budgeted(what, folder, **settings)
    assert (free.code, free.out) == (plain.code, plain.out)
    assert "fitted" not in free.err
    assert {one["choice"] for one in free.found["models"]} == {"untouched"}
    budget_bytes = int(share * sum(one["untouched_bytes"]["ram"] for one in free.found["models"]))
    ended = budgeted(what, folder, ram=budget_bytes, **settings)
    assert (ended.code, ended.out) == (plain.code, plain.out), ended.err
    keeps_to(ended, budget_bytes, together="checkpoints" not in what.target)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "arguments", "share"), QUICK, ids=[one[0] for one in QUICK])
def test_a_script_under_a_budget(name: str, arguments: tuple[str, ...], share: float, tmp_path: Path) -> None:
    compared(program(name, *arguments), share, tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@pytest.mark.parametrize("name", ["with_trainer", "with_lightning"])
def test_cuda_programs_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Loops of libraries that choose the GPU where there is one, and are told of one: plain, they run on the CPU."""
    if name == "with_lightning" and find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    compared(program(name), 0.5, tmp_path, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "share"), SLOW, ids=[one[0] for one in SLOW])
def test_a_longer_script_under_a_budget(name: str, arguments: tuple[str, ...], share: float, tmp_path: Path) -> None:
    compared(program(name, *arguments), share, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(context: str, tmp_path: Path) -> None:
    compared(program("workers", context), 0.5, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        ".accelerate.test_utils.scripts.test_sync",
        pytest.param(".accelerate.test_utils.scripts.test_script", marks=pytest.mark.slow),
        ".accelerate.test_utils.scripts.test_cli",
    ],
)
def test_scripts_that_a_library_ships(name: str, tmp_path: Path) -> None:
    """Their models are of a few bytes: there is nothing to take away, and nothing is."""
    what = program(name)
    plain = plainly(what, tmp_path, measure=False)
    assert plain.code == 0, plain.err
    ended = budgeted(what, tmp_path, ram="1MiB")
    assert (ended.code, ended.out) == (plain.code, plain.out), ended.err
    assert ended.found["models"] == []


@pytest.mark.thorough
def test_what_fits_is_left_alone_and_its_need_is_what_it_takes(tmp_path: Path) -> None:
    what = program("plain_loop")
    plain = plainly(what, tmp_path)
    ended = budgeted(what, tmp_path, ram=int(plain.found * 1.1))
    assert (ended.code, ended.out, ended.err) == (plain.code, plain.out, "")
    (model,) = ended.found["models"]
    assert model["choice"] == "untouched"
    assert model["untouched_bytes"]["ram"] == pytest.approx(plain.found, rel=0.05)


@pytest.mark.slow
def test_a_training_is_killed_by_ctrl_c_as_python_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "brim", "run", "--ram", "9MiB", str(SCRIPTS / "endless.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_interrupts) as process:
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=250)
    assert process.returncode == -signal.SIGINT
    assert out == "the end\n"
    assert "fitted for train" in err and OWN not in err
    assert err.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.thorough
def test_both_kinds_of_report(tmp_path: Path) -> None:
    what, page = program("exits", "--code", "0"), tmp_path / "run.html"
    ended = budgeted(what, tmp_path, ram="9MiB")
    assert {"weight_streaming", "optimizer_offload"} <= ended.found["models"][0]["techniques"].keys()
    told = in_child(lambda _: run(what, Settings(ram="9MiB", report=page)), tmp_path)
    assert told.code == 0, told.err
    assert "Sequential" in page.read_text(encoding="utf-8")
