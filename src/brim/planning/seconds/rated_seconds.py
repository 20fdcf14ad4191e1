"""Estimate blocks' seconds by any machine's rates: a roofline of observed FLOPs and bytes, plus launch times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM
from brim.estimation.step_memory import ModuleWork, PassWork
from brim.planning.seconds.block_seconds import OUTSIDE, BlockSeconds
from brim.planning.seconds.expert_reading import reading
from brim.predict.cost import flops_per_s
from brim.techniques.blocks import Partition, tensor_bytes


def triggers(partition: Partition) -> dict[str, str]:
    """Map each trigger to the largest block that its call needs, so that its seconds count once."""
    block_of: dict[str, str] = {}
    for block in sorted(partition.blocks, key=lambda block: block.bytes):
        block_of |= dict.fromkeys(block.triggers, block.name)
    return block_of


def rated_seconds(
    model: nn.Module, partition: Partition, work: PassWork, hardware: Hardware, *, tokens: int
) -> Mapping[str, BlockSeconds]:
    """Return the seconds of each block of ``partition`` in a pass with ``work``, and under ``OUTSIDE`` of the rest.

    The pass's ``tokens`` determine how many experts of a mixture it reads.
    """
    owners, read = triggers(partition), _read_only(model, work, tokens)
    parts: dict[str, list[ModuleWork]] = {}
    for path, module_work in read.items():
        parts.setdefault(_nearest(path, owners), []).append(module_work)
    beside = parts.pop(OUTSIDE, []) if OUTSIDE not in owners else []
    seconds = {block.name: 0.0 for block in partition.blocks}
    for trigger, done in parts.items():
        seconds[owners[trigger]] += _seconds(done, hardware)
    # A GPU that waits for launches in one part catches up in another, so the rest follows from the whole pass.
    seconds[OUTSIDE] = max(0.0, _seconds(read.values(), hardware) - sum(seconds.values())) if beside else 0.0
    return {name: BlockSeconds(forward_s=value) for name, value in seconds.items()}


def _nearest(path: str, owners: Mapping[str, str]) -> str:
    """Return the trigger that contains ``path``; OUTSIDE where there is none."""
    while path and path not in owners:
        path = path.rpartition(".")[0]
    return path if path in owners else OUTSIDE


def _read_only(model: nn.Module, work: PassWork, tokens: int) -> dict[str, ModuleWork]:
    """Correct ``work`` to the experts' bytes that a pass reads on average: a trace on fake tensors reads all of them
    or, where their rows are gathered first, hardly any."""
    parameters, corrected = dict(model.named_parameters()), dict(work)
    experts: dict[str, tuple[float, float]] = {}  # read and not read, by the module that has them
    for name, expert in reading(model, tokens).items():
        path, expert_bytes = name.rpartition(".")[0], tensor_bytes(parameters[name])
        read, unread = experts.get(path, (0.0, 0.0))
        experts[path] = read + expert.share * expert_bytes, unread + (1 - expert.share) * expert_bytes
    for path, (read, unread) in experts.items():
        if path in corrected:
            corrected[path] = corrected[path]._replace(bytes=round(max(read, corrected[path].bytes - unread)))
    return corrected


def _seconds(parts: Iterable[ModuleWork], hardware: Hardware) -> float:
    compute_s, moved, kernels = 0.0, 0, 0
    for part in parts:
        compute_s += part.flops / flops_per_s(hardware, part.dtype)
        moved, kernels = moved + part.bytes, kernels + part.kernels
    device_s = max(compute_s, moved / hardware.tier(hardware.compute).bytes_per_s)
    if hardware.compute == RAM:  # a processor dispatches operations on the cores that run them
        return device_s + kernels * hardware.dispatch_s
    return max(device_s + kernels * hardware.kernel_s, kernels * hardware.dispatch_s)
