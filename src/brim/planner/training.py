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
from brim.planner.search import SERIAL, BlockClass, Column, Pool, Problem, Solution, solve
from brim.techniques.placement import FROM_DISK, FROM_RAM, RESIDENT

KEEP, SELECTIVE, FULL, OFFLOAD = "keep", "selective", "full", "offload"
BACKWARD, UPDATE = "backward", "update"  # the moments
CPU = "cpu"  # the lane of updates by the processor beside a GPU
_RING, _AGAIN, _WINDOW = "ring", "recompute", "window"
_WHOLE = ""  # the class of what is chosen once for the whole model
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
    the program's own. ``outside_s`` are seconds (forward, backward) beside the blocks, ``update_s`` the optimizer's;
    ``launch_s`` of all seconds go into starting operations, however few rows they work on. Chunked logits save
    ``head_bytes`` at the first moment and take ``head_s`` more.
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
    launch_s: float = 0.0
    head_bytes: int = 0
    head_s: float = 0.0

    def more_s(self, micro_batch: int) -> float:
        """What several passes take beside one over all rows."""
        return (-(-self.batch // micro_batch) - 1) * self.launch_s

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
    """What is chosen for the whole model; the rest is chosen block by block."""

    micro_batch: int
    chunked: bool = False
    in_backward: bool = False
    states: str = KEEP
    gradients: str = KEEP
    slots: int = 2


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
    ``activations``: what may be done with them. ``streams``: weights may come and go.
    """

    budget_bytes: Mapping[str, int]
    corrections: Mapping[str, int] = field(default_factory=dict)
    single_pass: bool = True
    chunkable: bool = True
    fixed: Mapping[str, object] = field(default_factory=dict)
    activations: Sequence[str] = (KEEP, SELECTIVE, FULL, OFFLOAD)
    streams: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a program is made for: the rest of a Frame is among its columns."""

    micro_batch: int
    slots: int
    states: str


def shape_of(way: Way) -> Shape:
    return Shape(micro_batch=way.frame.micro_batch, slots=way.frame.slots, states=way.frame.states)


def shapes(profile: StepProfile, hardware: Hardware, limits: Limits) -> Iterator[Shape]:
    """Every shape that is worth a search, large micro-batches first."""
    sizes = [profile.batch]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    places = (KEEP, DISK) if hardware.compute == RAM else (KEEP, RAM, DISK)
    for size, states, slots in product(sizes, places, _RING_SLOTS):
        made = Shape(micro_batch=size, slots=slots, states=states)
        if all(getattr(made, name, value) == value for name, value in limits.fixed.items()):
            yield made


def best(profile: StepProfile, hardware: Hardware, limits: Limits, *, time_limit_s: float = 1.0) -> Iterator[Way]:
    """A way for every shape in which one fits, by the seconds of its busiest lane."""
    found = [
        solve_shape(profile, hardware, limits, s, time_limit_s=time_limit_s)
        for s in shapes(profile, hardware, limits)
    ]
    yield from sorted((made for made in found if made is not None), key=lambda made: made.bound_s)


def solve_shape(
    profile: StepProfile, hardware: Hardware, limits: Limits, shape: Shape, *, time_limit_s: float = 1.0
) -> Way | None:
    """The way of this shape whose busiest lane is the least busy; None where none fits."""
    frames = {_name(frame): frame for frame in _frames(profile, hardware, limits, shape)}
    if not frames:
        return None
    solution = solve(_problem(profile, hardware, limits, shape, frames), time_limit_s=time_limit_s)
    if solution is None:
        return None
    (chosen,) = solution.counts[_WHOLE]
    return _way(profile, frames[chosen], solution)


def _frames(profile: StepProfile, hardware: Hardware, limits: Limits, shape: Shape) -> Iterator[Frame]:
    away = (DISK,) if hardware.compute == RAM else (RAM, DISK)
    for chunked, in_backward, gradients in product(
        (False, True) if limits.chunkable and profile.head_bytes else (False,),
        (False, True) if limits.single_pass else (False,),
        (KEEP, *away),
    ):
        never_whole = in_backward and shape.micro_batch == profile.batch  # gradients are used up as they come
        if gradients != KEEP and (shape.states == KEEP or never_whole):
            continue
        made = Frame(
            micro_batch=shape.micro_batch,
            slots=shape.slots,
            states=shape.states,
            chunked=chunked,
            in_backward=in_backward,
            gradients=gradients,
        )
        if all(getattr(made, name) == value for name, value in limits.fixed.items()):
            yield made


def _name(frame: Frame) -> str:
    return f"{frame.chunked} {frame.in_backward} {frame.gradients}"


def _problem(
    profile: StepProfile, hardware: Hardware, limits: Limits, shape: Shape, frames: Mapping[str, Frame]
) -> Problem:
    """The program of one shape: a class for every kind of block, and one for the model as a whole."""
    compute = hardware.compute
    whole = BlockClass(
        name=_WHOLE,
        count=1,
        columns=[_whole_column(name, profile, hardware, frame) for name, frame in frames.items()],
    )
    one = next(iter(frames.values()))
    classes = [
        BlockClass(
            name=members[0].name,
            count=len(members),
            columns=[c for c in _columns(members[0], profile, hardware, one) if _allowed(c, limits)],
        )
        for members in _classes(profile.blocks)
    ]
    moments = (BACKWARD, UPDATE)
    fixed = dict(profile.spent_bytes)
    for tier, more in limits.corrections.items():
        fixed[tier] = fixed.get(tier, 0) + more
    return Problem(
        classes=[whole, *classes],
        budget_bytes={_at(tier, moment): n for tier, n in limits.budget_bytes.items() for moment in moments},
        fixed_bytes={_at(tier, moment): n for tier, n in fixed.items() for moment in moments},
        fixed_s={COMPUTE: sum(profile.outside_s) + profile.more_s(shape.micro_batch)},
        pools=(
            Pool(name=_RING, tiers=[_at(compute, moment) for moment in moments], slots=shape.slots),
            Pool(name=_AGAIN, tiers=[_at(compute, BACKWARD)], slots=1),
            Pool(name=_WINDOW, tiers=[_at(compute, BACKWARD)], slots=_WINDOW_SLOTS),
        ),
    )


def _whole_column(name: str, profile: StepProfile, hardware: Hardware, frame: Frame) -> Column:
    """What lies beside blocks, and the optimizer: beside backward where each block is updated in it, else after."""
    share = frame.micro_batch / profile.batch
    held = _fixed_bytes(profile, hardware.compute, frame)
    blocks = sum(b.kept_bytes[KEEP] for b in profile.blocks) + (profile.head_bytes if frame.chunked else 0)
    key = (hardware.compute, BACKWARD)
    held[key] = held.get(key, 0) + int((profile.activation_bytes - blocks) * share)
    lanes = update_lanes(profile, hardware, frame)
    if not frame.in_backward:
        lanes = {SERIAL: max(lanes.values(), default=0.0)}
    if frame.chunked:
        lanes[COMPUTE] = lanes.get(COMPUTE, 0.0) + profile.head_s
    return Column(name=name, bytes={_at(*place): n for place, n in held.items()}, seconds=lanes)


def _at(tier: str, moment: str) -> str:
    return f"{tier}@{moment}"


def _classes(blocks: Sequence[BlockProfile]) -> list[list[BlockProfile]]:
    ordered = sorted(blocks, key=lambda block: repr(block.kind()))
    return [list(members) for _, members in groupby(ordered, key=BlockProfile.kind)]


def _fixed_bytes(profile: StepProfile, compute: str, frame: Frame) -> dict[tuple[str, str], int]:
    """What lies in each tier at each moment beside blocks' weights and activations."""
    loose = profile.weight_bytes - sum(block.bytes for block in profile.blocks)
    fixed: dict[tuple[str, str], int] = {}

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


def _allowed(column: Column, limits: Limits) -> bool:
    weights, kept = column.name.split()
    return kept in limits.activations and (limits.streams or weights == RESIDENT)


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
