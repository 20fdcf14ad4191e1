"""Which blocks stay where, what that promises, and what would be needed when nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from brim.core import Decision, Hardware, Plan, Promise
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.techniques.weight_streaming import FROM_DISK, FROM_RAM, NAME, RESIDENT, RING_SLOTS, STAGING_SLOTS
from brim.units import format_bytes

_RING_SLOTS = 2  # one in use, one under way: more would only take residents away while the link is the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """A block as the planner sees it. ``uses`` per step; 0: its rows are looked up where it rests."""

    name: str
    bytes: int  # of its buffer in the compute tier
    uses: int = 1
    compute_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be planned: blocks in execution order, and what a step needs beside them.

    ``fixed_bytes`` stays in the compute tier for good (loose parameters, buffers, KV cache); ``step_bytes`` is the
    peak of activations and temporaries; ``spent_bytes`` is what the program takes per tier beside tensors (imports,
    tokenizer, library workspaces); ``bounce_bytes`` of RAM serve reads that cannot go straight to their place.
    """

    model: str
    task: str
    blocks: Sequence[BlockCost]
    fixed_bytes: int
    step_bytes: int
    fixed_compute_s: float = 0.0
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    bounce_bytes: int = 0


def plan_streaming(job: Job, hardware: Hardware, budget_bytes: Mapping[str, int]) -> Plan:
    """The placement with the fewest streamed bytes that fits ``budget_bytes`` (per tier).

    Raises BudgetError with the smallest budget that would do when nothing fits.
    """
    compute = hardware.compute
    room = budget_bytes[compute] - _overhead(job, compute) - job.fixed_bytes - job.step_bytes
    placed = _best_residents(job.blocks, room)
    if placed is None:
        raise _too_small(job, compute, budget_bytes)
    residents, slot_bytes = placed
    homes = _homes(job, residents, hardware, budget_bytes)
    choices = {b.name: RESIDENT if b.name in residents else homes[b.name] for b in job.blocks}
    settings = {RING_SLOTS: _RING_SLOTS if slot_bytes else 0}
    if compute != RAM and FROM_DISK in choices.values():
        settings[STAGING_SLOTS] = 2
    decisions = [Decision(technique=NAME, block=b.name, choice=choices[b.name], bytes=b.bytes) for b in job.blocks]
    peak = _peak_bytes(job, compute, choices, slot_bytes)
    promise = replace(_seconds(job, hardware, choices), peak_bytes=peak)
    return Plan(
        model=job.model,
        hardware=hardware.name,
        task=job.task,
        budget_bytes=dict(budget_bytes),
        decisions=tuple(decisions),
        promise=promise,
        settings=settings,
    )


def smallest_budget(job: Job, compute: str) -> int:
    """The least bytes of the compute tier under which any placement exists."""
    slots = [_RING_SLOTS * size + _mandatory(job.blocks, size) for size in _slot_sizes(job.blocks)]
    return _overhead(job, compute) + job.fixed_bytes + job.step_bytes + min(slots)


def _overhead(job: Job, tier: str) -> int:
    bounce = job.bounce_bytes if tier == RAM else 0
    return job.spent_bytes.get(tier, 0) + bounce


def _slot_sizes(blocks: Sequence[BlockCost]) -> list[int]:
    """Sizes worth trying for a ring slot: none at all (everything resident), or one that some block fills."""
    return sorted({0, *(b.bytes for b in blocks if b.uses)})


def _mandatory(blocks: Sequence[BlockCost], slot_bytes: int) -> int:
    """Bytes of the blocks that no slot of this size can hold."""
    return sum(b.bytes for b in blocks if b.uses and b.bytes > slot_bytes)


def _best_residents(blocks: Sequence[BlockCost], room: int) -> tuple[set[str], int] | None:
    """The residents that leave the fewest bytes to stream, and the slot size; None when nothing fits."""
    best: tuple[int, set[str], int] | None = None
    for size in _slot_sizes(blocks):
        left = room - _RING_SLOTS * size - _mandatory(blocks, size)
        if left < 0:
            continue
        residents = {b.name for b in blocks if b.uses and b.bytes > size}
        residents |= _spread([b for b in blocks if b.uses and b.bytes <= size], left)
        held = sum(b.bytes for b in blocks if b.name in residents)
        residents |= {b.name for b in blocks if not b.uses and held + b.bytes + _RING_SLOTS * size <= room}
        streamed = sum(b.bytes * b.uses for b in blocks if b.name not in residents)
        if best is None or streamed < best[0]:
            best = streamed, residents, size
    return None if best is None else (best[1], best[2] if best[0] else 0)


