"""Which blocks stay where, what that promises, and what would be needed when nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from brim.core import Decision, Hardware, Plan, Promise
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.techniques.weight_streaming import FROM_DISK, FROM_RAM, NAME, RESIDENT, RING_SLOTS, STAGING_SLOTS
from brim.units import format_bytes

_CHOICES = (RESIDENT, FROM_RAM, FROM_DISK)
# One slot in use and one under way is the least. More even out blocks of unequal size; each takes residents away.
_RING_SLOTS = (2, 3, 4)

_STAGING_SLOTS = 2  # in RAM, between disk and VRAM: one being read into, one being copied from


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """A block as the planner sees it. ``uses`` per step; 0: its rows are looked up where it rests.

    ``overhead_s`` is what streaming it costs beside the bytes: hooks and requests.
    """

    name: str
    bytes: int  # of its buffer in the compute tier
    uses: int = 1
    compute_s: float = 0.0
    overhead_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be planned: blocks in execution order, and what a step needs beside them.

    ``fixed_bytes`` stays in the compute tier for good (loose parameters, buffers, KV cache); ``step_bytes`` is the
    peak of activations and temporaries; ``spent_bytes`` is what the program takes per tier beside tensors (imports,
    tokenizer, library workspaces); ``bounce_bytes`` of RAM serve reads that cannot go straight to their place, and
    through ``passage_bytes`` of it residents come from disk to VRAM, one at a time.
    """

    model: str
    task: str
    blocks: Sequence[BlockCost]
    fixed_bytes: int
    step_bytes: int
    fixed_compute_s: float = 0.0
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    bounce_bytes: int = 0
    passage_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """One way to place the blocks: block -> choice, and the ring that the streamed ones need."""

    choices: Mapping[str, str]
    slot_bytes: int
    slots: int

    @property
    def ring_bytes(self) -> int:
        return self.slot_bytes * self.slots


def plan_streaming(job: Job, hardware: Hardware, budget_bytes: Mapping[str, int]) -> Plan:
    """The fastest placement that fits ``budget_bytes`` (per tier), over slot sizes and ring depths.

    Raises BudgetError with the smallest budget that would do when nothing fits.
    """
    compute = hardware.compute
    room = budget_bytes[compute] - _overhead(job, compute) - job.fixed_bytes - job.step_bytes
    found: list[tuple[Promise, _Placement]] = []
    refusals: list[BudgetError] = []
    for residents, slot_bytes, slots in _resident_sets(job.blocks, room):
        try:
            placement = _place(job, residents, slot_bytes, slots, hardware, budget_bytes)
        except BudgetError as error:  # too little RAM for this one
            refusals.append(error)
            continue
        found.append((_seconds(job, hardware, placement), placement))
    if not found:
        least = min(refusals, key=lambda error: sum(error.smallest_bytes.values()), default=None)
        raise least or _too_small(job, compute, budget_bytes)
    # Of equally fast ones (sums of seconds differ by their rounding), the one that keeps link and drive quieter.
    promise, placement = min(found, key=lambda pair: (float(f"{pair[0].step_s:.9g}"), _streamed_bytes(job, pair[1])))
    settings = {RING_SLOTS: placement.slots}
    if compute != RAM and FROM_DISK in placement.choices.values():
        settings[STAGING_SLOTS] = _STAGING_SLOTS
    return Plan(
        model=job.model,
        hardware=hardware.name,
        task=job.task,
        budget_bytes=dict(budget_bytes),
        decisions=tuple(
            Decision(technique=NAME, block=b.name, choice=placement.choices[b.name], bytes=b.bytes)
            for b in job.blocks
        ),
        promise=replace(promise, peak_bytes=_peak_bytes(job, compute, placement)),
        settings=settings,
    )


def smallest_budget(job: Job, compute: str) -> int:
    """The least bytes of the compute tier under which any placement exists."""
    held = [min(_RING_SLOTS) * size + _mandatory(job.blocks, size) for size in _slot_sizes(job.blocks)]
    return _overhead(job, compute) + job.fixed_bytes + job.step_bytes + min(held)


def _overhead(job: Job, tier: str) -> int:
    bounce = job.bounce_bytes if tier == RAM else 0
    return job.spent_bytes.get(tier, 0) + bounce


def _slot_sizes(blocks: Sequence[BlockCost]) -> list[int]:
    """Sizes worth trying for a ring slot: none at all (everything resident), or one that some block fills."""
    return sorted({0, *(b.bytes for b in blocks if b.uses)})


def _mandatory(blocks: Sequence[BlockCost], slot_bytes: int) -> int:
    """Bytes of the blocks that no slot of this size can hold."""
    return sum(b.bytes for b in blocks if b.uses and b.bytes > slot_bytes)


def _resident_sets(blocks: Sequence[BlockCost], room: int) -> Iterator[tuple[set[str], int, int]]:
    """Residents, slot size and number of slots that fit into ``room``: one for each size and number worth trying."""
    used = [b for b in blocks if b.uses]
    for size in _slot_sizes(blocks):
        for slots in _RING_SLOTS if size else (0,):
            left = room - slots * size - _mandatory(blocks, size)
            if left < 0:
                continue
            residents = {b.name for b in used if b.bytes > size}
            residents |= _spread([b for b in used if b.bytes <= size], left)
            left = room - slots * size - sum(b.bytes for b in used if b.name in residents)
            residents |= _spread([b for b in blocks if not b.uses], left)
            yield residents, size, slots


