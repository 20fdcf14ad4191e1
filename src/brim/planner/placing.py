"""Where blocks are to lie, as a linear program over their kinds: exact, and with a bound on what is possible.

A pass lasts at least as long as its chain of computation, as each link is busy, and as RAM is read, by the processor
or by a link. So with blocks that the processor may compute, what is decided is how much each of them gets: both end
together where that is the fastest. What the two take from each other while they read the same RAM is not linear: from
the program's answer on, blocks go from the processor to the link for as long as the simulated pass gets shorter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planner.passes import (
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
from brim.planner.problem import Beside, BlockClass, Column, Pool, Problem
from brim.planner.schedule import COMPUTE, way
from brim.planner.search import Solution, solve
from brim.techniques.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT

_RING, _STAGING, _ACTIVATIONS = "ring", "staging", "activations in RAM"
_LOADING = f"{RAM}@loading"  # RAM while residents pass through it
_READ = "ram is read"
_SLOTS = (2, 3, 4)
_HANDED = (8, 2, 1)  # blocks at once
_LOOKUP_S = 1e-4  # a page of a drive: what rests there for nothing would be dearer than in RAM that is free


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Block -> choice, and the depth of the ring. Nothing that fits has a pass below ``bound_s``."""

    choices: Mapping[str, str]
    slots: int
    bound_s: float
    gap: float


def least_s(job: Job, hardware: Hardware, budget_bytes: Mapping[str, int], allowed: Collection[str]) -> float:
    """No placement that fits has a shorter pass; infinite where none fits."""
    kinds, bounds = _kinds(job), [float("inf")]
    for slots in (0, *_SLOTS):
        solution = solve(_problem(job, kinds, hardware, budget_bytes, allowed, slots), traffic=0.0)
        bounds += [] if solution is None else [solution.bound_s]
    return min(bounds)


def placements(
    job: Job, hardware: Hardware, budget_bytes: Mapping[str, int], allowed: Collection[str]
) -> Iterator[Placed]:
    """The best placement for each depth of the ring, and without one. Only ``allowed`` choices are made."""
    kinds = _kinds(job)
    for slots in (0, *_SLOTS):
        solution = solve(_problem(job, kinds, hardware, budget_bytes, allowed, slots))
        if solution is not None:
            choices = _balanced(job, hardware, kinds, solution, slots)
            streams = any(b.uses and ways_of(choices[b.name], hardware.compute) for b in job.blocks)
            if bool(slots) == streams:
                yield Placed(choices=choices, slots=slots, bound_s=solution.bound_s, gap=solution.gap)


def _balanced(
    job: Job, hardware: Hardware, kinds: Mapping[tuple[object, ...], list[BlockCost]], solution: Solution, slots: int
) -> dict[str, str]:
    """The choices of the solution, with as many blocks of a kind handed from the processor to the link as help.

    Only kinds of which some come over the link already: nothing takes more memory than the solution does.
    """
    counts = {name: dict(chosen) for name, chosen in solution.counts.items()}
    best = _spread(job, kinds, counts)
    mixed = {name: chosen for name, chosen in counts.items() if chosen.get(COMPUTE_RAM) and chosen.get(FROM_RAM)}
    best_s = pass_s(job, hardware, best, slots)[0] if mixed else 0.0
    for name, chosen in mixed.items():
        for count in _HANDED:
            while chosen[COMPUTE_RAM] > count:
                moved = {COMPUTE_RAM: chosen[COMPUTE_RAM] - count, FROM_RAM: chosen[FROM_RAM] + count}
                made = _spread(job, kinds, {**counts, name: {**chosen, **moved}})
                seconds = pass_s(job, hardware, made, slots)[0]
                if seconds >= best_s:
                    break
                chosen.update(moved)
                best, best_s = made, seconds
    return best


def _kinds(job: Job) -> dict[tuple[object, ...], list[BlockCost]]:
    """Blocks that are alike."""
    found: dict[tuple[object, ...], list[BlockCost]] = {}
    for block in job.blocks:
        times = (f"{block.compute_s:.6g}", f"{block.cpu_s:.6g}", f"{block.overhead_s:.6g}", f"{block.likely:.6g}")
        found.setdefault((block.bytes, block.uses, block.cpu_bytes, *times), []).append(block)
    return found


def _problem(
    job: Job,
    kinds: Mapping[tuple[object, ...], list[BlockCost]],
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    allowed: Collection[str],
    slots: int,
) -> Problem:
    compute = hardware.compute
    choices = [choice for choice in allowed if slots or choice in (RESIDENT, COMPUTE_RAM)]
    classes = []
    for name, blocks in kinds.items():
        # A table that is only looked up in may rest wherever it likes.
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
    """The processor's blocks and the link read one RAM. While the processor has a block, no slot is let go."""
    shares = contention(hardware) if job.beside is None else job.beside
    link = hardware.link(RAM, hardware.compute)
    lane = way(RAM, hardware.compute)
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
    held = {RESIDENT: {compute: block.bytes}, FROM_RAM: {RAM: block.bytes}, FROM_DISK: {}}
    held[COMPUTE_RAM] = {RAM: block.bytes + block.cpu_bytes}
    if not block.uses:
        seconds = {way(DISK, RAM): _LOOKUP_S} if choice == FROM_DISK else {}
        yield Column(name=choice, bytes=held[choice], seconds=seconds)
        return
    seconds = {COMPUTE: chain_s(block, choice)}
    ways = ways_of(choice, compute)
    for source, target in ways:
        seconds[way(source, target)] = move_s(block, hardware, source, target)
    rate = bus_bytes_per_s(hardware) if compute != RAM else 0.0
    if rate and choice != RESIDENT:
        seconds[_READ] = block.moved_bytes / rate
    slot_bytes = {_RING: block.bytes} if ways else {}
    if choice == COMPUTE_RAM and job.cpu_step_bytes:
        slot_bytes[_ACTIVATIONS] = job.cpu_step_bytes
    if (DISK, RAM) in ways and compute != RAM:
        slot_bytes[_STAGING] = block.bytes
    yield Column(name=choice, bytes=held[choice], seconds=seconds, slot_bytes=slot_bytes)


def _spread(
    job: Job, kinds: Mapping[tuple[object, ...], list[BlockCost]], solved: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
    """Counts -> blocks: of each kind evenly in turn, so that every stretch of compute hides a load."""
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
