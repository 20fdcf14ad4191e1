"""The contenders of training.py: one model, one stream of batches, one loop, each fitted as it documents."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch

LR = 1e-3
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One contender's task. ``begin`` is to be called when it is set up: from then on memory counts.

    ``budget_bytes`` is 0 for those that take what they take.
    """

    checkpoint: Path
    data: Path
    scratch: Path
    budget_bytes: int
    batch: int
    seq: int
    steps: int
    begin: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``value`` gives a parameter by its name in the plain model, as it is after the last step.

    ``peak_growth_bytes``: what the contender measured of itself, where it resets the high water; else None.
    """

    losses: list[float]
    step_s: list[float]
    value: Callable[[str], torch.Tensor]
    peak_growth_bytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], Any] = field(default=lambda: None)


class TrainingContender(Protocol):
    """What each module in TRAINING_NAMES offers. ``LOSSLESS``: its losses are plain PyTorch's bit for bit."""

    TITLE: str
    PACKAGE: str
    LOSSLESS: bool

    def run(self, setting: Setting) -> Outcome: ...


# The visible list; "train_plain" is the reference and runs first in every round.
TRAINING_NAMES = (
    "train_plain",
    "train_save_on_cpu",
    "train_fsdp",
    "train_torchao",
    "train_ramtorch",
    "train_brim",
    "train_brim_fit",
)
PEERS = tuple(name for name in TRAINING_NAMES if "brim" not in name)


def training_contender(name: str) -> TrainingContender:
    return cast(TrainingContender, importlib.import_module(f"peers.{name}"))


def open_model(setting: Setting) -> Any:
    """The checkpoint as transformers opens it, in train mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(setting.checkpoint, dtype=torch.float32).train()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def batches(setting: Setting) -> Iterator[Batch]:
    """The batches of all steps, the same as ``brim train`` makes of this data."""
    from transformers import AutoTokenizer

    from brim.run.data.dataset import Batches, open_data

    dataset = open_data(setting.data, AutoTokenizer.from_pretrained(setting.checkpoint), setting.seq)
    return itertools.islice(Batches(dataset, setting.batch, pad_to=setting.seq), setting.steps)


def looped(
    setting: Setting,
    step: Callable[[Batch], torch.Tensor],
    value: Callable[[str], torch.Tensor],
    **more: Any,
) -> Outcome:
    """Every batch once. ``step`` returns the loss; whatever else it does is a step."""
    given, losses, step_s = list(batches(setting)), [], []
    setting.begin()
    for batch in given:
        begin_s = time.perf_counter()
        losses.append(step(batch).item())
        step_s.append(time.perf_counter() - begin_s)
    return Outcome(losses=losses, step_s=step_s, value=value, **more)


def usual_step(
    model: Any,
    optimizer: Any,
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[[Batch], torch.Tensor]:
    """The loop body that everybody writes."""

    def step(batch: Batch) -> torch.Tensor:
        with around_forward():
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def values_of(model: Any) -> Callable[[str], torch.Tensor]:
    parameters = dict(model.named_parameters())

    def value(name: str) -> torch.Tensor:
        return cast(torch.Tensor, parameters[name].detach())

    return value
