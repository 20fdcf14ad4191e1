"""Plans to train a model that a function of the user's builds, and the loop that runs one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.core.hardware import RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.planning import file as plan_file
from brim.planning.request import Answer, Request
from brim.planning.strategy.choice import Choice
from brim.run.plan.search import answer_to

SOURCE = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = NORM
    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *[Part() for _ in range(6)], nn.Flatten(),
                          nn.Linear(16 * 32 * 32, 10))
    return model, (torch.zeros(8, 3, 32, 32),)

def alone():
    return build()[0]
"""
GPU: dict[str, Any] = {"task": "train", "gpu": "RTX 3060", "ram": "8GiB", "top": 1}
MIB = 1 << 20


def written(folder: Path, norm: str) -> str:
    path = folder / "cnn.py"
    path.write_text(SOURCE.replace("NORM", norm))
    return f"{path}:build"


@pytest.fixture(scope="module")
def with_norm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("norm"), "nn.BatchNorm2d(16)")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("plain"), "nn.Identity()")


def best(model: str, **options: Any) -> tuple[Choice, Answer]:
    found = answer_to(Request(model=model, **{**GPU, **options}))
    assert found.proposals, found.refusal
    return Choice.of(found.proposals[0].plan), found


def roomy_bytes(model: str) -> int:
    choice, found = best(model)
    assert choice == Choice(micro_batch=8), "all of it fits"
    assert found.request.batch == 8
    return found.proposals[0].plan.promise.peak_bytes[VRAM]


@pytest.mark.thorough
def test_activations_are_computed_again_or_leave_where_they_do_not_fit(with_norm: str) -> None:
    whole = roomy_bytes(with_norm)
    choice, found = best(with_norm, vram=str(whole - 4 * MIB))
    assert choice.checkpointing or choice.activations
    assert choice.micro_batch == 8, "batch norm sees all rows at once"
    assert not choice.streams and not choice.in_backward
    assert found.proposals[0].plan.promise.peak_bytes[VRAM] <= whole - 4 * MIB
    assert found.proposals[0].command == 'brim.fit(model, optimizer, example=inputs, plan="plan.json")'


@pytest.mark.slow
def test_without_batch_norm_fewer_rows_may_go_at_once(without: str) -> None:
    smallest = answer_to(Request(model=without, **{**GPU, "prefer": "memory", "top": 3}))
    assert any(Choice.of(one.plan).micro_batch < 8 for one in smallest.proposals)


def test_a_batch_that_is_asked_for_is_planned(with_norm: str) -> None:
    choice, found = best(with_norm, batch=16)
    assert (choice.micro_batch, found.request.batch) == (16, 16)
    assert found.tokens_per_s(found.proposals[0]) == pytest.approx(16 / found.proposals[0].step_s)


def test_a_loop_runs_the_plan_and_its_losses_are_the_plain_ones(without: str, tmp_path: Path) -> None:
    here = {"task": "train", "top": 1, "ram": "2GiB"}
    found = answer_to(Request(model=without, **here))  # type: ignore[arg-type]
    path = tmp_path / "plan.json"
    plan_file.write(path, found)
    from brim.estimation.models import find_model

    build = find_model(without).factory
    assert build is not None

    def losses(fitted: bool) -> list[float]:
        model, _ = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.linspace(-1, 1, 8 * 3 * 32 * 32).view(8, 3, 32, 32)
        handle = brim.fit(model, optimizer, ram="2GiB", example=(x,), plan=path) if fitted else None
        told = []
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), torch.arange(8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        if handle is not None:
            assert handle.plan.promise.peak_bytes[RAM] <= 2 << 30
            handle.remove()
        return told

    assert losses(True) == losses(False)


def test_what_is_no_pair_or_no_training_is_refused(with_norm: str) -> None:
    with pytest.raises(UsageError, match="pair"):
        answer_to(Request(model=with_norm.replace(":build", ":alone"), **GPU))
    with pytest.raises(UnsupportedError, match="generate"):
        answer_to(Request(model=with_norm, task="generate"))
    with pytest.raises(UnsupportedError, match="lora"):
        answer_to(Request(model=with_norm, **GPU, method="lora"))


def test_a_plan_for_a_language_model_is_not_run_in_a_loop_of_ones_own(without: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="optimizer"):
        brim.fit(nn.Linear(2, 2), plan=tmp_path / "plan.json")  # type: ignore[call-overload]
