"""What each technique of a training plan saves and costs, and what would save more: told from the profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from brim.core.hardware import DISK, RAM
from brim.planning.solver.cost_model import held_bytes, peak_bytes
from brim.planning.solver.step_profile import FULL, KEEP, OFFLOAD, SELECTIVE, Frame, StepProfile, Way
from brim.planning.strategy.choice import CHUNK_TOKENS, GRADIENTS, IN_BACKWARD, MICRO_BATCH, STATES
from brim.planning.strategy.ladder import CHUNK_TOKENS as TOKENS_AT_ONCE
from brim.planning.strategy.search import Planner
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT

_LEAST_BYTES = 1 << 20  # less is not worth a line
_ROUNDING = 1e-9  # of a sum of floating-point seconds


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One technique of a proposal.

    Attributes:
        technique: Its name: ``"weight_streaming"``, ``"checkpointing"``, ...
        what: What it does here, in words.
        saves_bytes: What it saves of each tier; negative where it takes.
        costs_s: Seconds of a step that it costs.
    """

    technique: str
    what: str
    saves_bytes: Mapping[str, int] = field(default_factory=dict)
    costs_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        saves = dict(self.saves_bytes)
        return {"technique": self.technique, "what": self.what, "saves_bytes": saves, "costs_s": self.costs_s}


def effects(planner: Planner, way: Way) -> list[Effect]:
    """For each technique in ``way``: what the step would take without it, per tier and in seconds."""
    with_it_s, rows = planner.seconds(way), []
    for technique, what, without in _used(planner.profile, way):
        saves = _saved(planner, without, way)
        costs_s = _difference_s(with_it_s, planner.seconds(without))
        rows.append(Effect(technique=technique, what=what, saves_bytes=saves, costs_s=costs_s))
    return rows


def frees(planner: Planner, way: Way) -> list[Effect]:
    """What else would make room in some tier, and what it would cost: cheapest per byte first."""
    now_s, candidates = planner.seconds(way), []
    for technique, what, changed in _unused(planner, way):
        saves = _saved(planner, way, changed)
        if any(count >= _LEAST_BYTES for count in saves.values()):
            costs_s = _difference_s(planner.seconds(changed), now_s)
            candidates.append(Effect(technique=technique, what=what, saves_bytes=saves, costs_s=costs_s))
    return sorted(candidates, key=lambda effect: effect.costs_s / max(effect.saves_bytes.values()))


def _difference_s(one_s: float, other_s: float) -> float:
    """How much longer ``one_s`` is; 0 where that is no more than the rounding of sums of seconds."""
    return 0.0 if math.isclose(one_s, other_s, rel_tol=_ROUNDING) else one_s - other_s


def _saved(planner: Planner, before: Way, after: Way) -> dict[str, int]:
    """By how much each tier's peak is smaller after than before; negative where it is larger."""
    peaks = [peak_bytes(held_bytes(planner.profile, planner.hardware, way)) for way in (before, after)]
    tiers = dict.fromkeys([*peaks[0], *peaks[1]])
    saved = {tier: peaks[0].get(tier, 0) - peaks[1].get(tier, 0) for tier in tiers}
    return {tier: count for tier, count in saved.items() if count}


def _used(profile: StepProfile, way: Way) -> Iterator[tuple[str, str, Way]]:
    """Technique, what it does, and the way without it."""
    yield from _frame_used(profile, way)
    total = len(way.weights)
    for kept in (SELECTIVE, FULL, OFFLOAD):
        chosen = [name for name, choice in way.activations.items() if choice == kept]
        if chosen:
            offloads = kept == OFFLOAD
            technique = activation_offload.NAME if offloads else checkpointing.NAME
            what = f"{len(chosen)} of {total} blocks" + ("" if offloads else f", {kept}")
            yield technique, what, replace(way, activations={**way.activations, **dict.fromkeys(chosen, KEEP)})
    for choice in (FROM_RAM, FROM_DISK):
        chosen = [name for name, other in way.weights.items() if other == choice]
        if chosen:
            what = f"{len(chosen)} of {total} blocks from {choice.rpartition(':')[2].upper()}"
            without = replace(way, weights={**way.weights, **dict.fromkeys(chosen, RESIDENT)})
            yield weight_streaming.NAME, what, without


