"""Derive a training step's profile from a trace of the plain step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from brim.core import Category, Hardware, Op, Phase, Trace
from brim.core.hardware import RAM
from brim.planning.solver.step_profile import BACKWARD, FULL, KEEP, SELECTIVE, UPDATE, BlockProfile, StepProfile
from brim.predict.cost import EAGER, op_s
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.base import Option
from brim.techniques.blocks import Partition
from brim.techniques.checkpointing import technique as checkpointing


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
    spent_bytes: Mapping[str, int] | None = None,
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
    launch_s = EAGER.kernel_s + (EAGER.dispatch_s if hardware.compute == RAM else 0.0)
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
        spent_bytes=dict(spent_bytes or {}),
        outside_s=(seconds.get(("", Phase.FORWARD), 0.0), seconds.get(("", Phase.BACKWARD), 0.0)),
        update_s=sum(seconds.get((n, Phase.OPTIMIZER), 0.0) for n in ("", *(b.name for b in partition.blocks))),
        launch_s=launch_s * sum(op.phase in (Phase.FORWARD, Phase.BACKWARD) for op in works),
        head_bytes=0 if head is None else head.saves_bytes.get(hardware.compute, 0),
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
    compute = hardware.compute
    saved = {(o.block, o.choice): o for o in checkpointing.options(trace, hardware, list(repeated))}
    moved = {o.block: o for o in activation_offload.options(trace, list(repeated), compute=compute)}
    kept = _kept_bytes(trace, partition)
    blocks = []
    for block in partition.blocks:
        name = block.name
        choices = {c: saved[name, c] for c in (SELECTIVE, FULL) if (name, c) in saved}
        less = {c: max(0, kept[name] - option.saves_bytes[compute]) for c, option in choices.items()}
        offload = min(kept[name], moved[name].saves_bytes[compute]) if name in moved else 0
        blocks.append(
            BlockProfile(
                name=name,
                bytes=block.bytes,
                trained_bytes=trained_bytes.get(name, 0),
                forward_s=seconds.get((name, Phase.FORWARD), 0.0),
                backward_s=seconds.get((name, Phase.BACKWARD), 0.0),
                kept_bytes={KEEP: kept[name], **less},
                again_s={c: option.compute_s for c, option in choices.items()},
                offload_bytes=offload,
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
