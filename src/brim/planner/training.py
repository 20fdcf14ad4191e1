"""The fastest ways to run a training step within a budget, from a profile of the plain step.

A step could have its peak at two moments: where forward ends and backward begins (activations), and where the
optimizer works (gradients and states). Every tier is limited at both. What the bytes are exactly, a trace of the step
with the techniques applied says afterwards; ``corrections`` take what it found back into the search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.planner.schedule import COMPUTE, way
from brim.planner.search import BlockClass, Column, Pool, Problem, Solution, solve
from brim.techniques.placement import FROM_DISK, FROM_RAM, RESIDENT

KEEP, SELECTIVE, FULL, OFFLOAD = "keep", "selective", "full", "offload"
BACKWARD, UPDATE = "backward", "update"  # the moments
CPU = "cpu"  # the lane of updates by the processor beside a GPU
_RING, _AGAIN, _WINDOW = "ring", "recompute", "window"
_RING_SLOTS = (2, 3)
_WINDOW_SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """One block of a plain step over the whole batch.

    ``kept_bytes`` is what it saves for backward under ``keep``, ``selective`` and ``full``, ``again_s`` what the
    latter two compute again. ``offload_bytes`` of what it saves could leave.
    """

    name: str
    bytes: int
    trained_bytes: int
    forward_s: float
    backward_s: float
    kept_bytes: Mapping[str, int]
    again_s: Mapping[str, float] = field(default_factory=dict)
    offload_bytes: int = 0

    def kind(self) -> tuple[object, ...]:
        """Blocks of one kind are alike to the planner."""
        kept = tuple(sorted(self.kept_bytes.items()))
        return (self.bytes, self.trained_bytes, kept, self.offload_bytes, round(self.forward_s, 9))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """A plain step over ``batch`` rows: its blocks in forward order, and what there is beside them.

    ``peak_bytes`` of the compute tier by moment, weights, gradients and states included; ``spent_bytes`` per tier is
    the program's own. ``outside_s`` are seconds (forward, backward) beside the blocks, ``update_s`` the optimizer's.
    Chunked logits save ``head_bytes`` at the first moment and take ``head_s`` more.
    """

    batch: int
    blocks: Sequence[BlockProfile]
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    peak_bytes: Mapping[str, int]
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    outside_s: tuple[float, float] = (0.0, 0.0)
    update_s: float = 0.0
    head_bytes: int = 0
    head_s: float = 0.0

    @property
    def activation_bytes(self) -> int:
        """What the whole batch holds where backward begins."""
        return max(0, self.peak_bytes[BACKWARD] - self.weight_bytes - self.state_bytes)

    @property
    def update_bytes(self) -> int:
        """What the optimizer takes beside weights, gradients and states."""
        return max(0, self.peak_bytes[UPDATE] - self.weight_bytes - self.gradient_bytes - self.state_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What is chosen for the whole model; the program chooses the rest, block by block."""

    micro_batch: int
    chunked: bool = False
    in_backward: bool = False
    states: str = KEEP
    gradients: str = KEEP
    slots: int = 2
    streams: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run a step: ``weights`` and ``activations`` have a choice for every block."""

    frame: Frame
    weights: Mapping[str, str]
    activations: Mapping[str, str]
    bound_s: float = 0.0
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """``budget_bytes`` per tier, ``corrections`` per tier: what a proof found beyond the model (may be negative).

    ``single_pass``: nothing needs all gradients at once. ``fixed``: fields of Frame that were ordered.
    ``activations``: what may be done with them, all when empty.
    """

    budget_bytes: Mapping[str, int]
    corrections: Mapping[str, int] = field(default_factory=dict)
    single_pass: bool = True
    chunkable: bool = True
    fixed: Mapping[str, object] = field(default_factory=dict)
    activations: Sequence[str] = (KEEP, SELECTIVE, FULL, OFFLOAD)


def frames(profile: StepProfile, hardware: Hardware, limits: Limits) -> Iterator[Frame]:
    """Every whole-model choice that is worth a search."""
    away = (DISK,) if hardware.compute == RAM else (RAM, DISK)
    sizes = [profile.batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    for size, chunked, in_backward, states, gradients, slots in product(
        sizes,
        (False, True) if limits.chunkable and profile.head_bytes else (False,),
        (False, True) if limits.single_pass else (False,),
        (KEEP, *away),
        (KEEP, *away),
        _RING_SLOTS,
    ):
        never_whole = in_backward and size == profile.batch  # gradients are used up as they come
        if gradients != KEEP and (states == KEEP or never_whole):
            continue
        made = Frame(
            micro_batch=size,
            chunked=chunked,
            in_backward=in_backward,
            states=states,
            gradients=gradients,
            slots=slots,
        )
        if all(getattr(made, name) == value for name, value in limits.fixed.items()):
            yield made


def best(profile: StepProfile, hardware: Hardware, limits: Limits, *, time_limit_s: float = 1.0) -> list[Way]:
    """A way for every frame in which one fits, those with the least busiest lane first."""
    found = []
    for frame in frames(profile, hardware, limits):
        problem = problem_of(profile, hardware, limits, frame)
        solution = solve(problem, time_limit_s=time_limit_s)
        if solution is not None:
            found.append(_way(profile, frame, solution))
    return sorted(found, key=lambda made: made.bound_s)


def problem_of(profile: StepProfile, hardware: Hardware, limits: Limits, frame: Frame) -> Problem:
    """The program of one frame."""
    compute, share = hardware.compute, frame.micro_batch / profile.batch
    fixed = _fixed_bytes(profile, compute, frame)
    classes = [
        BlockClass(
            name=members[0].name,
            count=len(members),
            columns=[c for c in _columns(members[0], profile, hardware, frame) if _allowed(c, limits, frame)],
        )
        for members in _classes(profile.blocks)
    ]
    outside = sum(b.kept_bytes[KEEP] for b in profile.blocks)
    head = profile.head_bytes if frame.chunked else 0
    fixed[compute, BACKWARD] += int((profile.activation_bytes - outside - head) * share)
    for tier, more in limits.corrections.items():
        for moment in (BACKWARD, UPDATE):
            fixed[tier, moment] = fixed.get((tier, moment), 0) + more
    budget = {(tier, moment): n for tier, n in limits.budget_bytes.items() for moment in (BACKWARD, UPDATE)}
    return Problem(
        classes=classes,
        budget_bytes={_at(*key): n for key, n in budget.items()},
        fixed_bytes={_at(*key): n for key, n in fixed.items() if key in budget},
        fixed_s=_fixed_s(profile, hardware, frame),
        pools=(
            Pool(name=_RING, tiers=[_at(compute, BACKWARD), _at(compute, UPDATE)], slots=frame.slots),
            Pool(name=_AGAIN, tiers=[_at(compute, BACKWARD)], slots=1),
            Pool(name=_WINDOW, tiers=[_at(compute, BACKWARD)], slots=_WINDOW_SLOTS),
        ),
    )


def _at(tier: str, moment: str) -> str:
    return f"{tier}@{moment}"


def _classes(blocks: Sequence[BlockProfile]) -> list[list[BlockProfile]]:
    ordered = sorted(blocks, key=lambda block: repr(block.kind()))
    return [list(members) for _, members in groupby(ordered, key=BlockProfile.kind)]


def _fixed_bytes(profile: StepProfile, compute: str, frame: Frame) -> dict[tuple[str, str], int]:
    """What lies in each tier at each moment beside blocks' weights and activations."""
    loose = profile.weight_bytes - sum(block.bytes for block in profile.blocks)
    fixed = {(tier, moment): n for tier, n in profile.spent_bytes.items() for moment in (BACKWARD, UPDATE)}

    def add(tier: str, moment: str, count: int) -> None:
        fixed[tier, moment] = fixed.get((tier, moment), 0) + count

    home = {KEEP: compute, RAM: RAM, DISK: DISK}
    largest = max((block.trained_bytes for block in profile.blocks), default=0)
    for moment in (BACKWARD, UPDATE):
        add(compute, moment, loose)
        add(home[frame.states], moment, profile.state_bytes)
    accumulates = frame.micro_batch < profile.batch
    if accumulates:
        add(home[frame.gradients], BACKWARD, profile.gradient_bytes)
    whole = not frame.in_backward or accumulates
    add(home[frame.gradients] if whole else compute, UPDATE, profile.gradient_bytes if whole else largest)
    if frame.gradients != KEEP:
        add(compute, UPDATE, largest)
    add(compute, UPDATE, profile.update_bytes if frame.states == KEEP else 0)
    return fixed


