"""Allocations of operators that this CPU runs once for each shape, under PyTorch's profiler.

oneDNN chooses its kernels, blocked layouts and scratchpads by the processor's instructions, its caches, the number of
threads and a search of its own. Other operators here are too rare to be worth a rule. So the operator runs once in a
process, on tensors of these sizes whose values do not matter, while PyTorch's legacy profiler
(torch/csrc/autograd/profiler_legacy.cpp) records each allocation. An operator that would take long, or cannot run
here, is named as not modelled; a convolution also gets a bound.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from brim.predict.flops import op_flops
from brim.predict.lowering.kernel import Kernel, Script, nbytes

_aten = torch.ops.aten
_MOST_FLOPS = 4e11  # some seconds on two cores
_MOST_BYTES = 2**30  # of operands and results together
_CHANNELS_OF_BLOCK = 16  # of oneDNN's layouts, the largest
_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default)
# Allocations of these depend on shapes alone, and no value of an operand is an index.
OPERATORS = (
    *_CONVOLUTIONS, _aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default,
    _aten.native_batch_norm.default, _aten.native_batch_norm_backward.default,
    _aten.native_group_norm.default, _aten.native_group_norm_backward.default, _aten.sort.default, _aten.sort.stable,
    _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default, _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default, _aten.im2col.default, _aten.upsample_nearest2d.default,
    _aten.upsample_bilinear2d.default, _aten.upsample_bicubic2d.default, _aten.logsumexp.default,
    _aten._safe_softmax.default, _aten.roll.default, _aten.isinf.default,
)  # fmt: skip
_scripts: dict[Hashable, Script | None] = {}  # None: it could not be measured


def rule(kernel: Kernel) -> None:
    script = _script_of(kernel) if _is_affordable(kernel) else None
    if script is not None:
        kernel.play(script)
        return
    kernel.unknown = f"{kernel.func.overloadpacket}: its buffers on the CPU, which were not measured"
    if kernel.func in _CONVOLUTIONS:
        kernel.temp(_bound_bytes(kernel))


def _tensors(kernel: Kernel) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((kernel.args, kernel.kwargs, kernel.result))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_affordable(kernel: Kernel) -> bool:
    if sum(nbytes(tensor) for tensor in _tensors(kernel)) > _MOST_BYTES:
        return False
    return op_flops(kernel.func, kernel.args, kernel.kwargs, kernel.result) <= _MOST_FLOPS


def _script_of(kernel: Kernel) -> Script | None:
    described = pytree.tree_map(_described, (tuple(kernel.args), dict(kernel.kwargs)))
    key = (kernel.func, repr(described), torch.is_grad_enabled(), torch.get_num_threads())
    if key not in _scripts:
        try:
            _scripts[key] = _run(kernel)
        except (RuntimeError, MemoryError, AttributeError):  # no such kernel, no memory, or no such profiler
            _scripts[key] = None
    return _scripts[key]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return leaf


def _run(kernel: Kernel) -> Script:
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        args, kwargs = pytree.tree_map(_real, (tuple(kernel.args), dict(kernel.kwargs)))
        if kernel.func is _aten.mkldnn_rnn_layer_backward.default:
            args = (*args[:-1], _rnn_workspace(kernel, args))
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        torch._C._autograd._enable_profiler_legacy(config)
        try:
            result = kernel.func(*args, **kwargs)
        finally:
            records = torch._C._autograd._disable_profiler_legacy()
    events: list[Any] = [event for thread in records for event in thread]
    sizes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    return _as_script(sizes, pytree.tree_leaves(result))


def _rnn_workspace(kernel: Kernel, args: tuple[Any, ...]) -> torch.Tensor:
    """Return oneDNN's workspace of the forward pass, whose size a fake tensor does not have."""
    names = (
        "reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first",
        "train",
    )  # fmt: skip
    with torch.enable_grad():
        outputs = _aten.mkldnn_rnn_layer(*args[:7], *(kernel.arg(name) for name in names))
    workspace: torch.Tensor = outputs[3]
    return workspace


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


def _as_script(sizes: list[int], results: list[Any]) -> Script:
    """Return allocations (positive sizes) and frees as a script, where storages that remain are the results.

    Which of two allocations of one size a free means, and which of two is a result, makes no difference.
    """
    script: list[tuple[str, int, int]] = []
    places_by_size: dict[int, list[int]] = {}  # bytes -> places in the script
    for size in sizes:
        if size > 0:
            places_by_size.setdefault(size, []).append(len(script))
            script.append(("alloc", len(script), size))
        elif places_by_size.get(-size):
            script.append(("free", places_by_size[-size].pop(), 0))
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    for position, tensor in enumerate(tensors):
        size = tensor.untyped_storage().nbytes()
        if places := places_by_size.get(size):
            script[places.pop(0)] = ("out", position, size)
    return tuple(script)


def _bound_bytes(kernel: Kernel) -> int:
    """Return copies of all operands and results, with channels filled up to a block, and each thread's columns."""
    backward = kernel.func is _aten.convolution_backward.default
    image, weight = (kernel.args[0], kernel.args[2]) if backward else (kernel.result, kernel.args[1])
    groups = int(kernel.arg("groups"))
    copies = sum(nbytes(tensor) * _filled_up(tensor, groups) for tensor in _tensors(kernel))
    columns = prod(weight.shape[1:]) * prod(image.shape[2:]) * weight.element_size() * torch.get_num_threads()
    return int(copies + columns)


def _filled_up(tensor: torch.Tensor, groups: int) -> float:
    """Return how many times the channels of a tensor are those of a group, filled up to a block of channels."""
    if tensor.dim() < 2:
        return 1.0
    channels = max(1, tensor.size(1) // groups)
    return -(-channels // _CHANNELS_OF_BLOCK) * _CHANNELS_OF_BLOCK / channels
