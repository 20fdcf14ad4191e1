"""Place a model's blocks within a budget, promise peaks and seconds, or name the smallest budget that does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from brim.core import Decision, Hardware, Plan, Promise
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError
from brim.planning.solver.passes import STAGING, BlockCost, Job, chain_s, move_s, pass_s, ways_of
from brim.planning.solver.placing import placements
from brim.planning.solver.schedule import COMPUTE, lane_of
from brim.techniques.streaming.placement import COMPUTE_RAM
from brim.techniques.streaming.weight_streaming import FROM_DISK, FROM_RAM, NAME, RESIDENT, RING_SLOTS, STAGING_SLOTS
from brim.units import format_bytes

CHOICES = (RESIDENT, FROM_RAM, FROM_DISK, COMPUTE_RAM)
# At least a slot in use and one being filled. More smooth out blocks of unequal size, but leave less for residents.
_RING_SLOTS = (2, 3, 4)
_SIMULATED = 12  # placements that are simulated, the best by a quick estimate, beside the simple ones


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """A placement of the blocks: block -> choice, and the ring of the streamed ones.

    ``simple``: a baseline without a planner.
    """

    choices: Mapping[str, str]
    slot_bytes: int
    slots: int
    simple: bool = False

    @property
    def ring_bytes(self) -> int:
        return self.slot_bytes * self.slots

    def ways(self, job: Job, compute: str) -> dict[str, list[tuple[str, str]]]:
        """Return the links that load each block in every step: none where all streamed blocks fit into the ring."""
        ways = self.ways_at_first(job, compute)
        if sum(map(bool, ways.values())) <= self.slots:
            return {name: [] for name in ways}
        return ways

    def ways_at_first(self, job: Job, compute: str) -> dict[str, list[tuple[str, str]]]:
        """Return the links that load each block in the first step, in which the ring is empty."""
        return {block.name: ways_of(self.choices[block.name], compute) if block.uses else [] for block in job.blocks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A plan, and its bytes over links per step."""

    plan: Plan
    moved_bytes: float

    def order(self) -> tuple[float, float, int]:
        """Return the key by which plans are sorted: seconds, and of equal ones bytes moved and held."""
        promise = self.plan.promise
        return _round_s(promise.step_s), self.moved_bytes, sum(promise.peak_bytes.values())


def contender(
    job: Job,
    hardware: Hardware,
    budget_bytes: Mapping[str, int],
    *,
    allowed: Collection[str] = CHOICES,
    known_s: float = float("inf"),
) -> Contender:
    """Return the fastest placement within ``budget_bytes`` (per tier) over slot sizes and ring depths.

    Of equally fast plans it is the one that moves the fewest bytes. Blocks get only ``allowed`` choices; look-up
    tables rest where there is room. ``placing`` decides how many blocks a processor beside a GPU computes, and spends
    little time where that is far from ``known_s``, the seconds of another plan. Raises BudgetError with the smallest
    sufficient budget where nothing fits.
    """
    placements, refusals = _candidates(job, hardware, budget_bytes, allowed, known_s)
    if not placements:
        least = min(refusals, key=lambda error: sum(error.smallest_bytes.values()), default=None)
        raise least or _too_small(job, hardware.compute, budget_bytes)
    return _best(job, hardware, budget_bytes, placements)


def _best(job: Job, hardware: Hardware, budget_bytes: Mapping[str, int], fitting: Sequence[_Placement]) -> Contender:
    """Return the fastest candidate by its simulated schedule; every simple one that could be it is simulated."""
    # Ties (seconds are rounded, as sums differ in their last digits) go to the one that moves fewer bytes.
    ordered = sorted(fitting, key=lambda p: (_round_s(_quick_s(job, hardware, p)), _moved_bytes(job, hardware, p)))
    best: Contender | None = None
    for count, placement in enumerate(ordered):
        moved_bytes = _moved_bytes(job, hardware, placement)
        late = count >= _SIMULATED and not placement.simple
        if best is not None and (
            late or (_round_s(_least_s(job, hardware, placement)), moved_bytes) >= best.order()[:2]
        ):
            continue
        plan = plan_of(job, hardware, budget_bytes, placement.choices, placement.slots)
        new = Contender(plan=plan, moved_bytes=moved_bytes)
        best = new if best is None else min(best, new, key=Contender.order)
    assert best is not None
    return best


