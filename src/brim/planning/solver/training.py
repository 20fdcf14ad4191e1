"""Find the fastest choices for a training step within a budget, from a profile of the plain step.

A step can have its peak at two moments: where backward begins (activations), and in the update (gradients and
states). Every tier is limited at both. A trace of the step with the techniques applied then gives the exact bytes;
``corrections`` take the difference into the next search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planning.proof import ENDLESS_BYTES
from brim.planning.solver.cost_model import WHOLE, choices, frames, held_bytes, kinds, peak_bytes, problem
from brim.planning.solver.search import Solution, solve
from brim.planning.solver.step_profile import FULL, KEEP, Assignment, Frame, Limits, Shape, StepProfile
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT

_RING_SLOTS = (2, 3)
_CLOSE = 1 / 64  # the precision of the smallest budget


def shapes(profile: StepProfile, hardware: Hardware, limits: Limits) -> Iterator[Shape]:
    """Yield every shape that is worth a search, large micro-batches first."""
    sizes = [profile.batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    ordered = limits.fixed.get("micro_batch")
    if isinstance(ordered, int):
        sizes = [ordered]
    places = (KEEP, DISK) if hardware.compute == RAM else (KEEP, RAM, DISK)
    backward = limits.fixed.get("in_backward")
    for size, states, slots in product(sizes, places, _RING_SLOTS if limits.streams else _RING_SLOTS[:1]):
        if not (limits.states_leave or states == KEEP) or limits.fixed.get("states", states) != states:
            continue
        if slots != limits.fixed.get("slots", slots):
            continue
        moved = states != KEEP and limits.single_pass and backward is None
        for in_backward in (None, True) if moved else (None,):
            yield Shape(micro_batch=size, slots=slots, states=states, in_backward=in_backward)


def best(profile: StepProfile, hardware: Hardware, limits: Limits) -> Iterator[Assignment]:
    """Yield the best choices of every shape in which some fit, sorted by the seconds of the busiest lane."""
    solved = [solve_shape(profile, hardware, limits, shape) for shape in shapes(profile, hardware, limits)]
    yield from sorted((each for each in solved if each is not None), key=lambda each: each.bound_s)


def solve_shape(profile: StepProfile, hardware: Hardware, limits: Limits, shape: Shape) -> Assignment | None:
    """Return the choices of this shape with the least busy busiest lane; None where none fit."""
    possible = frames(hardware, limits, profile, shape)
    if not possible:
        return None
    solution = solve(problem(profile, hardware, limits, shape, possible))
    if solution is None:
        return None
    (chosen,) = solution.counts[WHOLE]
    return _assignment(profile, shape, possible[chosen], solution)


def baselines(profile: StepProfile, hardware: Hardware, limits: Limits) -> Iterator[Assignment]:
    """Yield the allowed baselines: all resident; checkpointing only; all streamed from RAM or from disk."""
    names = [block.name for block in profile.blocks]
    keep = dict.fromkeys(names, KEEP)
    full = {block.name: FULL if FULL in block.kept_bytes else KEEP for block in profile.blocks}
    size = limits.fixed.get("micro_batch", profile.batch)
    assert isinstance(size, int)
    states = str(limits.fixed.get("states", KEEP))
    plain = Frame(micro_batch=size, states=states)
    candidates = [(plain, RESIDENT, keep), (plain, RESIDENT, full)]
    trained = limits.single_pass and any(block.trained_bytes for block in profile.blocks)
    for home in (FROM_DISK,) if hardware.compute == RAM else (FROM_RAM, FROM_DISK):
        place = states if "states" in limits.fixed else DISK if home == FROM_DISK else RAM
        away = replace(plain, states=place, in_backward=True) if trained else plain
        candidates += [(away, home, keep), (away, home, full)]
    for frame, weights, activations in candidates:
        allowed = all((weights, activations[b.name]) in choices(b, hardware.compute, limits) for b in profile.blocks)
        if allowed and limits.allow(frame):
            yield Assignment(frame=frame, weights=dict.fromkeys(names, weights), activations=activations)


def smallest(profile: StepProfile, hardware: Hardware, limits: Limits) -> tuple[dict[str, int], Assignment] | None:
    """Return the smallest budget of each tier that is short, and choices that fit it; None where none ever fit.

    The GPU's budget is raised up to its capacity; else RAM's, then both, then the disk's, and last beyond the GPU's
    capacity.
    """
    compute = hardware.compute
    capacity = ENDLESS_BYTES if compute == RAM else hardware.tier(compute).capacity_bytes
    capacity = max(capacity, limits.budget_bytes.get(compute, 0))
    for lifted in (
        {compute: capacity},
        {RAM: ENDLESS_BYTES},
        {compute: capacity, RAM: ENDLESS_BYTES},
        {compute: capacity, RAM: ENDLESS_BYTES, DISK: ENDLESS_BYTES},
        {compute: ENDLESS_BYTES, RAM: ENDLESS_BYTES, DISK: ENDLESS_BYTES},
    ):
        tiers = [tier for tier in lifted if tier in limits.budget_bytes]
        roomy = _with(limits, {tier: lifted[tier] for tier in tiers})
        if _first(profile, hardware, roomy) is not None:
            return _shrunk(profile, hardware, roomy, tiers)
    return None


def _shrunk(
    profile: StepProfile, hardware: Hardware, limits: Limits, lifted: list[str]
) -> tuple[dict[str, int], Assignment] | None:
    """Find the smallest budget by bisection, one tier after the other."""
    for tier in lifted:
        unlimited = _first(profile, hardware, limits)
        if unlimited is None:  # the program ran out of nodes
            return None
        high = (
            peak_bytes(held_bytes(profile, hardware, unlimited)).get(tier, 0) + _corrected(limits, tier) + (1 << 20)
        )
        low = 0
        most = limits.budget_bytes[tier]
        while high < most and _first(profile, hardware, _with(limits, {tier: high})) is None:
            low, high = high, min(2 * high, most)  # the program's tolerance may need more
        while high - low > max(1 << 16, int(high * _CLOSE)):
            middle = (low + high) // 2
            if _first(profile, hardware, _with(limits, {tier: middle})) is None:
                low = middle
            else:
                high = middle
        limits = _with(limits, {tier: high})
    limited = _first(profile, hardware, limits)
    return None if limited is None else ({tier: limits.budget_bytes[tier] for tier in lifted}, limited)


def _corrected(limits: Limits, tier: str) -> int:
    return max(0, limits.corrections.get(tier, 0))


def _with(limits: Limits, budget_bytes: Mapping[str, int]) -> Limits:
    return replace(limits, budget_bytes={**limits.budget_bytes, **budget_bytes})


def _first(profile: StepProfile, hardware: Hardware, limits: Limits) -> Assignment | None:
    """Return any choices that fit, searched at the fewest rows and at all rows, which need no sum of gradients."""
    candidates = (shape for shape in shapes(profile, hardware, limits) if shape.in_backward is None)
    least = [shape for shape in candidates if shape.slots == min(_RING_SLOTS)]
    sizes = {min(shape.micro_batch for shape in least), max(shape.micro_batch for shape in least)} if least else set()
    for shape in least:
        if shape.micro_batch in sizes:
            assignment = solve_shape(profile, hardware, limits, shape)
            if assignment is not None:
                return assignment
    return None


def _assignment(profile: StepProfile, shape: Shape, frame: Frame, solution: Solution) -> Assignment:
    weights: dict[str, str] = {}
    activations: dict[str, str] = {}
    blocks = profile.at(shape.micro_batch).blocks
    order = {block.name: index for index, block in enumerate(blocks)}
    for members in kinds(blocks):
        names = sorted((block.name for block in members), key=order.__getitem__)
        for name, column in zip(names, _spread(solution.counts[members[0].name], len(names)), strict=True):
            weights[name], activations[name] = column.split()
    return Assignment(
        frame=frame,
        weights={name: weights[name] for name in order},
        activations={name: activations[name] for name in order},
        bound_s=solution.bound_s,
        gap=solution.gap,
    )


def _spread(counts: Mapping[str, int], total: int) -> list[str]:
    """Spread the columns evenly, so that each stretch of compute hides its share of copies."""
    credit = dict.fromkeys(counts, 0.0)
    left, choices = dict(counts), []
    for _ in range(total):
        for name in counts:
            credit[name] += counts[name] / total
        chosen = max((name for name in counts if left[name]), key=lambda name: credit[name])
        credit[chosen] -= 1.0
        left[chosen] -= 1
        choices.append(chosen)
    return choices
