"""Place blocks in tiers by a linear program over their kinds, exact and with a lower bound on the seconds.

A pass lasts at least as long as its chain of computation, as each link is busy, and as RAM is read; the processor
and a link that read RAM slow each other. The program decides how many blocks of a kind each of them gets. It does
not decide which: a link that has filled its ring waits. So blocks swap choices, or get others, while that brings the
simulated pass nearer to the bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planning.solver.passes import (
    CPU,
    STAGING,
    BlockCost,
    Job,
    bus_bytes_per_s,
    chain_s,
    contention,
    move_s,
    pass_s,
    ways_of,
)
from brim.planning.solver.problem import Beside, BlockClass, Column, Counts, Pool, Problem
from brim.planning.solver.schedule import COMPUTE, lane_of
from brim.planning.solver.search import solve
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT

_RING, _STAGING, _ACTIVATIONS = "ring", "staging", "activations in RAM"
_LOADING = f"{RAM}@loading"  # RAM while residents pass through it
_READ = "ram is read"
_SLOTS = (2, 3, 4)
_TRIED_BLOCKS = 40_000  # blocks simulated while swaps are tried, and as many with changes: about a second each
_MENDED = 5e-2  # of a pass: changes rarely save more
_FUTILE = 200  # changes that gain nothing one after the other: more gain nothing either
_PLACES = 4  # a block swaps with one of its nearest so many; swaps over a distance disturb more than they mend
_NEAR = 4e-3  # of the bound: a pass as near to it is not improved further
_LOOKUP_S = 1e-4  # a drive's page: makes free RAM cheaper than a drive for a table

Kinds = dict[tuple[object, ...], list[BlockCost]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Block -> choice, and the ring's depth. No placement that fits has a pass below ``bound_s``."""

    choices: Mapping[str, str]
    slots: int
    bound_s: float
    gap: float


def least_s(job: Job, hardware: Hardware, budget_bytes: Mapping[str, int], allowed: Collection[str]) -> float:
    """Return a lower bound on the seconds of a pass; infinite where no placement fits."""
    kinds, bounds = _kinds(job), [float("inf")]
    for slots in (0, *_SLOTS):
        solution = solve(_problem(job, kinds, hardware, budget_bytes, allowed, slots), traffic=0.0)
        bounds += [] if solution is None else [solution.bound_s]
    return min(bounds)


def placements(
    job: Job,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    allowed: Collection[str],
    *,
    fits: Callable[[Mapping[str, str], int], bool],
    known_s: float = float("inf"),
) -> Iterator[Placed]:
    """Yield the best placement by ``allowed`` choices for each ring depth, and without a ring.

    ``fits`` returns True for choices that are possible within the budget at a ring depth. Placements far from
    ``known_s``, the seconds of another plan, are not improved.
    """
    kinds, solutions = _kinds(job), []
    for slots in (0, *_SLOTS):
        solution = solve(_problem(job, kinds, hardware, budget_bytes, allowed, slots))
        if solution is not None:
            choices = _spread(job, kinds, solution.counts)
            solutions.append((slots, solution, (choices, pass_s(job, hardware, choices, slots)[0])))
    for slots, solution, placed in sorted(solutions, key=lambda entry: entry[2][1]):
        if solution.bound_s < known_s and placed[1] <= (1 + _MENDED) * known_s:
            placed = _changed(job, hardware, kinds, placed, slots, fits, solution.bound_s * (1 + _NEAR))
        choices, seconds = placed
        streams = any(b.uses and ways_of(choices[b.name], hardware.compute) for b in job.blocks)
        if bool(slots) == streams:
            known_s = min(known_s, seconds)
            yield Placed(choices=choices, slots=slots, bound_s=solution.bound_s, gap=solution.gap)


def _changed(
    job: Job,
    hardware: Hardware,
    kinds: Kinds,
    placed: tuple[dict[str, str], float],
    slots: int,
    fits: Callable[[Mapping[str, str], int], bool],
    enough_s: float,
) -> tuple[dict[str, str], float]:
    """Swap the choices of two blocks, or give one or two others of those in use, while a pass is no slower and fits.

    ``placed`` has choices and the seconds of a pass. Changes are drawn at random with a fixed seed.
    """
    choices, seconds = placed
    drawn, futile = random.Random(0), 0
    alike = [[b.name for b in blocks] for blocks in kinds.values() if blocks[0].uses]
    mixed = [names for names in alike if len({choices[name] for name in names}) > 1]
    names = [name for blocks in alike for name in blocks]
    used = sorted({choices[name] for name in names})
    tries = _TRIED_BLOCKS // len(names) if len(used) > 1 else 0
    for swaps in [True] * (tries if mixed else 0) + [False] * tries:
        if seconds <= enough_s or futile == _FUTILE:
            break
        if swaps:
            first, second = _neighbours(drawn, drawn.choice(mixed), choices)
            tried = {**choices, first: choices[second], second: choices[first]}
        else:
            futile += 1
            tried = {**choices, **{drawn.choice(names): drawn.choice(used) for _ in range(2)}}
            if not fits(tried, slots):
                continue
        took_s, _ = pass_s(job, hardware, tried, slots)
        if took_s < seconds or (swaps and took_s == seconds):
            choices, seconds, futile = tried, took_s, 0
    return choices, seconds


