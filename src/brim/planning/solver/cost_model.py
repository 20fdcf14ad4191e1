"""Compute each choice's bytes per tier and moment, and its seconds per lane, in a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise, product

from brim.core import Hardware, Link
from brim.core.hardware import DISK, RAM
from brim.planning.solver.problem import SERIAL, BlockClass, Column, Pool, Problem
from brim.planning.solver.schedule import COMPUTE, lane_of
from brim.planning.solver.step_profile import (
    BACKWARD,
    FULL,
    FULL_OFFLOAD,
    KEEP,
    MOMENTS,
    OFFLOAD,
    SELECTIVE,
    UPDATE,
    Assignment,
    BlockProfile,
    Frame,
    Limits,
    Shape,
    StepProfile,
)
from brim.techniques.optimizer_offload.state_blocks import UPDATE_PARTS
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT

CPU = "cpu"  # the lane of updates by the processor beside a GPU
_VISITS = "visits"  # the lane of states that visit the GPU
_VISITING_PARTS = (1, 3, 6)  # sixteenths of them that VRAM has room for
WHOLE = ""  # the class of the frame, which is chosen once for the model
_RING, _AGAIN, _WINDOW = "ring", "recompute", "window"
_WINDOW_SLOTS = 2

Held = dict[tuple[str, str], int]  # (tier, moment) -> bytes


def problem(
    profile: StepProfile, hardware: Hardware, limits: Limits, shape: Shape, frames: Mapping[str, Frame]
) -> Problem:
    """The program of one shape: a class for every kind of block, and one for the model as a whole."""
    whole = BlockClass(
        name=WHOLE,
        count=1,
        columns=[_whole_column(name, profile, hardware, frame) for name, frame in frames.items()],
    )
    micro, passes = profile.under(shape), profile.passes(shape.micro_batch)
    classes = [
        BlockClass(
            name=members[0].name,
            count=len(members),
            columns=[
                _column(members[0], weights, activations, hardware, passes)
                for weights, activations in choices(members[0], hardware.compute, limits)
            ],
        )
        for members in kinds(micro.blocks)
    ]
    fixed = dict(profile.spent_bytes)
    for tier, more in limits.corrections.items():
        fixed[tier] = fixed.get(tier, 0) + more
    return Problem(
        classes=[whole, *classes],
        budget_bytes={_at(tier, moment): n for tier, n in limits.budget_bytes.items() for moment in MOMENTS},
        fixed_bytes={_at(tier, moment): n for tier, n in fixed.items() for moment in MOMENTS},
        fixed_s={COMPUTE: sum(micro.outside_s) * passes},
        pools=_pools(hardware.compute, shape.slots),
    )


def _pools(compute: str, slots: int) -> tuple[Pool, ...]:
    return (
        Pool(name=_RING, tiers=[_at(compute, moment) for moment in MOMENTS], slots=slots),
        Pool(name=_AGAIN, tiers=[_at(compute, BACKWARD)], slots=1),
        Pool(name=_WINDOW, tiers=[_at(compute, BACKWARD)], slots=_WINDOW_SLOTS),
    )


def frames(hardware: Hardware, limits: Limits, profile: StepProfile, shape: Shape) -> dict[str, Frame]:
    """Return the frames that a shape and the limits allow, by name."""
    away = (DISK,) if hardware.compute == RAM else (RAM, DISK)
    frames_by_name = {}
    visits = _VISITING_PARTS if shape.on_gpu else (0,)
    for chunked, in_backward, gradients, gpu_sixteenths in product(
        (False, True) if profile.head_bytes else (False,), (False, True), (KEEP, *away), visits
    ):
        never_whole = in_backward and shape.micro_batch == profile.batch  # each gradient is freed after its update
        if gradients != KEEP and (shape.states == KEEP or never_whole or gpu_sixteenths):
            continue
        if shape.in_backward not in (None, in_backward):
            continue
        frame = Frame(
            micro_batch=shape.micro_batch,
            slots=shape.slots,
            states=shape.states,
            chunked=chunked,
            in_backward=in_backward,
            gradients=gradients,
            gpu_sixteenths=gpu_sixteenths,
            block_rows=shape.block_rows,
        )
        if limits.allow(frame):
            frames_by_name[f"{chunked} {in_backward} {gradients} {gpu_sixteenths}"] = frame
    return frames_by_name


def choices(block: BlockProfile, compute: str, limits: Limits) -> Iterator[tuple[str, str]]:
    """Yield the allowed pairs of a weights choice and an activations choice of a block."""
    homes: tuple[str, ...] = (FROM_DISK,) if compute == RAM else (FROM_RAM, FROM_DISK)
    for weights in (RESIDENT, *(homes if limits.streams else ())):
        for activations in limits.activations:
            if activations in (OFFLOAD, FULL_OFFLOAD) and not block.moved_bytes(activations):
                continue
            if activations in (SELECTIVE, FULL) and activations not in block.kept_bytes:
                if KEEP not in limits.activations:  # the user chose it, but this block cannot be checkpointed so
                    yield weights, KEEP
                continue
            yield weights, activations


def kinds(blocks: Sequence[BlockProfile]) -> list[list[BlockProfile]]:
    """Group blocks by kind, each group in forward order."""
    ordered = sorted(blocks, key=lambda block: repr(block.kind()))
    return [list(members) for _, members in groupby(ordered, key=BlockProfile.kind)]


def held_bytes(profile: StepProfile, hardware: Hardware, assignment: Assignment) -> Held:
    """Estimate the bytes of a step in each tier at each moment, the program's own included."""
    micro, compute = profile.under(assignment.frame), hardware.compute
    sizes: Held = {}
    pools: dict[str, int] = {}
    for (tier, moment), count in whole_bytes(profile, compute, assignment.frame).items():
        sizes[tier, moment] = sizes.get((tier, moment), 0) + count
    for block in micro.blocks:
        slots = block_bytes(block, assignment.weights[block.name], assignment.activations[block.name], compute, sizes)
        for name, count in slots.items():
            pools[name] = max(pools.get(name, 0), count)
    for pool in _pools(compute, assignment.frame.slots):
        for place in pool.tiers:
            tier, _, moment = place.partition("@")
            sizes[tier, moment] = sizes.get((tier, moment), 0) + pool.slots * pools.get(pool.name, 0)
    for tier, count in profile.spent_bytes.items():
        for moment in MOMENTS:
            sizes[tier, moment] = sizes.get((tier, moment), 0) + count
    return sizes


