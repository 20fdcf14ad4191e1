"""Estimate from the profile what each technique of a training plan saves and costs, and what would save more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from brim.core.hardware import DISK, RAM
from brim.planning.solver.cost_model import held_bytes, peak_bytes
from brim.planning.solver.step_profile import (
    FULL,
    FULL_OFFLOAD,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    Assignment,
    Frame,
    StepProfile,
)
from brim.planning.strategy.choice import (
    BLOCK_ROWS,
    CHUNK_TOKENS,
    GRADIENTS,
    IN_BACKWARD,
    MICRO_BATCH,
    STATES,
    TOKENS_AT_ONCE,
)
from brim.planning.strategy.search import TrainingSearch
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT

_LEAST_BYTES = 1 << 20  # smaller savings are not listed
_ROUNDING = 1e-9  # of a sum of floating-point seconds


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A technique of a proposal.

    Attributes:
        technique: Its name: ``"weight_streaming"``, ``"checkpointing"``, ...
        what: Its use here, in words.
        saves_bytes: Bytes that it saves per tier; negative where it needs more.
        costs_s: Seconds of a step that it costs.
    """

    technique: str
    what: str
    saves_bytes: Mapping[str, int] = field(default_factory=dict)
    costs_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        saves = dict(self.saves_bytes)
        return {"technique": self.technique, "what": self.what, "saves_bytes": saves, "costs_s": self.costs_s}


def effects(search: TrainingSearch, assignment: Assignment) -> list[Effect]:
    """Return the bytes that each technique of ``assignment`` saves, and the seconds that it costs."""
    with_it_s, rows = search.seconds(assignment), []
    for technique, what, without in _used(search.profile, assignment):
        saves = _saved(search, without, assignment)
        costs_s = _difference_s(with_it_s, search.seconds(without))
        rows.append(Effect(technique=technique, what=what, saves_bytes=saves, costs_s=costs_s))
    return rows


def frees(search: TrainingSearch, assignment: Assignment) -> list[Effect]:
    """Return further techniques that would save bytes of a tier, the cheapest in seconds per byte first."""
    now_s, candidates = search.seconds(assignment), []
    for technique, what, changed in _unused(search, assignment):
        saves = _saved(search, assignment, changed)
        if any(count >= _LEAST_BYTES for count in saves.values()):
            costs_s = _difference_s(search.seconds(changed), now_s)
            candidates.append(Effect(technique=technique, what=what, saves_bytes=saves, costs_s=costs_s))
    return sorted(candidates, key=lambda effect: effect.costs_s / max(effect.saves_bytes.values()))


def _difference_s(longer_s: float, shorter_s: float) -> float:
    """Return ``longer_s - shorter_s``; 0 where that is within the rounding of sums."""
    return 0.0 if math.isclose(longer_s, shorter_s, rel_tol=_ROUNDING) else longer_s - shorter_s


def _saved(search: TrainingSearch, before: Assignment, after: Assignment) -> dict[str, int]:
    """Return the decrease of each tier's peak; negative where it grows."""
    peaks = [peak_bytes(held_bytes(search.profile, search.hardware, assignment)) for assignment in (before, after)]
    tiers = dict.fromkeys([*peaks[0], *peaks[1]])
    saved = {tier: peaks[0].get(tier, 0) - peaks[1].get(tier, 0) for tier in tiers}
    return {tier: count for tier, count in saved.items() if count}


def _used(profile: StepProfile, assignment: Assignment) -> Iterator[tuple[str, str, Assignment]]:
    """Yield each technique in use, its use in words, and the assignment without it."""
    yield from _frame_used(profile, assignment)
    total = len(assignment.weights)
    for technique, words, less in (
        (checkpointing.NAME, f", {SELECTIVE}", {SELECTIVE: KEEP}),
        (checkpointing.NAME, f", {FULL}", {FULL: KEEP, FULL_OFFLOAD: OFFLOAD}),
        (activation_offload.NAME, "", {OFFLOAD: KEEP, FULL_OFFLOAD: FULL}),
    ):
        activations = {name: less.get(choice, choice) for name, choice in assignment.activations.items()}
        if count := sum(choice in less for choice in assignment.activations.values()):
            yield technique, f"{count} of {total} blocks{words}", replace(assignment, activations=activations)
    for choice in (FROM_RAM, FROM_DISK):
        chosen = [name for name, other in assignment.weights.items() if other == choice]
        if chosen:
            what = f"{len(chosen)} of {total} blocks from {choice.rpartition(':')[2].upper()}"
            without = replace(assignment, weights={**assignment.weights, **dict.fromkeys(chosen, RESIDENT)})
            yield weight_streaming.NAME, what, without