def _spread(blocks: Sequence[BlockCost], room: int) -> set[str]:
    """About ``room`` bytes of ``blocks``, evenly spread, so that every stretch of compute hides a load."""
    total = sum(block.bytes for block in blocks)
    if total <= room:
        return {block.name for block in blocks}
    chosen: set[str] = set()
    credit, left = 0.0, room
    for block in blocks:
        credit += block.bytes * room / total
        if credit >= block.bytes / 2 and block.bytes <= left:
            chosen.add(block.name)
            credit -= block.bytes
            left -= block.bytes
    for block in sorted(blocks, key=lambda b: -b.bytes):
        if block.name not in chosen and block.bytes <= left:
            chosen.add(block.name)
            left -= block.bytes
    return chosen


def _place(
    job: Job, residents: set[str], slot_bytes: int, slots: int, hardware: Hardware, budget_bytes: Mapping[str, int]
) -> _Placement:
    homes = _homes(job, residents, hardware, budget_bytes)
    choices = {b.name: RESIDENT if b.name in residents else homes[b.name] for b in job.blocks}
    streams = any(b.uses and b.name not in residents for b in job.blocks)
    return _Placement(choices=choices, slot_bytes=slot_bytes if streams else 0, slots=slots if streams else 0)


def _homes(job: Job, residents: set[str], hardware: Hardware, budget_bytes: Mapping[str, int]) -> dict[str, str]:
    """Streamed block -> where it rests: RAM as far as it reaches (also evenly spread), then disk."""
    streamed = [b for b in job.blocks if b.name not in residents]
    if hardware.compute == RAM:
        return {b.name: FROM_DISK for b in streamed}
    room = budget_bytes[RAM] - _overhead(job, RAM)
    used = [b for b in streamed if b.uses]
    whole, staging = sum(b.bytes for b in used), _STAGING_SLOTS * max((b.bytes for b in used), default=0)
    if max(whole, job.passage_bytes) <= room:
        in_ram = {b.name for b in used} | _spread([b for b in streamed if not b.uses], room - whole)
    elif staging + job.passage_bytes <= room:
        in_ram = _spread(used, room - staging)
    else:
        smallest = min(max(whole, job.passage_bytes), staging + job.passage_bytes) + _overhead(job, RAM)
        raise BudgetError(
            f"{job.model} was to run with {format_bytes(budget_bytes[RAM])} of RAM.",
            f"It needs {format_bytes(smallest)} at least for blocks on their way to {hardware.compute.upper()}.",
            f"Give --ram {-(-smallest // (1 << 20))}MiB or more.",
            smallest_bytes={RAM: smallest},
        )
    return {b.name: FROM_RAM if b.name in in_ram else FROM_DISK for b in streamed}


def _peak_bytes(job: Job, compute: str, placement: _Placement) -> dict[str, int]:
    by_choice = {choice: [b.bytes for b in job.blocks if placement.choices[b.name] == choice] for choice in _CHOICES}
    held = sum(by_choice[RESIDENT]) + placement.ring_bytes
    peak = {compute: _overhead(job, compute) + job.fixed_bytes + job.step_bytes + held}
    if compute != RAM:
        on_disk = [b.bytes for b in job.blocks if placement.choices[b.name] == FROM_DISK and b.uses]
        staging = _STAGING_SLOTS * max(on_disk, default=0)
        peak[RAM] = _overhead(job, RAM) + staging + max(sum(by_choice[FROM_RAM]), job.passage_bytes)
    return peak


def _seconds(job: Job, hardware: Hardware, placement: _Placement) -> Promise:
    """Steady-state seconds per step, the least that the hardware allows, and what sets it."""
    compute_s = job.fixed_compute_s + sum(b.compute_s for b in job.blocks)
    lanes: dict[str, float] = {"compute": compute_s}
    loads: dict[str, float] = {}
    for block in job.blocks:
        loads[block.name] = 0.0
        if not block.uses:
            continue
        for source, target in _ways(placement.choices[block.name], hardware.compute):
            took_s = block.bytes / hardware.link(source, target).bytes_per_s
            lane = f"{source} -> {target}"
            lanes[lane] = lanes.get(lane, 0.0) + took_s * block.uses
            loads[block.name] = max(loads[block.name], took_s)
    limited_by = max(lanes, key=lambda lane: lanes[lane])
    step_s = job.fixed_compute_s + _pipeline_s(job.blocks, loads, placement.slots)
    bound_s = lanes[limited_by]
    return Promise(peak_bytes={}, step_s=max(step_s, bound_s), bound_s=bound_s, limited_by=limited_by)


def _streamed_bytes(job: Job, placement: _Placement) -> int:
    return sum(b.bytes * b.uses for b in job.blocks if placement.choices[b.name] != RESIDENT)


def _ways(choice: str, compute: str) -> list[tuple[str, str]]:
    if choice == RESIDENT:
        return []
    last = [] if compute == RAM else [(RAM, compute)]
    return [(DISK, RAM), *last] if choice == FROM_DISK else last


def _pipeline_s(blocks: Sequence[BlockCost], loads: Mapping[str, float], slots: int) -> float:
    """Seconds of one step in the steady state: cyclic loads into a ring of slots, beside compute."""
    link_free = now = first_end = 0.0
    freed = [0.0] * slots  # when each slot was last let go, oldest first
    for step in range(3):
        for block in blocks:
            load_s = loads[block.name]
            if load_s:
                link_free = max(link_free, freed.pop(0)) + load_s
                now = max(now, link_free)
            now += block.compute_s
            if load_s:
                now += block.overhead_s
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