def peak_bytes(sizes: Held) -> dict[str, int]:
    """Return the larger of the moments' bytes per tier."""
    peaks: dict[str, int] = {}
    for (tier, _), count in sizes.items():
        peaks[tier] = max(peaks.get(tier, 0), count)
    return peaks


def _at(tier: str, moment: str) -> str:
    return f"{tier}@{moment}"


# -- the model as a whole


def _whole_column(name: str, profile: StepProfile, hardware: Hardware, frame: Frame) -> Column:
    """Build the frame's column; updates in backward overlap with it, an update after it is serial."""
    sizes = whole_bytes(profile, hardware.compute, frame)
    lanes = update_lanes(profile, hardware, frame)
    if frame.gpu_sixteenths:  # what fits in VRAM comes before the update begins, and the last goes down after its end
        away = 1 - frame.gpu_sixteenths / UPDATE_PARTS
        visits = [lane for lane in lanes if lane != COMPUTE]
        lanes[_VISITS] = away * max(lanes[lane] for lane in visits)
        if frame.in_backward:
            micro, passes = profile.at(frame.micro_batch), profile.passes(frame.micro_batch)
            forward_s = micro.outside_s[0] + sum(block.forward_s for block in micro.blocks)
            backward_s = micro.outside_s[1] + sum(block.backward_s for block in micro.blocks)
            lanes[_VISITS] += passes * forward_s + (passes - 1) * backward_s
        else:
            lanes = {lane: seconds for lane, seconds in lanes.items() if lane not in visits}
    if not frame.in_backward:
        lanes = {SERIAL: max(lanes.values(), default=0.0)}
    if frame.chunked:
        more = profile.at(frame.micro_batch).head_s * profile.passes(frame.micro_batch)
        lanes[COMPUTE] = lanes.get(COMPUTE, 0.0) + more
    return Column(name=name, bytes={_at(*place): n for place, n in sizes.items()}, seconds=lanes)


