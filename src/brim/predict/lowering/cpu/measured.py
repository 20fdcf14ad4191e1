"""What a convolution takes on this CPU, measured once for each shape.

oneDNN chooses its kernels, blocked layouts and scratchpads by the processor's instructions, its caches, the number
of threads and a search of its own. So the operation itself is asked: it runs once in a process, on tensors of these
sizes whose values nobody looks at, while PyTorch's legacy profiler (torch/csrc/autograd/profiler_legacy.cpp) writes
down each allocation. What would take long, or cannot run here, gets a bound and is named as not modelled.
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
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_MOST_FLOPS = 4e11  # some seconds on two cores
_MOST_BYTES = 2**30  # of operands and results together
_CHANNELS_OF_BLOCK = 16  # of oneDNN's layouts, the largest

# In order: ("alloc", number, bytes), ("free", number, 0), ("result", position in the flat result, bytes).
_Script = tuple[tuple[str, int, int], ...]
_scripts: dict[Hashable, _Script | None] = {}  # None: it could not be measured


def _measured(kernel: Kernel) -> None:
    script = _script_of(kernel) if _is_affordable(kernel) else None
    if script is None:
        kernel.unknown = f"{kernel.func.overloadpacket}: oneDNN's buffers, which were not measured"
        _bound(kernel)
        return
    handles: dict[int, int] = {}
    results = pytree.tree_leaves(kernel.result)
    for what, number, bytes in script:
        if what == "alloc":
            handles[number] = kernel.temp(bytes)
        elif what == "free":
            kernel.free(handles[number])
        elif bytes == 0:
            kernel.drop(results[number])
        else:
            kernel.emit(next(i for i, output in enumerate(kernel.outputs) if output is results[number]), bytes)


def _tensors(kernel: Kernel) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((kernel.args, kernel.kwargs, kernel.result))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_affordable(kernel: Kernel) -> bool:
    if sum(nbytes(tensor) for tensor in _tensors(kernel)) > _MOST_BYTES:
        return False
    return op_flops(kernel.func, kernel.args, kernel.kwargs, kernel.result) <= _MOST_FLOPS


def _script_of(kernel: Kernel) -> _Script | None:
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


def _run(kernel: Kernel) -> _Script:
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        args, kwargs = pytree.tree_map(_real, (tuple(kernel.args), dict(kernel.kwargs)))
        what = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        torch._C._autograd._enable_profiler_legacy(what)
        try:
            result = kernel.func(*args, **kwargs)
        finally:
            records = torch._C._autograd._disable_profiler_legacy()
    events: list[Any] = [event for thread in records for event in thread]
    sizes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    return _as_script(sizes, pytree.tree_leaves(result))


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


def _as_script(sizes: list[int], results: list[Any]) -> _Script:
    """Bytes taken (positive) and given back, as a script: what is still held at the end are the results.

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
    for position, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            size = result.untyped_storage().nbytes()
            places = places_by_size.get(size)
            if size and places:
                script[places.pop(0)] = ("result", position, size)
            elif not size:
                script.append(("result", position, 0))
    return tuple(script)


def _bound(kernel: Kernel) -> None:
    """Copies of all operands and results, with channels filled up to a block, and the columns of each thread."""
    backward = kernel.func is _aten.convolution_backward.default
    image, weight = (kernel.args[0], kernel.args[2]) if backward else (kernel.result, kernel.args[1])
    groups = int(kernel.arg("groups"))
    copies = sum(nbytes(tensor) * _filled_up(tensor, groups) for tensor in _tensors(kernel))
    columns = prod(weight.shape[1:]) * prod(image.shape[2:]) * weight.element_size() * torch.get_num_threads()
    kernel.temp(int(copies) + columns)
    kernel.emit()


def _filled_up(tensor: torch.Tensor, groups: int) -> float:
    """How many times the channels of a tensor are those of a group, filled up to a block of channels."""
    if tensor.dim() < 2:
        return 1.0
    channels = max(1, tensor.size(1) // groups)
    return -(-channels // _CHANNELS_OF_BLOCK) * _CHANNELS_OF_BLOCK / channels


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.convolution.default: _measured,
    _aten.convolution_backward.default: _measured,
}