def _frame_used(profile: StepProfile, assignment: Assignment) -> Iterator[tuple[str, str, Assignment]]:
    frame = assignment.frame

    def without(**changes: object) -> Assignment:
        return replace(assignment, frame=replace(frame, **changes))  # type: ignore[arg-type]  # fields of Frame

    if frame.micro_batch < profile.batch:
        what = f"{frame.micro_batch} of {profile.batch} rows at once"
        yield MICRO_BATCH, what, without(micro_batch=profile.batch)
    if frame.block_rows:
        what = f"checkpointed blocks take {frame.block_rows} of {frame.micro_batch} rows at once"
        yield BLOCK_ROWS, what, without(block_rows=0)
    if frame.chunked:
        yield CHUNK_TOKENS, f"logits of {TOKENS_AT_ONCE} tokens at once", without(chunked=False)
    if frame.in_backward:
        yield IN_BACKWARD, "each block as soon as it has its gradients", without(in_backward=False)
    if frame.states != KEEP:
        what = f"states in {frame.states.upper()}, updated by the {'GPU' if frame.gpu_sixteenths else 'CPU'}"
        yield STATES, what, without(states=KEEP, gradients=KEEP, gpu_sixteenths=0)
    if frame.gradients != KEEP:
        yield GRADIENTS, f"gradients in {frame.gradients.upper()}", without(gradients=KEEP)


def _unused(search: TrainingSearch, assignment: Assignment) -> Iterator[tuple[str, str, Assignment]]:
    """Yield each technique taken a step further, as far as the limits allow."""
    for technique, what, changed in _further(search.profile, search.hardware.compute, assignment):
        if search.limits.allow(changed.frame) and _may(search, changed):
            yield technique, what, changed


def _may(search: TrainingSearch, assignment: Assignment) -> bool:
    limits = search.limits
    streams = any(choice != RESIDENT for choice in assignment.weights.values())
    return (limits.streams or not streams) and set(assignment.activations.values()) <= {KEEP, *limits.activations}


def _further(profile: StepProfile, compute: str, assignment: Assignment) -> Iterator[tuple[str, str, Assignment]]:
    frame = assignment.frame
    if frame.micro_batch > 1:
        half = frame.micro_batch // 2
        yield MICRO_BATCH, f"{half} rows at once", _framed(assignment, micro_batch=half)
    if not frame.chunked and profile.head_bytes:
        yield CHUNK_TOKENS, f"logits of {TOKENS_AT_ONCE} tokens at once", _framed(assignment, chunked=True)
    if not frame.in_backward:
        yield IN_BACKWARD, "each block updated as soon as it has its gradients", _framed(assignment, in_backward=True)
    for place in (RAM, DISK):
        if frame.states != place != compute and frame.states != DISK:
            yield STATES, f"states in {place.upper()}", _framed(assignment, states=place, gpu_sixteenths=0)
    blocks = {block.name: block for block in profile.blocks}

    def treat(choice: str, possible: Callable[[str], bool]) -> Mapping[str, str]:
        names = [name for name, now in assignment.activations.items() if now == KEEP and possible(name)]
        return dict.fromkeys(names, choice)

    for choice in (SELECTIVE, FULL):
        more = treat(choice, lambda name, choice=choice: choice in blocks[name].kept_bytes)  # type: ignore[misc]
        if more:
            what = f"{len(more)} blocks more, {choice}"
            yield checkpointing.NAME, what, replace(assignment, activations={**assignment.activations, **more})
    more = treat(OFFLOAD, lambda name: bool(blocks[name].offload_bytes))
    if more:
        yield (
            activation_offload.NAME,
            f"{len(more)} blocks more",
            replace(assignment, activations={**assignment.activations, **more}),
        )
    home = FROM_DISK if compute == RAM else FROM_RAM
    resident = [name for name, choice in assignment.weights.items() if choice == RESIDENT]
    half_of_them = resident[::2] if len(resident) > 1 else []
    if half_of_them:
        weights = {**assignment.weights, **dict.fromkeys(half_of_them, home)}
        what = f"{len(half_of_them)} blocks more from {home.rpartition(':')[2].upper()}"
        yield weight_streaming.NAME, what, replace(assignment, weights=weights)


def _framed(assignment: Assignment, **changes: object) -> Assignment:
    frame: Frame = replace(assignment.frame, **changes)  # type: ignore[arg-type]  # fields of Frame
    return replace(assignment, frame=frame)