def update_lanes(profile: StepProfile, hardware: Hardware, frame: Frame) -> dict[str, float]:
    """Seconds of the optimizer by lane, the bytes that it moves included."""
    compute, lanes = hardware.compute, dict[str, float]()

    def move(source: str, target: str, count: int) -> None:
        lane = way(source, target)
        lanes[lane] = lanes.get(lane, 0.0) + count / rate(hardware, source, target)

    if compute == RAM or frame.states == KEEP:
        lanes[COMPUTE] = profile.update_s
    else:  # read weights, gradients and two states, write all but gradients (torch's fused Adam), beside RAM's rate
        touched = 2 * (profile.gradient_bytes + profile.state_bytes) + profile.gradient_bytes
        lanes[CPU] = touched / (hardware.tier(RAM).bytes_per_s or 1.0)
        move(compute, RAM, profile.gradient_bytes)
        move(RAM, compute, profile.gradient_bytes)
    if frame.states == DISK:
        move(DISK, RAM, profile.state_bytes)
        move(RAM, DISK, profile.state_bytes)
    if frame.gradients == DISK:
        move(RAM, DISK, profile.gradient_bytes)
        move(DISK, RAM, profile.gradient_bytes)
    return lanes


def _fixed_s(profile: StepProfile, hardware: Hardware, frame: Frame) -> dict[str, float]:
    lanes = update_lanes(profile, hardware, frame)
    lanes[COMPUTE] = lanes.get(COMPUTE, 0.0) + sum(profile.outside_s) + (profile.head_s if frame.chunked else 0.0)
    return lanes