def _frame_used(profile: StepProfile, way: Way) -> Iterator[tuple[str, str, Way]]:
    frame = way.frame

    def without(**changes: object) -> Way:
        return replace(way, frame=replace(frame, **changes))  # type: ignore[arg-type]  # fields of Frame

    if frame.micro_batch < profile.batch:
        what = f"{frame.micro_batch} of {profile.batch} rows at once"
        yield MICRO_BATCH, what, without(micro_batch=profile.batch)
    if frame.chunked:
        yield CHUNK_TOKENS, f"logits of {TOKENS_AT_ONCE} tokens at once", without(chunked=False)
    if frame.in_backward:
        yield IN_BACKWARD, "each block as soon as it has its gradients", without(in_backward=False)
    if frame.states != KEEP:
        yield STATES, f"states in {frame.states.upper()}", without(states=KEEP, gradients=KEEP)
    if frame.gradients != KEEP:
        yield GRADIENTS, f"gradients in {frame.gradients.upper()}", without(gradients=KEEP)


def _unused(planner: Planner, way: Way) -> Iterator[tuple[str, str, Way]]:
    """One step further with each technique, as far as the limits allow."""
    for technique, what, changed in _further(planner.profile, planner.hardware.compute, way):
        if planner.limits.allow(changed.frame) and _may(planner, changed):
            yield technique, what, changed


def _may(planner: Planner, way: Way) -> bool:
    limits = planner.limits
    streams = any(choice != RESIDENT for choice in way.weights.values())
    return (limits.streams or not streams) and set(way.activations.values()) <= {KEEP, *limits.activations}


def _further(profile: StepProfile, compute: str, way: Way) -> Iterator[tuple[str, str, Way]]:
    frame = way.frame
    if frame.micro_batch > 1:
        half = frame.micro_batch // 2
        yield MICRO_BATCH, f"{half} rows at once", _framed(way, micro_batch=half)
    if not frame.chunked and profile.head_bytes:
        yield CHUNK_TOKENS, f"logits of {TOKENS_AT_ONCE} tokens at once", _framed(way, chunked=True)
    if not frame.in_backward:
        yield IN_BACKWARD, "each block updated as soon as it has its gradients", _framed(way, in_backward=True)
    for place in (RAM, DISK):
        if frame.states != place != compute and frame.states != DISK:
            yield STATES, f"states in {place.upper()}", _framed(way, states=place)
    blocks = {block.name: block for block in profile.blocks}

    def treat(kept: str, possible: Callable[[str], bool]) -> Mapping[str, str]:
        names = [name for name, now in way.activations.items() if now == KEEP and possible(name)]
        return dict.fromkeys(names, kept)

    for kept in (SELECTIVE, FULL):
        more = treat(kept, lambda name, kept=kept: kept in blocks[name].kept_bytes)  # type: ignore[misc]
        if more:
            what = f"{len(more)} blocks more, {kept}"
            yield checkpointing.NAME, what, replace(way, activations={**way.activations, **more})
    more = treat(OFFLOAD, lambda name: bool(blocks[name].offload_bytes))
    if more:
        yield (
            activation_offload.NAME,
            f"{len(more)} blocks more",
            replace(way, activations={**way.activations, **more}),
        )
    home = FROM_DISK if compute == RAM else FROM_RAM
    resident = [name for name, choice in way.weights.items() if choice == RESIDENT]
    half_of_them = resident[::2] if len(resident) > 1 else []
    if half_of_them:
        weights = {**way.weights, **dict.fromkeys(half_of_them, home)}
        what = f"{len(half_of_them)} blocks more from {home.rpartition(':')[2].upper()}"
        yield weight_streaming.NAME, what, replace(way, weights=weights)


def _framed(way: Way, **changes: object) -> Way:
    frame: Frame = replace(way.frame, **changes)  # type: ignore[arg-type]  # fields of Frame
    return replace(way, frame=frame)
