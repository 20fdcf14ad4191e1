"""Fallback levels of a training: rungs from the fastest to the smallest, predicted until a rung fits.

Each rung adds a technique to those above it. The user's settings hold on every rung.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from brim.core.hardware import DISK, RAM
from brim.errors import BudgetError, UsageError
from brim.planning.proof import fits, in_words, over_bytes, search
from brim.planning.strategy.choice import TOKENS_AT_ONCE, Choice, Place
from brim.planning.strategy.prediction import Prediction
from brim.techniques import micro_batch


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The user's settings; None leaves one to the planner.

    ``offload_activations`` is a number of blocks, evenly spread. ``stream_weights`` False: never.
    """

    precision: str | None = None
    micro_batch: int | None = None
    checkpointing: str | None = None
    offload_activations: int | None = None
    offload_optimizer: Place | None = None
    stream_weights: bool | None = None

    def fixed(self, blocks: Sequence[str]) -> dict[str, Any]:
        """Return the fields of Choice that are the same on every rung."""
        settings: dict[str, Any] = {}
        if self.precision is not None:
            settings["precision"] = self.precision
        if self.micro_batch is not None:
            settings["micro_batch"] = self.micro_batch
        if self.checkpointing is not None:
            none = self.checkpointing == "none"
            settings["checkpointing"] = {} if none else dict.fromkeys(blocks, self.checkpointing)
        if self.offload_activations is not None:
            settings["activations"] = spread(blocks, self.offload_activations)
        if self.offload_optimizer is not None:
            settings["states"] = self.offload_optimizer
            if self.offload_optimizer == "keep":
                settings["gradients"] = "keep"
        return settings