def _neighbours(drawn: random.Random, names: Sequence[str], choices: Mapping[str, str]) -> tuple[str, str]:
    """Draw two neighbours of ``names`` with different choices."""
    at = drawn.randrange(len(names))
    others = [index for index, name in enumerate(names) if choices[name] != choices[names[at]]]
    nearest = sorted(others, key=lambda index: abs(index - at))[:_PLACES]
    return names[at], names[drawn.choice(nearest)]


def _kinds(job: Job) -> Kinds:
    """Group blocks of equal bytes and seconds."""
    kinds: Kinds = {}
    for block in job.blocks:
        times = (f"{block.compute_s:.6g}", f"{block.cpu_s:.6g}", f"{block.overhead_s:.6g}", f"{block.likely:.6g}")
        kinds.setdefault((block.bytes, block.uses, block.cpu_bytes, *times), []).append(block)
    return kinds


def _problem(
    job: Job,
    kinds: Kinds,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    allowed: Collection[str],
    slots: int,
) -> Problem:
    compute = hardware.compute
    choices = [choice for choice in allowed if slots or choice in (RESIDENT, COMPUTE_RAM)]
    classes = []
    for name, blocks in kinds.items():
        # A look-up table may rest in any tier.
        possible = choices if blocks[0].uses else [RESIDENT, FROM_DISK, *([FROM_RAM] if compute != RAM else [])]
        columns = [column for choice in possible for column in _columns(job, blocks[0], choice, hardware)]
        classes.append(BlockClass(name=repr(name), count=len(blocks), columns=columns))
    fixed = {compute: job.overhead_bytes(compute) + job.fixed_bytes + job.step_bytes}
    budget = {tier: budget_bytes[tier] for tier in {compute, RAM}}
    pools = [Pool(name=_RING, tiers=(compute,), slots=slots)]
    if compute != RAM:
        fixed |= {RAM: job.overhead_bytes(RAM), _LOADING: job.overhead_bytes(RAM) + job.passage_bytes}
        budget[_LOADING] = budget[RAM]
        pools.append(Pool(name=_STAGING, tiers=(RAM, _LOADING), slots=STAGING))
        pools.append(Pool(name=_ACTIVATIONS, tiers=(RAM,), slots=1))
    return Problem(
        classes=classes,
        budget_bytes=budget,
        fixed_bytes=fixed,
        fixed_s={COMPUTE: job.fixed_compute_s},
        pools=pools,
        beside=_beside(job, hardware) if compute != RAM and COMPUTE_RAM in choices else None,
    )


def _beside(job: Job, hardware: Hardware) -> Beside:
    """Describe how processor and link, both reading RAM, slow each other; the processor's blocks release no slot."""
    shares = contention(hardware)
    link = hardware.link(RAM, hardware.compute)
    lane = lane_of(RAM, hardware.compute)
    uses = max((block.uses for block in job.blocks), default=1)
    return Beside(
        chain=COMPUTE,
        columns={COMPUTE_RAM},
        other=lane,
        part_share=shares.get((CPU, lane), 1.0),
        other_share=shares.get((lane, CPU), 1.0),
        pool=_RING,
        s_per_byte=uses / link.bytes_per_s,
        slot_s=uses * link.latency_s,
    )


def _columns(job: Job, block: BlockCost, choice: str, hardware: Hardware) -> Iterator[Column]:
    compute = hardware.compute
    if choice == COMPUTE_RAM and (not block.cpu_s or compute == RAM):
        return
    if choice == FROM_RAM and compute == RAM:
        return
    bytes_by_choice = {RESIDENT: {compute: block.bytes}, FROM_RAM: {RAM: block.bytes}, FROM_DISK: {}}
    bytes_by_choice[COMPUTE_RAM] = {RAM: block.bytes + block.cpu_bytes}
    if not block.uses:
        seconds = {lane_of(DISK, RAM): _LOOKUP_S} if choice == FROM_DISK else {}
        yield Column(name=choice, bytes=bytes_by_choice[choice], seconds=seconds)
        return
    seconds = {COMPUTE: chain_s(block, choice)}
    ways = ways_of(choice, compute)
    for source, target in ways:
        seconds[lane_of(source, target)] = move_s(block, hardware, source, target)
    rate = bus_bytes_per_s(hardware) if compute != RAM else 0.0
    if rate and choice != RESIDENT:
        seconds[_READ] = block.moved_bytes / rate
    slot_bytes = {_RING: block.bytes} if ways else {}
    if choice == COMPUTE_RAM and job.cpu_step_bytes:
        slot_bytes[_ACTIVATIONS] = job.cpu_step_bytes
    if (DISK, RAM) in ways and compute != RAM:
        slot_bytes[_STAGING] = block.passing_bytes
    yield Column(name=choice, bytes=bytes_by_choice[choice], seconds=seconds, slot_bytes=slot_bytes)


def _spread(job: Job, kinds: Kinds, solved: Counts) -> dict[str, str]:
    """Spread each kind's counts evenly over its blocks, so that every stretch of compute hides a load."""
    chosen: dict[str, str] = {}
    for name, blocks in kinds.items():
        counts = solved[repr(name)]
        due = dict.fromkeys(counts, 0.0)
        left = dict(counts)
        for block in blocks:
            for choice, count in counts.items():
                due[choice] += count / len(blocks)
            choice = max((c for c in left if left[c]), key=lambda c: due[c])
            due[choice] -= 1.0
            left[choice] -= 1
            chosen[block.name] = choice
    return {block.name: chosen[block.name] for block in job.blocks}
