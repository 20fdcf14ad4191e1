"""Search one GPU's training step: profile the plain step from its trace, then choose the best for each shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from brim.core import Category, Hardware, Op, Phase, Trace
from brim.core.hardware import DISK, RAM
from brim.planning.proof import ENDLESS_BYTES
from brim.planning.solver.cost_model import WHOLE, choices, frames, held_bytes, kinds, peak_bytes, problem
from brim.planning.solver.search import Solution, solve
from brim.planning.solver.step_profile import (
    BACKWARD,
    FULL,
    KEEP,
    SELECTIVE,
    UPDATE,
    Assignment,
    BlockProfile,
    Frame,
    Limits,
    Shape,
    StepProfile,
)
from brim.predict.cost import op_s
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.base import Option
from brim.techniques.blocks import Partition
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT


def profile_of(
    trace: Trace,
    partition: Partition,
    hardware: Hardware,
    *,
    batch: int,
    trained_bytes: Mapping[str, int],
    state_bytes: int,
    repeated: Sequence[str],
    gradient_bytes: int | None = None,
    head: Option | None = None,
) -> StepProfile:
    """Return the profile of the last step of ``trace``, over ``batch`` rows and without techniques.

    ``trained_bytes`` are the bytes of each block of ``partition`` that the optimizer updates, ``state_bytes`` all its
    states from the second step on, ``gradient_bytes`` all gradients, those outside of blocks included. ``repeated``
    are the blocks that can be checkpointed or offloaded, ``head`` the option of chunked logits.
    """
    start = trace.step_starts[-1]
    ops = [op for op in trace.ops if op.at >= start]
    # A processor dispatches operations on the cores that run them; a GPU only pauses between kernels.
    launch_s = hardware.kernel_s + (hardware.dispatch_s if hardware.compute == RAM else 0.0)
    works = [op for op in ops if op.written_bytes or op.flops]  # the others are views
    seconds = _seconds(works, partition, hardware, launch_s)
    return StepProfile(
        batch=batch,
        blocks=_block_profiles(trace, partition, hardware, trained_bytes, repeated, seconds),
        weight_bytes=partition.bytes,
        gradient_bytes=sum(trained_bytes.values()) if gradient_bytes is None else gradient_bytes,
        state_bytes=state_bytes,
        peak_bytes=_peaks(trace, ops),
        early_gradient_bytes=_early_gradient_bytes(trace, ops, repeated),
        outside_s=(seconds.get(("", Phase.FORWARD), 0.0), seconds.get(("", Phase.BACKWARD), 0.0)),
        update_s=sum(seconds.get((n, Phase.OPTIMIZER), 0.0) for n in ("", *(b.name for b in partition.blocks))),
        launch_s=launch_s * sum(op.phase in (Phase.FORWARD, Phase.BACKWARD) for op in works),
        head_bytes=0 if head is None else head.saves_bytes,
        head_s=0.0 if head is None else head.compute_s,
    )


def _block_profiles(
    trace: Trace,
    partition: Partition,
    hardware: Hardware,
    trained_bytes: Mapping[str, int],
    repeated: Sequence[str],
    seconds: Mapping[tuple[str, Phase], float],
) -> list[BlockProfile]:
    saved = {(o.block, o.choice): o for o in checkpointing.options(trace, hardware, list(repeated))}
    moved_bytes = activation_offload.offloadable_bytes(trace, repeated, compute=hardware.compute)
    kept = _kept_bytes(trace, partition)
    backward = _backward_bytes(trace, list(kept))
    blocks = []
    for block in partition.blocks:
        name = block.name
        choices = {c: saved[name, c] for c in (SELECTIVE, FULL) if (name, c) in saved}
        less = {c: max(0, kept[name] - option.saves_bytes) for c, option in choices.items()}
        blocks.append(
            BlockProfile(
                name=name,
                bytes=block.bytes,
                trained_bytes=trained_bytes.get(name, 0),
                forward_s=seconds.get((name, Phase.FORWARD), 0.0),
                backward_s=seconds.get((name, Phase.BACKWARD), 0.0),
                kept_bytes={KEEP: kept[name], **less},
                again_s={c: option.compute_s for c, option in choices.items()},
                offload_bytes=min(kept[name], moved_bytes.get(name, 0)),
                backward_bytes=max(0, backward[name] - kept[name]),
            )
        )
    return blocks


def _owner(module: str, names: Sequence[str]) -> str:
    """Return the block that contains a module path, or ""."""
    return next((name for name in names if module == name or module.startswith(f"{name}.")), "")


def _seconds(
    ops: Sequence[Op], partition: Partition, hardware: Hardware, launch_s: float
) -> dict[tuple[str, Phase], float]:
    names = [block.name for block in partition.blocks]
    owners: dict[str, str] = {}
    seconds: dict[tuple[str, Phase], float] = {}
    for op in ops:
        if op.module not in owners:
            owners[op.module] = _owner(op.module, names)
        key = (owners[op.module], op.phase)
        seconds[key] = seconds.get(key, 0.0) + op_s(op, hardware) + launch_s
    return seconds


def _kept_bytes(trace: Trace, partition: Partition) -> dict[str, int]:
    """Return the bytes that each block saves for backward."""
    names = [block.name for block in partition.blocks]
    kept = dict.fromkeys(names, 0)
    for storage in trace.storages:
        if storage.category is Category.ACTIVATION and storage.born >= trace.step_starts[-1]:
            owner = _owner(storage.module, names)
            if owner:
                kept[owner] += storage.bytes
    return kept


def _backward_bytes(trace: Trace, names: Sequence[str]) -> dict[str, int]:
    """Return the peak of each block's backward pass: what it saved and all that this pass makes but gradients of
    parameters.
    """
    peaks = dict.fromkeys(names, 0)
    begins: list[tuple[int, str]] = []  # of the blocks' backward passes
    for op in trace.ops:
        if op.at >= trace.step_starts[-1] and op.phase is Phase.BACKWARD:
            owner = _owner(op.module, names)
            if not begins or begins[-1][1] != owner:
                begins.append((op.at, owner))
    if not begins:
        return peaks
    changes: list[tuple[int, int, str]] = []
    for storage in trace.storages:
        is_saved = storage.category is Category.ACTIVATION and storage.born >= trace.step_starts[-1]
        if is_saved or (storage.category is Category.TEMPORARY and storage.born >= begins[0][0]):
            owner = _owner(storage.module, names) if is_saved else ""
            changes.append((storage.born, storage.bytes, owner))
            if storage.died is not None:
                changes.append((storage.died, -storage.bytes, owner))
    live_bytes = dict.fromkeys((*names, ""), 0)
    turns = iter([*begins, (1 << 62, "")])
    turn, now = next(turns)
    name = ""
    for tick, count, owner in sorted(changes):
        while tick >= turn:
            name = now
            turn, now = next(turns)
        live_bytes[owner] += count
        if name:
            peaks[name] = max(peaks[name], live_bytes[name] + live_bytes[""])
    return peaks


def _peaks(trace: Trace, ops: Sequence[Op]) -> dict[str, int]:
    """Return the peak before the update, without gradients, and during it, with them."""
    turn = min((op.at for op in ops if op.phase is Phase.OPTIMIZER), default=ops[-1].at + 1)
    changes = [(s.born, s.bytes, s.category is Category.GRADIENT) for s in trace.storages]
    changes += [(s.died, -s.bytes, s.category is Category.GRADIENT) for s in trace.storages if s.died is not None]
    live_bytes, gradients, peaks = 0, 0, {BACKWARD: 0, UPDATE: 0}
    for tick, count, is_gradient in sorted(changes):
        live_bytes += count
        gradients += count if is_gradient else 0
        if turn > tick >= trace.step_starts[-1]:
            peaks[BACKWARD] = max(peaks[BACKWARD], live_bytes - gradients)
        elif tick >= turn:
            peaks[UPDATE] = max(peaks[UPDATE], live_bytes)
    if not peaks[UPDATE]:  # nothing comes or goes while it works
        peaks[UPDATE] = sum(s.bytes for s in trace.storages if s.born < turn and (s.died is None or s.died > turn))
    return peaks


def _early_gradient_bytes(trace: Trace, ops: Sequence[Op], repeated: Sequence[str]) -> int:
    """Return the bytes of gradients (a head's) that exist before those of any of ``repeated``."""
    owners = (op for op in ops if op.phase is Phase.BACKWARD and _owner(op.module, repeated))
    begin = min((op.at for op in owners), default=0)
    return sum(
        s.bytes for s in trace.storages if s.category is Category.GRADIENT and trace.step_starts[-1] <= s.born < begin
    )


def deepened(
    shallow: StepProfile, deeper: StepProfile, layers: int, blocks: Sequence[tuple[str, int, int, str]]
) -> StepProfile:
    """Extrapolate to ``layers`` layers more than ``deeper``, which has one more than ``shallow``. ``blocks`` has each
    block's name, bytes, trained bytes and template in ``deeper``."""
    like = {block.name: block for block in deeper.blocks}

    def on(low: float, high: float) -> float:
        return max(0.0, high + layers * (high - low))

    def on_bytes(low: int, high: int) -> int:
        return max(0, high + layers * (high - low))

    a, b = shallow, deeper
    return replace(
        deeper,
        blocks=[
            replace(like[template], name=name, bytes=count, trained_bytes=trained)
            for name, count, trained, template in blocks
        ],
        weight_bytes=on_bytes(a.weight_bytes, b.weight_bytes),
        gradient_bytes=on_bytes(a.gradient_bytes, b.gradient_bytes),
        state_bytes=on_bytes(a.state_bytes, b.state_bytes),
        peak_bytes={moment: on_bytes(a.peak_bytes[moment], count) for moment, count in b.peak_bytes.items()},
        outside_s=(on(a.outside_s[0], b.outside_s[0]), on(a.outside_s[1], b.outside_s[1])),
        update_s=on(a.update_s, b.update_s),
        launch_s=on(a.launch_s, b.launch_s),
    )


def measured(profile: StepProfile, seconds: Mapping[str, tuple[float, float, float]]) -> StepProfile:
    """Replace predicted seconds of blocks by measured ones: forward, backward, and forward without saving.

    Recomputation is scaled by measured unsaved over predicted forward, and work outside of blocks by the blocks'
    measured over predicted seconds.
    """
    timed_blocks = [block for block in profile.blocks if block.name in seconds]
    if not timed_blocks:
        return profile
    predicted_s = sum(block.forward_s + block.backward_s for block in timed_blocks)
    measured_s = sum(sum(seconds[block.name][:2]) for block in timed_blocks)
    slower = measured_s / predicted_s if predicted_s else 1.0

    def timed(block: BlockProfile) -> BlockProfile:
        if block.name not in seconds:
            forward_s, backward_s, unsaved_s = (
                block.forward_s * slower,
                block.backward_s * slower,
                block.forward_s * slower,
            )
        else:
            forward_s, backward_s, unsaved_s = seconds[block.name]
        rate = unsaved_s / block.forward_s if block.forward_s else slower
        again_s = {choice: count * rate for choice, count in block.again_s.items()}
        return replace(block, forward_s=forward_s, backward_s=backward_s, again_s=again_s)

    return replace(
        profile,
        blocks=[timed(block) for block in profile.blocks],
        outside_s=(profile.outside_s[0] * slower, profile.outside_s[1] * slower),
        head_s=profile.head_s * slower,
    )


_RING_SLOTS = (2, 3)
_MOST_PIECES = 8  # of a batch in a block: each is traced in a proof
_NO_FASTER = 1.01  # pieces are not tried where all rows at once take no more than this times their least seconds
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
        visits = (False, True) if states != KEEP and hardware.compute != RAM else (False,)
        in_pieces = size == profile.batch and FULL in limits.activations
        pieces = [rows for rows in sizes if size / _MOST_PIECES <= rows < size] if in_pieces else []
        for on_gpu, rows, in_backward in product(visits, (0, *pieces), (None, True) if moved else (None,)):
            yield Shape(
                micro_batch=size,
                slots=slots,
                states=states,
                on_gpu=on_gpu,
                block_rows=rows,
                in_backward=in_backward,
            )


def best(profile: StepProfile, hardware: Hardware, limits: Limits) -> Iterator[Assignment]:
    """Yield the best choices of every shape in which some fit, sorted by the seconds of the busiest lane."""
    waiting = sorted(
        ((_least_s(profile, shape), shape) for shape in shapes(profile, hardware, limits)), key=lambda entry: entry[0]
    )
    solved: list[Assignment] = []
    whole_s: dict[Shape, float] = {}  # of shapes whose blocks take no pieces
    for least_s, shape in waiting:
        if whole_s.get(replace(shape, block_rows=0), math.inf) <= _NO_FASTER * least_s:
            continue
        ready = sorted((each for each in solved if each.bound_s <= least_s), key=lambda each: each.bound_s)
        yield from ready
        solved = [each for each in solved if each.bound_s > least_s]
        if (assignment := solve_shape(profile, hardware, limits, shape)) is not None:
            solved.append(assignment)
            if not shape.block_rows:
                whole_s[shape] = assignment.bound_s
    yield from sorted(solved, key=lambda each: each.bound_s)


def _least_s(profile: StepProfile, shape: Shape) -> float:
    """Return seconds that no choice of a shape is below: those of computation without techniques."""
    micro = profile.under(shape)
    computes_s = sum(micro.outside_s) + sum(block.forward_s + block.backward_s for block in micro.blocks)
    return computes_s * profile.passes(shape.micro_batch)


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
        corrected_bytes = max(0, limits.corrections.get(tier, 0))
        high = peak_bytes(held_bytes(profile, hardware, unlimited)).get(tier, 0) + corrected_bytes + (1 << 20)
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


def _with(limits: Limits, budget_bytes: Mapping[str, int]) -> Limits:
    return replace(limits, budget_bytes={**limits.budget_bytes, **budget_bytes})


def _first(profile: StepProfile, hardware: Hardware, limits: Limits) -> Assignment | None:
    """Return any choices that fit, searched at the fewest rows and at all rows, which need no sum of gradients."""
    candidates = (
        shape for shape in shapes(profile, hardware, limits) if shape.in_backward is None and not shape.on_gpu
    )
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
    blocks = profile.under(shape).blocks
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