def spread(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """Return ``count`` of ``blocks`` at even distances, so that compute hides their copies."""
    if count > len(blocks):
        raise UsageError(
            f"Cannot offload the activations of {count} blocks.",
            f"The model has {len(blocks)} blocks.",
            "Give that number or fewer.",
        )
    return tuple(blocks[index * len(blocks) // count] for index in range(count))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training's properties for the ladder. A step has ``batch`` sequences.

    ``in_place``: some activations can write over their inputs. ``chunkable``: the logits can be computed in chunks.
    ``single_pass``: nothing needs all gradients together (clipping by norm does), so a block can be updated as soon
    as it has its own. ``gradients_leave``: they can be offloaded. ``states_leave``: the optimizer can be stepped
    block by block.
    """

    compute: str
    batch: int
    blocks: Sequence[str]
    in_place: bool = False
    chunkable: bool = True
    single_pass: bool = True
    gradients_leave: bool = True
    states_leave: bool = True


def ladder(subject: Subject, orders: Orders) -> list[Choice]:
    """Return the rungs without weight streaming, each smaller than the one before."""
    fixed = orders.fixed(subject.blocks)
    activations: dict[str, Any] = {"activations": tuple(subject.blocks)}
    accumulates = fixed.get("micro_batch", 1) < subject.batch  # else gradients can be freed block by block

    def leave(place: Place) -> list[dict[str, Any]]:
        if not subject.states_leave:
            return []
        gradients = subject.gradients_leave and (accumulates or not subject.single_pass)
        return [{"states": place}, *([{"gradients": place}] if gradients else [])]

    # From VRAM everything moves to RAM first; moving it on to disk frees RAM, not VRAM.
    away = [*leave("disk"), activations] if subject.compute == RAM else [*leave("ram"), activations, *leave("disk")]
    changes: list[dict[str, Any]] = [
        {},
        {"in_place": subject.in_place},
        {"chunk_tokens": TOKENS_AT_ONCE if subject.chunkable else 0},
        {"micro_batch": 1},
        {"checkpointing": dict.fromkeys(subject.blocks, "selective")},
        {"checkpointing": dict.fromkeys(subject.blocks, "full")},
        {"in_backward": subject.single_pass and subject.states_leave},
        *away,
    ]
    rungs: list[Choice] = []
    settings: dict[str, Any] = {"micro_batch": subject.batch}
    for change in changes:
        settings |= change
        rung = Choice(**{**settings, **fixed})
        if rung not in rungs:
            rungs.append(rung)
    last = rungs[-1]
    if last.states == DISK and not last.in_backward:  # backward and update do not overlap then
        rungs.append(replace(last, brief_buffer=True))
    return rungs


_SMALL_BYTES = 4 << 20  # of what is trained


def is_small(model: nn.Module) -> bool:
    """Return True where the buffers of an update are no small part of the trained bytes."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad) < _SMALL_BYTES


Predict = Callable[[Choice], Prediction]


def climb_down(
    rungs: Sequence[Choice],
    predict: Predict,
    budget_bytes: Mapping[str, int],
    *,
    compute: str,
    batch: int,
    order: Orders,
    start: int = 0,
    floor: Callable[[Choice], Mapping[str, int]] = lambda choice: {},
    one_by_one: bool = False,
) -> tuple[int, Choice, Prediction]:
    """Return the first of ``rungs`` from ``start`` on that fits, or the nearest: its number, choice and prediction.

    Its micro-batch is the largest that fits. ``floor`` gives a lower bound on a choice's bytes: rungs whose bound
    exceeds the budget are not predicted. A prediction takes seconds, and each rung needs less of the tier ``compute``
    than the one before, so the first that fits that tier is found by bisection; from there on all tiers are checked.
    ``one_by_one`` checks every rung: in small models the buffers of a rung may be larger than its savings.
    """
    predictions: dict[int, Prediction] = {}
    begin = min(start, len(rungs) - 1)
    todo = [i for i in range(begin, len(rungs)) if fits(floor(rungs[i]), budget_bytes) or i == len(rungs) - 1]

    def predicted(index: int) -> Prediction:
        if index not in predictions:
            predictions[index] = predict(rungs[index])
        return predictions[index]

    compute_bytes = {compute: budget_bytes[compute]}
    first = 0 if one_by_one else _first(todo, lambda index: fits(predicted(index).peak_bytes, compute_bytes))

    def attempt(index: int) -> tuple[int, Choice, Prediction] | None:
        prediction, choice = predicted(index), rungs[index]
        if index < start or not fits(prediction.peak_bytes, budget_bytes):
            return None
        if choice.micro_batch == 1 < batch and order.micro_batch is None:
            choice, prediction = _enlarge(choice, prediction, predict, budget_bytes, batch)
        return index, choice, prediction

    if fitting := search(todo[first:], attempt, most=1):
        return fitting[0]
    nearest = min(
        predictions, key=lambda index: sum(over_bytes(predictions[index].peak_bytes, budget_bytes).values())
    )
    return nearest, rungs[nearest], predictions[nearest]


def _first(values: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Return the first index whose value ``holds``, or the length. It is mostly 0, which is tried first."""
    if not values or holds(values[0]):
        return 0
    return bisect_left(values, True, lo=1, key=holds)


def too_small(peak_bytes: Mapping[str, int], budget_bytes: Mapping[str, int]) -> BudgetError:
    short = {tier: peak_bytes[tier] for tier in over_bytes(peak_bytes, budget_bytes)}
    # The program's own RAM is measured: it differs by a few MiB between runs.
    flags = " ".join(f"--{tier} {-(-count // (1 << 20)) + 4 * (tier == RAM)}MiB" for tier, count in short.items())
    return BudgetError(
        f"Cannot train with {in_words(budget_bytes)}.",
        f"The smallest plan known takes {in_words(short)}.",
        f"Give {flags} or more, or a smaller --micro-batch or --seq.",
        smallest_bytes=short,
    )


def no_smaller() -> BudgetError:
    """Return the error for a run that is out of memory under the smallest plan."""
    return BudgetError(
        "Cannot continue training with less memory.",
        "The smallest plan is already in force.",
        "End other programs, or give a smaller --micro-batch or --seq.",
    )


def _enlarge(
    choice: Choice, prediction: Prediction, predict: Predict, budget_bytes: Mapping[str, int], batch: int
) -> tuple[Choice, Prediction]:
    """Find the largest micro-batch that fits, from predictions; ``prediction`` is that of ``choice`` itself."""
    predictions = {1: prediction}
    tier = min(prediction.peak_bytes, key=lambda tier: budget_bytes.get(tier, math.inf) - prediction.peak_bytes[tier])

    def peak_bytes(count: int) -> int:
        if count not in predictions:
            predictions[count] = predict(replace(choice, micro_batch=count))
        return predictions[count].peak_bytes[tier]

    largest = micro_batch.largest(peak_bytes, budget_bytes[tier], batch)
    peak_bytes(largest)
    while not fits(predictions[largest].peak_bytes, budget_bytes):  # another tier is full first
        largest = max(1, largest // 2)
        peak_bytes(largest)
    return replace(choice, micro_batch=largest), predictions[largest]
