"""The first failed request of a run: its phase, the memory in use, and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from brim.core.timeline import EventKind, Timeline
from brim.core.trace import Category
from brim.report import read_table
from brim.report.explain import live_rows
from brim.report.phase import (
    BY_PHASE,
    CHUNKED_LOSS,
    FUSED,
    ONE_BY_ONE,
    PRECISION,
    RECOMPUTE,
    SMALLER,
    STATES_IN_8_BITS,
    WEIGHTS_IN_16_BITS,
    Advice,
    Phase,
    phase_of,
)
from brim.units import format_bytes

IN_PHASE = {Phase(name): text for name, text in read_table("advice.toml")["in_phase"].items()}
_OF_MODELS = (Phase.FORWARD, Phase.ATTENTION, Phase.LOSS)
_STEP = (*_OF_MODELS, Phase.BACKWARD)
_FIXED = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)
_MOSTLY_FIXED = 0.7  # of memory in use; then a smaller step does little
_MOST_LOOKED_AT = 100_000  # events before the failure, searched for the last stack with a phase
_LIKE_THE_LOSS = 0.05  # largest difference between the request of a loss's backward pass and a block of the loss


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed request. ``phase`` is None if no stack shows it.

    ``held_bytes`` is the memory in use by category, ``loss_bytes`` the loss's part of it.
    """

    phase: Phase | None
    requested_bytes: int
    held_bytes: Mapping[str, int]
    loss_bytes: int

    @property
    def fixed_share(self) -> float:
        """The share of parameters, gradients and states, which a smaller step does not reduce."""
        held = sum(self.held_bytes.values()) + self.requested_bytes
        return sum(self.held_bytes.get(category, 0) for category in _FIXED) / held if held else 0.0


def failure(timeline: Timeline, frames: Sequence[str] = ()) -> Failure | None:
    """Return the first failed request of a run, None without one. ``frames`` are its stack, the innermost first."""
    kinds = np.asarray(timeline.column("kind"))
    failed = np.flatnonzero(kinds == EventKind.OOM)
    if not len(failed):
        return None
    at = int(failed[0])
    del kinds, failed
    numbers, stacks = timeline.texts("stack")
    phases = [phase_of(text.split("\n")) for text in stacks]
    stack_of, requested = np.asarray(numbers), int(timeline.column("bytes")[at])
    sizes = np.asarray(timeline.column("bytes"))
    categories, names = timeline.texts("category")
    held: dict[str, int] = {}
    of_loss = []
    for row in live_rows(timeline, at).tolist():
        name, size = names[categories[row]], int(sizes[row])
        held[name] = held.get(name, 0) + size
        own_line = phases[stack_of[row]] is None and name == Category.ACTIVATION  # after the model
        if phases[stack_of[row]] is Phase.LOSS or own_line:
            of_loss.append(size)
    own = list(frames) or [frame for frame in stacks[stack_of[at]].split("\n") if frame]
    has_phase = np.array([known is not None for known in phases])
    earlier = np.flatnonzero(has_phase[stack_of[max(at - _MOST_LOOKED_AT, 0) : at]])
    before = phases[stack_of[max(at - _MOST_LOOKED_AT, 0) + earlier[-1]]] if len(earlier) else None
    phase = phase_of(own)
    if not own and before in _STEP:
        phase = Phase.BACKWARD  # autograd's own thread has no Python frames
    if phase is None and before in _OF_MODELS:
        phase = Phase.LOSS  # between the model's forward pass and its backward pass
    if phase is Phase.BACKWARD and any(abs(size - requested) < _LIKE_THE_LOSS * requested for size in of_loss):
        phase = Phase.LOSS
    return Failure(phase=phase, requested_bytes=requested, held_bytes=held, loss_bytes=sum(of_loss))


def advice_for(failed: Failure) -> list[Advice]:
    """Return advice against a failure, the most promising first, each with the bytes at stake."""
    phase, activations = failed.phase, failed.held_bytes.get(Category.ACTIVATION, 0)
    advices = [SMALLER, RECOMPUTE, PRECISION] if phase is None else list(BY_PHASE[phase])
    if phase is Phase.LOSS:
        others = [advice for advice in BY_PHASE[Phase.FORWARD] if advice not in advices]
        of_layers = activations - failed.loss_bytes > 2 * (failed.loss_bytes + failed.requested_bytes)
        advices = [*others, *advices] if of_layers else [*advices, RECOMPUTE]
    if phase is Phase.EVALUATION and activations > 2 * failed.requested_bytes:
        advices.reverse()  # activations for a backward pass, or outputs, take most
    if phase in (Phase.STATES, Phase.OPTIMIZER):
        advices.append(WEIGHTS_IN_16_BITS)
    elif phase in _STEP and failed.fixed_share > _MOSTLY_FIXED:
        states = [advice for advice in BY_PHASE[Phase.STATES] if advice.helps]
        has_states = bool(failed.held_bytes.get(Category.OPTIMIZER_STATE))
        advices = [*(states if has_states else ()), WEIGHTS_IN_16_BITS, *advices]
    stakes = _stakes(failed)
    return [
        replace(advice, text=f"{advice.text} That is {format_bytes(stakes[advice.change])} here.")
        if stakes.get(advice.change)
        else advice
        for advice in dict.fromkeys(advices)
    ]


def _stakes(failed: Failure) -> dict[str, int]:
    """Return the bytes in use or requested that each change concerns."""
    held, requested = failed.held_bytes, failed.requested_bytes
    stakes = {STATES_IN_8_BITS.change: held.get(Category.OPTIMIZER_STATE, 0) * 3 // 4}
    if failed.phase is Phase.OPTIMIZER:
        lists = held.get(Category.OPTIMIZER_TEMPORARY, 0) + requested
        stakes |= {FUSED.change: lists, ONE_BY_ONE.change: lists}
    if failed.phase is Phase.LOSS:
        stakes[CHUNKED_LOSS.change] = failed.loss_bytes + requested
    if failed.phase in _STEP:
        stakes[RECOMPUTE.change] = held.get(Category.ACTIVATION, 0) - failed.loss_bytes
    return {change: count for change, count in stakes.items() if count > 0}