def _spread(blocks: Sequence[BlockCost], room: int) -> set[str]:
    """As many of ``blocks`` as ``room`` holds, evenly spread, so that every stretch of compute hides a load."""
    fits = 0
    used = 0
    for block in sorted(blocks, key=lambda b: b.bytes):
        if used + block.bytes > room:
            break
        used, fits = used + block.bytes, fits + 1
    if fits == 0:
        return set()
    # Evenly spaced positions; where blocks differ in size these may not all fit, so the total is watched.
    positions = sorted({int((i + 0.5) * len(blocks) / fits) for i in range(fits)})
    order = positions + [i for i in range(len(blocks)) if i not in set(positions)]
    chosen: set[str] = set()
    for index in order:
        if blocks[index].bytes <= room:
            room -= blocks[index].bytes
            chosen.add(blocks[index].name)
    return chosen


def _homes(job: Job, residents: set[str], hardware: Hardware, budget_bytes: Mapping[str, int]) -> dict[str, str]:
    """Streamed block -> where it rests: RAM as far as it reaches (also evenly spread), then disk."""
    streamed = [b for b in job.blocks if b.name not in residents]
    if hardware.compute == RAM:
        return {b.name: FROM_DISK for b in streamed}
    room = budget_bytes[RAM] - _overhead(job, RAM)
    if sum(b.bytes for b in streamed) > room:
        room -= 2 * max(b.bytes for b in streamed)  # the staging slots
    in_ram = _spread(streamed, max(room, 0))
    on_disk = [b for b in streamed if b.name not in in_ram]
    if on_disk and room < 0:
        raise BudgetError(
            f"{job.model} was to run with {format_bytes(budget_bytes[RAM])} of RAM.",
            f"Two blocks on their way from disk alone need {format_bytes(-room)} more.",
            smallest_bytes={RAM: budget_bytes[RAM] - room},
        )
    return {b.name: FROM_RAM if b.name in in_ram else FROM_DISK for b in streamed}


def _peak_bytes(job: Job, compute: str, choices: Mapping[str, str], slot_bytes: int) -> dict[str, int]:
    held = sum(b.bytes for b in job.blocks if choices[b.name] == RESIDENT)
    peak = {compute: _overhead(job, compute) + job.fixed_bytes + job.step_bytes + held + _RING_SLOTS * slot_bytes}
    if compute != RAM:
        on_disk = [b.bytes for b in job.blocks if choices[b.name] == FROM_DISK]
        in_ram = sum(b.bytes for b in job.blocks if choices[b.name] == FROM_RAM)
        peak[RAM] = _overhead(job, RAM) + in_ram + 2 * max(on_disk, default=0)
    return peak


def _seconds(job: Job, hardware: Hardware, choices: Mapping[str, str]) -> Promise:
    """Steady-state seconds per step, the least that the hardware allows, and what sets it."""
    compute_s = job.fixed_compute_s + sum(b.compute_s for b in job.blocks)
    lanes: dict[str, float] = {"compute": compute_s}
    loads: dict[str, float] = {}
    for block in job.blocks:
        loads[block.name] = 0.0
        if not block.uses:
            continue
        for source, target in _ways(choices[block.name], hardware.compute):
            took_s = block.bytes / hardware.link(source, target).bytes_per_s
            lane = f"{source} -> {target}"
            lanes[lane] = lanes.get(lane, 0.0) + took_s * block.uses
            loads[block.name] = max(loads[block.name], took_s)
    limited_by = max(lanes, key=lambda lane: lanes[lane])
    step_s = job.fixed_compute_s + _pipeline_s(job.blocks, loads)
    return Promise(
        peak_bytes={}, step_s=max(step_s, lanes[limited_by]), bound_s=lanes[limited_by], limited_by=limited_by
    )


def _ways(choice: str, compute: str) -> list[tuple[str, str]]:
    if choice == RESIDENT:
        return []
    last = [] if compute == RAM else [(RAM, compute)]
    return [(DISK, RAM), *last] if choice == FROM_DISK else last


def _pipeline_s(blocks: Sequence[BlockCost], loads: Mapping[str, float]) -> float:
    """Seconds of one step in the steady state: two cyclic steps of loads into a ring of slots, beside compute."""
    link_free = now = first_end = 0.0
    freed = [0.0] * _RING_SLOTS  # when each slot was last let go, oldest first
    for step in range(3):
        for block in blocks:
            load_s = loads[block.name]
            if load_s:
                link_free = max(link_free, freed.pop(0)) + load_s
                now = max(now, link_free)
            now += block.compute_s
            if load_s:
                freed.append(now)
        if step == 1:
            first_end = now
    return now - first_end


def _too_small(job: Job, compute: str, budget_bytes: Mapping[str, int]) -> BudgetError:
    need = smallest_budget(job, compute)
    flag = "--vram" if compute == VRAM else "--ram"
    parts = [
        f"{format_bytes(_overhead(job, compute))} for the program itself",
        f"{format_bytes(job.fixed_bytes)} that always stays",
        f"{format_bytes(job.step_bytes)} of activations",
    ]
    return BudgetError(
        f"{job.model} was to run with {format_bytes(budget_bytes[compute])} of {compute.upper()}.",
        f"It needs {format_bytes(need)} at least: {', '.join(parts)}, and two blocks.",
        f"Give {flag} {-(-need // (1 << 20))}MiB or more, or a shorter input.",
        smallest_bytes={compute: need},
    )