def _round_s(seconds: float) -> float:
    return float(f"{seconds:.9g}")


def plan_of(
    job: Job, hardware: Hardware, budget_bytes: Mapping[str, int], choices: Mapping[str, str], slots: int
) -> Plan:
    """Return the plan with these ``choices`` (block -> choice); its promise is simulated."""
    placement = _Placement(choices=choices, slot_bytes=_slot_bytes(job, hardware.compute, choices), slots=slots)
    lanes = _lanes(job, hardware, placement)
    limited_by = max(lanes, key=lambda lane: lanes[lane])
    step_s, _ = pass_s(job, hardware, choices, slots)
    settings = {RING_SLOTS: slots}
    if hardware.compute != RAM and FROM_DISK in choices.values():
        settings[STAGING_SLOTS] = STAGING
    return Plan(
        model=job.model,
        hardware=hardware.name,
        task=job.task,
        budget_bytes=dict(budget_bytes),
        decisions=tuple(
            Decision(technique=NAME, block=b.name, choice=choices[b.name], bytes=b.bytes) for b in job.blocks
        ),
        promise=Promise(
            peak_bytes=_peak_bytes(job, hardware.compute, placement),
            step_s=max(step_s, lanes[limited_by]),
            bound_s=lanes[limited_by],
            limited_by=limited_by,
        ),
        settings=settings,
    )


def _candidates(
    job: Job, hardware: Hardware, budget_bytes: Mapping[str, int], allowed: Collection[str], known_s: float
) -> tuple[list[_Placement], list[BudgetError]]:
    """Return the placements that fit, and the errors of those that do not."""
    compute = hardware.compute
    room = budget_bytes[compute] - job.overhead_bytes(compute) - job.fixed_bytes - job.step_bytes
    candidates: list[_Placement] = []
    refusals: list[BudgetError] = []
    sets = [(False, resident) for resident in _resident_sets(job.blocks, room, allowed)]
    if RESIDENT in allowed:  # the baseline: all streamed
        sets += [(True, resident) for resident in _resident_sets(job.blocks, room, set(allowed) - {RESIDENT})]
    for simple, (residents, slot_bytes, slots) in sets:
        try:
            placement = replace(_place(job, residents, slot_bytes, slots, hardware, budget_bytes), simple=simple)
        except BudgetError as error:  # too little RAM
            refusals.append(error)
            continue
        used_choices = {placement.choices[block.name] for block in job.blocks if block.uses}
        if used_choices <= set(allowed) - ({RESIDENT} if simple else set()):
            candidates.append(placement)
    stays = any(set(placement.choices.values()) == {RESIDENT} for placement in candidates)  # nothing beats that
    if compute != RAM and not stays and COMPUTE_RAM in allowed and any(block.cpu_s for block in job.blocks):

        def fits(choices: Mapping[str, str], slots: int) -> bool:
            tried = _Placement(choices=choices, slot_bytes=_slot_bytes(job, compute, choices), slots=slots)
            able = all(block.cpu_s for block in job.blocks if choices[block.name] == COMPUTE_RAM)
            return able and all(n <= budget_bytes[tier] for tier, n in _peak_bytes(job, compute, tried).items())

        for placed in placements(job, hardware, budget_bytes, allowed, fits=fits, known_s=known_s):
            size = _slot_bytes(job, compute, placed.choices)
            split = _Placement(choices=placed.choices, slot_bytes=size, slots=placed.slots)
            candidates.append(_with_tables(job, compute, split, budget_bytes))
    return candidates, refusals


def _with_tables(job: Job, compute: str, placement: _Placement, budget_bytes: Mapping[str, int]) -> _Placement:
    """Move look-up tables from disk to RAM as far as there is room: a page's read costs a token too little time for
    the linear program to notice."""
    for block in job.blocks:
        if block.uses or placement.choices[block.name] != FROM_DISK:
            continue
        moved = replace(placement, choices={**placement.choices, block.name: FROM_RAM})
        if _peak_bytes(job, compute, moved)[RAM] <= budget_bytes[RAM]:
            placement = moved
    return placement