def rate(hardware: Hardware, source: str, target: str) -> float:
    """Bytes per second of a link; a way that was not measured is taken to be as fast as the other."""
    known = {(link.source, link.target) for link in hardware.links}
    pair = (source, target) if (source, target) in known else (target, source)
    return hardware.link(*pair).bytes_per_s


def weight_moves(block: BlockProfile, choice: str, compute: str, micros: int) -> dict[tuple[str, str], int]:
    """Bytes of a block's weights over each link in a step: to forward and backward of each micro-batch, and back."""
    if choice == RESIDENT:
        return {}
    path = [RAM, compute] if choice == FROM_RAM else [DISK, compute] if compute == RAM else [DISK, RAM, compute]
    moves = dict.fromkeys(pairwise(path), 2 * micros * block.bytes)
    if block.trained_bytes:
        moves |= {(b, a): block.trained_bytes for a, b in pairwise(path)}
    return moves


def _columns(block: BlockProfile, profile: StepProfile, hardware: Hardware, frame: Frame) -> Iterator[Column]:
    compute, share = hardware.compute, frame.micro_batch / profile.batch
    micros = -(-profile.batch // frame.micro_batch)
    away = DISK if compute == RAM else RAM
    homes = (FROM_DISK,) if compute == RAM else (FROM_RAM, FROM_DISK)
    for weights in (RESIDENT, *homes):
        for kept in (KEEP, SELECTIVE, FULL, OFFLOAD):
            if (kept == OFFLOAD and not block.offload_bytes) or kept not in (*block.kept_bytes, OFFLOAD):
                continue
            saved = _saved_bytes(block, kept)
            held = {_at(compute, BACKWARD): int(saved * share)}
            slot: dict[str, int] = {}
            lanes = {COMPUTE: block.forward_s + block.backward_s + block.again_s.get(kept, 0.0)}
            if kept in (SELECTIVE, FULL):
                slot[_AGAIN] = int((block.kept_bytes[KEEP] - saved) * share)
            if kept == OFFLOAD:
                slot[_WINDOW] = int(block.offload_bytes * share)
                held[_at(away, BACKWARD)] = held[_at(away, UPDATE)] = int(block.offload_bytes * share)
                for pair in ((compute, away), (away, compute)):
                    lanes[way(*pair)] = block.offload_bytes / rate(hardware, *pair)
            _place(block, weights, compute, held, slot)
            for pair, count in weight_moves(block, weights, compute, micros).items():
                lanes[way(*pair)] = lanes.get(way(*pair), 0.0) + count / rate(hardware, *pair)
            yield Column(name=f"{weights} {kept}", bytes=held, seconds=lanes, slot_bytes=slot)


def _saved_bytes(block: BlockProfile, kept: str) -> int:
    if kept == OFFLOAD:
        return block.kept_bytes[KEEP] - block.offload_bytes
    return block.kept_bytes[kept]


def _place(block: BlockProfile, weights: str, compute: str, held: dict[str, int], slot: dict[str, int]) -> None:
    if weights != RESIDENT:
        slot[_RING] = block.bytes
    tier = compute if weights == RESIDENT else RAM if weights == FROM_RAM else DISK
    for moment in (BACKWARD, UPDATE):
        held[_at(tier, moment)] = held.get(_at(tier, moment), 0) + block.bytes


def _allowed(column: Column, limits: Limits, frame: Frame) -> bool:
    weights, kept = column.name.split()
    return kept in limits.activations and (frame.streams or weights == RESIDENT)


def _way(profile: StepProfile, frame: Frame, solution: Solution) -> Way:
    weights: dict[str, str] = {}
    activations: dict[str, str] = {}
    for members in _classes(profile.blocks):
        order = {block.name: index for index, block in enumerate(profile.blocks)}
        names = sorted((block.name for block in members), key=order.__getitem__)
        for name, column in zip(names, _spread(solution.counts[members[0].name], len(names)), strict=True):
            weights[name], activations[name] = column.split()
    return Way(frame=frame, weights=weights, activations=activations, bound_s=solution.busiest_s, gap=solution.gap)


def _spread(counts: Mapping[str, int], total: int) -> list[str]:
    """Every column as evenly as it goes, so that each stretch of compute hides its share of copies."""
    credit = dict.fromkeys(counts, 0.0)
    left, made = dict(counts), []
    for _ in range(total):
        for name in counts:
            credit[name] += counts[name] / total
        chosen = max((name for name in counts if left[name]), key=lambda name: credit[name])
        credit[chosen] -= 1.0
        left[chosen] -= 1
        made.append(chosen)
    return made
