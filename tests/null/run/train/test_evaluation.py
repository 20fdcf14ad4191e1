"""Data that is evaluated in the course of a training: its loss, its memory, and who hears of it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from brim.cli import main
from brim.core import Hardware
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.planning.inference.machine import emulated_hardware
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.prediction import TrainingStep
from brim.planning.strategy.step import Fitted
from brim.run.data.dataset import open_data
from brim.run.train import loop as training
from brim.run.train.loop import train
from brim.techniques.blocks import find_blocks
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.streaming.weight_streaming import Weights
from support.tiny_model import save_llama
from support.trainings import SEQ, course, quick_trainings, request, weights, write_text

__all__ = ["quick_trainings"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five examples of several lengths: the last micro-batch is smaller, and pieces count by their tokens."""
    path = tmp_path_factory.mktemp("data") / "held_out.json"
    path.write_text(json.dumps([{"text": "word " * (number + 1)} for number in range(5)]))
    return path


def by_hand(model: Any, folder: Path, data: Path) -> float:
    """Every token's loss, one example at a time."""
    dataset = open_data(data, AutoTokenizer.from_pretrained(folder), SEQ)
    total, count = 0.0, 0
    for index in range(len(dataset)):
        ids = torch.tensor([dataset.example(index).input_ids])
        logits = model.eval()(ids).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


def test_the_loss_is_told_every_so_many_steps_and_at_the_end(
    llama: Path, text: Path, held_out: Path, tmp_path: Path, quick_trainings: None
) -> None:
    heard: list[Any] = []
    asked = request(llama, text, tmp_path / "a", steps=5, eval_data=held_out, eval_every=2)
    made = train(asked, on_evaluation=heard.append)
    assert [one.step for one in made.evaluations] == [2, 4, 5]
    assert heard == list(made.evaluations)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        assert made.evaluations[-1].loss == pytest.approx(by_hand(trained, llama, held_out), rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line] == [
        (one.step, one.loss) for one in heard
    ]
    assert made.to_json()["evaluations"][0]["eval_loss"] == heard[0].loss
    alone = train(request(llama, text, tmp_path / "b", steps=5))
    assert made.losses == alone.losses, "a training is what it is without an evaluation"
    left, right = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.thorough
@pytest.mark.parametrize("orders", [{"checkpointing": "full"}, {"offload_optimizer": "disk"}, {"ram": "250MiB"}])
def test_techniques_in_force_change_nothing_of_it(
    orders: dict[str, Any], llama: Path, text: Path, held_out: Path, tmp_path: Path, quick_trainings: None
) -> None:
    made = train(request(llama, text, tmp_path / "a", steps=1, eval_data=held_out, **orders))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        assert made.evaluations[0].loss == pytest.approx(by_hand(trained, llama, held_out), rel=1e-5)


CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": "full"},
    "chunks": {"chunk_tokens": 16},
    "states in ram, during backward": {"states": "ram", "in_backward": True},
    "gradients on disk": {"states": "disk", "gradients": "disk"},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHOICES)
def test_what_it_takes_is_less_than_what_a_step_takes(
    name: str, known_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the promise, which is a step's, holds for it too."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    options = dict(CHOICES[name])
    if "checkpointing" in options:
        options["checkpointing"] = dict.fromkeys(blocks(model), options["checkpointing"])

    def ids(count: int) -> dict[str, torch.Tensor]:
        made = torch.zeros(count, 64, dtype=torch.long)
        return {"input_ids": made, "labels": made.clone()}

    training_step = TrainingStep(
        name="tiny", model=model, partition=find_blocks(model), weights=Weights(), inputs=ids, batch=2,
        optimizer=lambda twin: torch.optim.AdamW(twin.parameters(), fused=True),
        hardware=emulated_hardware(known_machine), device="emulated", budget_bytes={"ram": 1 << 30},
    )  # fmt: skip
    choice = Choice(micro_batch=2, **options)
    step = training_step.predict(choice).peak_bytes
    monkeypatch.setattr(Fitted, "step", lambda self, micros, **_: self.evaluate(micros[0].inputs))
    evaluation = training_step.predict(choice).peak_bytes
    assert all(evaluation[tier] <= count for tier, count in step.items())


def test_an_evaluation_that_runs_out_of_memory_is_repeated_with_a_smaller_plan(
    llama: Path, text: Path, held_out: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean_loss, failures = training._mean_loss, [BudgetError("memory", "is short")]

    def failing(*arguments: Any) -> float:
        if failures:
            raise failures.pop()
        return mean_loss(*arguments)

    monkeypatch.setattr(training, "_mean_loss", failing)
    made = train(request(llama, text, tmp_path / "a", steps=2, eval_data=held_out))
    assert [one.step for one in made.evaluations] == [2]
    assert "memory ran out" in made.notes[0]
    assert [step for step, _ in course(tmp_path / "a")] == [1, 2]


# -- who hears of it


class Wandb:
    """What is asked of the package."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        return SimpleNamespace(id=options["id"] or f"run{len(self.inits)}", log=self.log, finish=self.finish)

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self.logged.append((step, scalars))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_hears_steps_and_evaluations_and_goes_on_with_its_run(
    llama: Path, text: Path, held_out: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options: dict[str, Any] = {"report_to": ["wandb"], "eval_data": held_out}
    train(request(llama, text, tmp_path / "a", steps=2, save_every=1, **options))
    assert [step for step, _ in wandb.logged] == [1, 2, 2]
    assert {"loss", "lr", "tokens_per_s", "peak_bytes/ram"} <= set(wandb.logged[0][1])
    assert set(wandb.logged[-1][1]) == {"eval_loss"} and math.isfinite(wandb.logged[-1][1]["eval_loss"])
    assert (wandb.inits[0]["project"], wandb.inits[0]["config"]["batch"], wandb.finished) == ("brim", 2, 1)
    train(request(llama, text, tmp_path / "a", steps=3, save_every=1, resume=True, **options))
    assert (wandb.inits[1]["id"], wandb.inits[1]["resume"]) == ("run1", "allow")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of the package, about its own future
def test_wandb_itself_keeps_every_step_while_it_is_offline(
    llama: Path, text: Path, held_out: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    train(request(llama, text, tmp_path / "a", steps=2, report_to=["wandb"], eval_data=held_out))
    (kept,) = (tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb")
    run = (tmp_path / "a" / "wandb-run-id").read_text()
    assert run in kept.name
    log = kept.read_bytes()
    for name in (b"loss", b"tokens_per_s", b"peak_bytes/ram", b"eval_loss", run.encode()):
        assert name in log
    assert [step for step, _ in course(tmp_path / "a")] == [1, 2]


def test_a_reporter_that_is_missing_is_told_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked = ["train", "no-model", "--data", "d.txt", "--output", str(tmp_path / "a"), "--report-to", "wandb"]
    assert main(asked) == UnsupportedError("").exit_code
    assert "pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_what_cannot_be_meant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no data to evaluate on"):
        request(tmp_path, tmp_path, tmp_path, eval_every=3).check()
    with pytest.raises(UsageError, match="--report-to mlflow"):
        request(tmp_path, tmp_path, tmp_path, report_to=["mlflow"]).check()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    asked = ["train", "m", "--data", "d.txt", "--output", str(tmp_path), "--eval-data", "e.txt"]
    assert main(asked) == UnsupportedError("").exit_code