def _slot_bytes(job: Job, compute: str, choices: Mapping[str, str]) -> int:
    """Return the bytes of a ring slot: the largest streamed block."""
    return max((b.bytes for b in job.blocks if b.uses and ways_of(choices[b.name], compute)), default=0)


def smallest_budget(job: Job, compute: str) -> int:
    """Return the least bytes of the compute tier under which a placement exists."""
    sizes = [min(_RING_SLOTS) * size + _mandatory(job.blocks, size) for size in _slot_sizes(job.blocks)]
    return job.overhead_bytes(compute) + job.fixed_bytes + job.step_bytes + min(sizes)


def _slot_sizes(blocks: Sequence[BlockCost]) -> list[int]:
    """Return the slot sizes worth trying: 0 (everything resident), or the size of a block."""
    return sorted({0, *(b.bytes for b in blocks if b.uses)})


def _mandatory(blocks: Sequence[BlockCost], slot_bytes: int) -> int:
    """Return the bytes of blocks that are larger than a slot."""
    return sum(b.bytes for b in blocks if b.uses and b.bytes > slot_bytes)


def _resident_sets(
    blocks: Sequence[BlockCost], room: int, allowed: Collection[str]
) -> Iterator[tuple[set[str], int, int]]:
    """Yield residents, slot size and number of slots within ``room``, for each size and number worth trying."""
    used = [b for b in blocks if b.uses]
    for size in _slot_sizes(blocks):
        for slots in _RING_SLOTS if size else (0,):
            left = room - slots * size - _mandatory(blocks, size)
            if left < 0:
                continue
            residents = {b.name for b in used if b.bytes > size}
            if RESIDENT in allowed:
                residents |= _spread([b for b in used if b.bytes <= size], left)
            left = room - slots * size - sum(b.bytes for b in used if b.name in residents)
            residents |= _spread([b for b in blocks if not b.uses], left)
            yield residents, size, slots


def _spread(blocks: Sequence[BlockCost], room: int) -> set[str]:
    """Choose about ``room`` bytes of ``blocks``, evenly spread, so that every stretch of compute hides a load."""
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
    """Return where each streamed block rests: in RAM as far as there is room (evenly spread), else on disk."""
    streamed = [b for b in job.blocks if b.name not in residents]
    if hardware.compute == RAM:
        return {b.name: FROM_DISK for b in streamed}
    always = job.spent_bytes.get(RAM, 0) + job.bounce_in((), hardware.compute)
    room, bounce = budget_bytes[RAM] - always, job.overhead_bytes(RAM) - always
    used = [b for b in streamed if b.uses]
    whole, staging = sum(b.bytes for b in used), STAGING * max((b.passing_bytes for b in used), default=0)
    whole += bounce if used else 0
    if max(whole, job.passage_bytes) <= room:
        tables = [b for b in streamed if not b.uses]
        in_ram = {b.name for b in used} | _spread(tables, room - whole - (0 if used else bounce))
    elif staging + job.passage_bytes <= room:
        in_ram = _spread(used, room - staging - bounce)
    else:
        smallest = min(max(whole, job.passage_bytes), staging + job.passage_bytes) + always
        raise BudgetError(
            f"Cannot run {job.model} with {format_bytes(budget_bytes[RAM])} of RAM.",
            f"It needs at least {format_bytes(smallest)} for blocks on their way to {hardware.compute.upper()}.",
            f"Give --ram {-(-smallest // (1 << 20))}MiB or more.",
            smallest_bytes={RAM: smallest},
        )
    return {b.name: FROM_RAM if b.name in in_ram else FROM_DISK for b in streamed}


def _peak_bytes(job: Job, compute: str, placement: _Placement) -> dict[str, int]:
    by_choice = {choice: [b for b in job.blocks if placement.choices[b.name] == choice] for choice in CHOICES}
    compute_bytes = sum(b.bytes for b in by_choice[RESIDENT]) + placement.ring_bytes
    peak = {compute: job.overhead_bytes(compute) + job.fixed_bytes + job.step_bytes + compute_bytes}
    if compute != RAM:
        on_disk = [b.passing_bytes for b in by_choice[FROM_DISK] if b.uses]
        staging = STAGING * max(on_disk, default=0)
        resting = sum(b.bytes for b in by_choice[FROM_RAM])
        resting += sum(b.bytes + b.cpu_bytes for b in by_choice[COMPUTE_RAM])
        resting += job.cpu_step_bytes if by_choice[COMPUTE_RAM] else 0
        bounce = job.bounce_in(placement.choices.values(), compute)
        at_once = bounce if job.fills_ram else 0  # other bounce buffers are allocated after residents have loaded
        loading = max(resting + bounce - at_once, job.passage_bytes)
        peak[RAM] = job.spent_bytes.get(RAM, 0) + at_once + staging + loading
    return peak