def whole_bytes(profile: StepProfile, compute: str, frame: Frame) -> Held:
    """Return the bytes in each tier at each moment without blocks' weights and activations."""
    sizes = _fixed_bytes(profile, compute, frame)
    micro = profile.at(frame.micro_batch)
    blocks = sum(b.kept_bytes[KEEP] for b in micro.blocks) + (micro.head_bytes if frame.chunked else 0)
    key = (compute, BACKWARD)
    sizes[key] = sizes.get(key, 0) + max(0, micro.activation_bytes - blocks)
    return sizes


def _fixed_bytes(profile: StepProfile, compute: str, frame: Frame) -> Held:
    loose = profile.weight_bytes - sum(block.bytes for block in profile.blocks)
    fixed: Held = {}

    def add(tier: str, moment: str, count: int) -> None:
        fixed[tier, moment] = fixed.get((tier, moment), 0) + count

    states, gradients = frame.homes(compute)
    largest = max((block.trained_bytes for block in profile.blocks), default=0)
    for moment in MOMENTS:
        add(compute, moment, loose)
        add(states, moment, profile.state_bytes)
        for tier in {compute, *([RAM] if states == DISK else [])}:
            add(tier, moment, frame.gpu_sixteenths * profile.state_bytes // UPDATE_PARTS)
    accumulates = frame.micro_batch < profile.batch
    if accumulates:
        add(gradients, BACKWARD, profile.gradient_bytes)
    if not accumulates or gradients != compute:  # the head's gradients, before the first block's backward
        add(compute, BACKWARD, min(profile.early_gradient_bytes, profile.gradient_bytes))
    whole = not frame.in_backward or accumulates
    add(gradients if whole else compute, UPDATE, profile.gradient_bytes if whole else largest)
    if frame.gradients != KEEP:
        add(compute, UPDATE, largest)
    add(compute, UPDATE, profile.update_bytes if frame.states == KEEP or frame.gpu_sixteenths else 0)
    return fixed


def update_lanes(profile: StepProfile, hardware: Hardware, frame: Frame) -> dict[str, float]:
    """Return the optimizer's seconds by lane, its copies included."""
    compute, lanes = hardware.compute, dict[str, float]()
    if compute == RAM or frame.states == KEEP or frame.gpu_sixteenths:
        lanes[COMPUTE] = profile.update_s
    else:  # PyTorch's fused Adam reads weights, gradients and two states, and writes all but gradients, at RAM's rate
        touched = 2 * (profile.gradient_bytes + profile.state_bytes) + profile.gradient_bytes
        lanes[CPU] = touched / (hardware.tier(RAM).bytes_per_s or 1.0)
    for pair, count in update_moves(profile, compute, frame).items():
        lanes[lane_of(*pair)] = count / rate(hardware, *pair)
    return lanes


def update_moves(profile: StepProfile, compute: str, frame: Frame) -> dict[tuple[str, str], int]:
    """Return the bytes of gradients and optimizer states over each link in a step."""
    moves: dict[tuple[str, str], int] = {}

    def move(source: str, target: str, count: int) -> None:
        moves[source, target] = moves.get((source, target), 0) + count

    if frame.gpu_sixteenths:
        move(RAM, compute, profile.state_bytes)
        move(compute, RAM, profile.state_bytes)
    elif compute != RAM and frame.states != KEEP:
        move(compute, RAM, profile.gradient_bytes)
        move(RAM, compute, profile.gradient_bytes)
    if frame.states == DISK:
        move(DISK, RAM, profile.state_bytes)
        move(RAM, DISK, profile.state_bytes)
    if frame.gradients == DISK:
        passes = profile.passes(frame.micro_batch)  # each pass reads the sum of those before and writes it again
        move(RAM, DISK, passes * profile.gradient_bytes)
        move(DISK, RAM, passes * profile.gradient_bytes)
    return moves


def moved_bytes(profile: StepProfile, hardware: Hardware, assignment: Assignment) -> int:
    """Return the bytes that a step moves over all links together."""
    micro, passes, compute = (
        profile.under(assignment.frame),
        profile.passes(assignment.frame.micro_batch),
        hardware.compute,
    )
    count = sum(update_moves(profile, compute, assignment.frame).values())
    for block in micro.blocks:
        count += sum(weight_moves(block, assignment.weights[block.name], compute, passes).values())
        count += 2 * passes * block.moved_bytes(assignment.activations[block.name])
    return count


def rate(hardware: Hardware, source: str, target: str) -> float:
    """Return a link's bytes per second; an unmeasured direction is assumed as fast as the reverse."""
    return _link(hardware, source, target).bytes_per_s


def copy_s(hardware: Hardware, source: str, target: str, count: int) -> float:
    """Seconds of one copy of ``count`` bytes."""
    return _link(hardware, source, target).seconds(count)


def _link(hardware: Hardware, source: str, target: str) -> Link:
    existing = {(link.source, link.target) for link in hardware.links}
    return hardware.link(*((source, target) if (source, target) in existing else (target, source)))


# -- single blocks


def weight_moves(block: BlockProfile, choice: str, compute: str, passes: int) -> dict[tuple[str, str], int]:
    """Return the bytes of weights over each link in a step: two loads per pass, and a write of trained ones."""
    if choice == RESIDENT:
        return {}
    path = [RAM, compute] if choice == FROM_RAM else [DISK, compute] if compute == RAM else [DISK, RAM, compute]
    moves = dict.fromkeys(pairwise(path), 2 * passes * block.bytes)
    if block.trained_bytes:
        moves |= {(b, a): block.trained_bytes for a, b in pairwise(path)}
    return moves


def _column(block: BlockProfile, weights: str, activations: str, hardware: Hardware, passes: int) -> Column:
    """Build the column of a block's choices; ``block`` is the profile of one of the ``passes``."""
    compute = hardware.compute
    sizes: Held = {}
    slots = block_bytes(block, weights, activations, compute, sizes)
    lanes = {COMPUTE: (block.forward_s + block.backward_s + block.recompute_s(activations)) * passes}
    if offloaded_bytes := block.moved_bytes(activations):
        away = DISK if compute == RAM else RAM
        for pair in ((compute, away), (away, compute)):
            lanes[lane_of(*pair)] = passes * copy_s(hardware, *pair, offloaded_bytes)
    for pair, count in weight_moves(block, weights, compute, passes).items():
        each = min(count, block.bytes)
        copies_s = count / each * copy_s(hardware, *pair, each) if each else 0.0
        lanes[lane_of(*pair)] = lanes.get(lane_of(*pair), 0.0) + copies_s
    places = {_at(*place): count for place, count in sizes.items()}
    return Column(name=f"{weights} {activations}", bytes=places, seconds=lanes, slot_bytes=slots)


def block_bytes(block: BlockProfile, weights: str, activations: str, compute: str, sizes: Held) -> dict[str, int]:
    """Add the block's bytes to ``sizes`` and return the slot that it needs of each pool."""
    slots: dict[str, int] = {}

    def add(tier: str, moment: str, count: int) -> None:
        sizes[tier, moment] = sizes.get((tier, moment), 0) + count

    add(compute, BACKWARD, block.saved_bytes(activations))
    if activations in (SELECTIVE, FULL, FULL_OFFLOAD):
        slots[_AGAIN] = block.again_bytes(activations)
    if weights != RESIDENT:
        slots[_RING] = block.bytes
    if offloaded_bytes := block.moved_bytes(activations):
        slots[_WINDOW] = offloaded_bytes
    for moment in MOMENTS:
        if weights in (RESIDENT, FROM_RAM):
            add(compute if weights == RESIDENT else RAM, moment, block.bytes)
        elif block.trained_bytes:  # frozen weights are read from the checkpoint
            add(DISK, moment, block.bytes)
        if offloaded_bytes:
            add(DISK if compute == RAM else RAM, moment, offloaded_bytes)
    return slots