def _lanes(job: Job, hardware: Hardware, placement: _Placement) -> dict[str, float]:
    """Return each lane's busy seconds in a step."""
    choices, ways = placement.choices, placement.ways(job, hardware.compute)
    lanes = {COMPUTE: job.fixed_compute_s}
    for block in job.blocks:
        if not block.uses:
            continue
        lanes[COMPUTE] += block.cpu_s if choices[block.name] == COMPUTE_RAM else block.compute_s
        for source, target in ways[block.name]:
            took_s = move_s(block, hardware, source, target)
            lanes[lane_of(source, target)] = lanes.get(lane_of(source, target), 0.0) + took_s
    return lanes


def _moved_bytes(job: Job, hardware: Hardware, placement: _Placement) -> float:
    """Return the bytes over all links in a first step: blocks that the ring would keep count, residents do not."""
    ways = placement.ways_at_first(job, hardware.compute)
    return sum(block.moved_bytes * len(ways[block.name]) for block in job.blocks)


def _quick_s(job: Job, hardware: Hardware, placement: _Placement) -> float:
    """Estimate the steady seconds of a step for ranking: a block's load counts on its slowest link alone."""
    loads, ways = dict[str, float](), placement.ways(job, hardware.compute)
    for block in job.blocks:
        loads[block.name] = max((move_s(block, hardware, *way) for way in ways[block.name]), default=0.0)
    lanes = _lanes(job, hardware, placement)
    return max(_pipeline_s(job, placement.choices, loads, placement.slots), *lanes.values())


def _least_s(job: Job, hardware: Hardware, placement: _Placement) -> float:
    """Return a lower bound on the seconds of ``placement``: contention only slows lanes."""
    chain = sum(chain_s(block, placement.choices[block.name]) for block in job.blocks if block.uses)
    lanes = _lanes(job, hardware, placement)
    least = max(job.fixed_compute_s + chain, *lanes.values())
    ways = set(map(tuple, placement.ways(job, hardware.compute).values()))
    if len(ways - {()}) <= 1 and all(len(way) <= 1 for way in ways):  # the quicker estimate is exact
        least = max(least, _quick_s(job, hardware, placement))
    return least


def _pipeline_s(job: Job, choices: Mapping[str, str], loads: Mapping[str, float], slots: int) -> float:
    """Return the steady seconds of a step whose loads into a ring overlap with compute."""
    link_free = now = first_end = 0.0
    freed = [0.0] * slots  # when each slot was last released, oldest first
    for step in range(3):
        now += job.fixed_compute_s
        for block in job.blocks:
            load_s = loads[block.name]
            if load_s:
                link_free = max(link_free, freed.pop(0)) + load_s
                now = max(now, link_free)
            now += chain_s(block, choices[block.name]) if block.uses else 0.0
            if load_s:
                freed.append(now)
        if step == 1:
            first_end = now
    return now - first_end


def _too_small(job: Job, compute: str, budget_bytes: Mapping[str, int]) -> BudgetError:
    need = smallest_budget(job, compute)
    flag = "--vram" if compute == VRAM else "--ram"
    parts = [
        f"{format_bytes(job.overhead_bytes(compute))} for the program itself",
        f"{format_bytes(job.fixed_bytes)} that always stays",
        f"{format_bytes(job.step_bytes)} of activations{' and KV cache' if job.task == 'generate' else ''}",
    ]
    return BudgetError(
        f"Cannot run {job.model} with {format_bytes(budget_bytes[compute])} of {compute.upper()}.",
        f"It needs at least {format_bytes(need)}: {', '.join(parts)}, and two blocks.",
        f"Give {flag} {-(-need // (1 << 20))}MiB or more, or a shorter input.",
        smallest_bytes={compute: need},
    )
