"""Backward formulas that PyTorch's C++ code computes in place for plain tensors, but not for subclasses.

It asks ``isTensorSubclassLike`` (true for every tensor while a dispatch mode is active) and then makes a copy where a
plain run writes in place. The trace writes in place too, under the conditions that the C++ code checks.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten

# Reference counts, in a dispatch mode, of a tensor and of its storage that only the C++ caller owns.
_TENSOR_USES, _STORAGE_USES = 4, 2
_CHAINED = 2  # further references from a chain of operations that return the same tensor
_MORE_USES = {_aten.index_put.default: 1}  # the formula also has a reference

# Backward formulas that write into a tensor they have just made (torch/csrc/autograd/FunctionsManual.cpp,
# aten/src/ATen/native/TensorAdvancedIndexing.cpp), with the form that a plain run uses.
_ON_FRESH_TENSOR = {
    _aten.index_put.default: _aten.index_put_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter.value: _aten.scatter_.value,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_fill.int_Scalar: _aten.index_fill_.int_Scalar,
    _aten.index_fill.int_Tensor: _aten.index_fill_.int_Tensor,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
    _aten.logical_and.default: _aten.logical_and_.default,
    _aten.logical_or.default: _aten.logical_or_.default,
    _aten.put.default: _aten.put_.default,
}


def as_plain(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> torch._ops.OpOverload:
    """Return the operation that a run with plain tensors executes instead of ``func``."""
    if func is _aten.add.Tensor:
        if len(args) == 2 and _called_by_engine() and _may_be_overwritten(func, args[0]) and not _formula_adds():
            # InputBuffer's accumulate, torch/csrc/autograd/input_buffer.cpp
            return _aten.add_.Tensor if _fits(args[0], args[1]) else func
    elif func in _OF_LOSSES:
        of_logits = _in_node(_OF_LOGITS) and not _is_differentiated(_TARGET)  # multiplies into a new tensor
        known = of_logits or (func is _aten.mul.Tensor and _in_node("BinaryCrossEntropyBackward"))
        if known and _called_by_engine() and _may_be_overwritten(func, args[0], _CHAINED * of_logits):
            return _OF_LOSSES[func] if _fits(args[0], args[1]) else func
    elif func in _ON_FRESH_TENSOR and _called_by_engine() and _may_be_overwritten(func, args[0]):
        if func in _LOGICAL and not _fits(args[0], args[1]):
            return func
        return func if _in_node(*_INTO_COPIES) else _ON_FRESH_TENSOR[func]
    return func


# Nodes whose formulas always copy: they fill, scatter and add into the copy.
_INTO_COPIES = ("ScatterReduce", "IndexReduce", "Xlogy", "SpecialXlog1Py")
# In-place operations of loss formulas on tensors that they have just created.
_OF_LOSSES = {_aten.mul.Tensor: _aten.mul_.Tensor, _aten.sub.Tensor: _aten.sub_.Tensor}
_OF_LOGITS, _TARGET = "BinaryCrossEntropyWithLogits", 1  # the node, and its input that seldom has a gradient
_LOGICAL = (_aten.logical_and.default, _aten.logical_or.default)


def _fits(first: torch.Tensor, second: Any) -> bool:
    """Return True if the first tensor has room for the result: a formula that broadcasts it makes a new one."""
    if not isinstance(second, torch.Tensor):
        return True
    return first.shape == second.shape or first.shape == torch.broadcast_shapes(first.shape, second.shape)


def accumulated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``renorm_backward`` sums in the type that the device accumulates in: float32 on CUDA, twice as wide on the
    CPU."""
    summed = args[0] if args and isinstance(args[0], torch.Tensor) else None
    wide = kwargs.get("dtype") is torch.float64 and summed is not None and summed.dtype in _NARROWER
    return kwargs | {"dtype": torch.float32} if wide and _in_node("Renorm") else kwargs


_NARROWER = (torch.float32, torch.float16, torch.bfloat16)


# Nodes whose own formula adds two tensors; every other sum in C++ adds gradients of the same input.
_ADDING = ("Atan2", "VarMean", "StdMean", "Linalg", "LuUnpack", "SpecialI1E", "Svd", "Cumprod", "Prod")


def _formula_adds() -> bool:
    return _in_node(*_ADDING)


def _in_node(*names: str) -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith(names)


def _is_differentiated(input: int) -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.next_functions[input][0] is not None


def add_bias(output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``linear`` of an input that is not contiguous adds its bias in place (Linear.cpp), except for subclasses."""
    output.add_(bias)
    return output.detach()


# Operations that write one result per element into their first argument and return it: most of an optimizer's.
_ELEMENTWISE = frozenset({
    _aten.add_.Tensor, _aten.add_.Scalar, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor,
    _aten.addcmul_.default, _aten.addcdiv_.default, _aten.lerp_.Scalar, _aten.copy_.default, _aten.sqrt_.default,
    _aten.zero_.default, _aten.fill_.Scalar,
})  # fmt: skip


def written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the result of an operation if it is clearly in-place; None: its fake kernel decides.

    Clearly: floating-point tensors of the same dtype, shape and device, the first one dense.
    """
    if func not in _ELEMENTWISE:
        return None
    first = args[0]
    if type(first) is not FakeTensor or not first.is_floating_point() or not first.is_contiguous():
        return None
    if first.constant is not None:  # a literal's value, which the fake kernel forgets
        return None
    for arg in (*args[1:], *kwargs.values()):
        if type(arg) is FakeTensor:
            alike = arg.dtype == first.dtype and arg.shape == first.shape and arg.fake_device == first.fake_device
            if not alike or arg.layout is not torch.strided:
                return None
        elif not isinstance(arg, (int, float)):
            return None
    return first


def _called_by_engine() -> bool:
    """Return True if autograd's C++ made the call: no Python frame lies between the engine and the dispatch."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_name in _WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


_WRAPPERS = ("_seen", "__torch_dispatch__", "_fn", "inner")  # PyTorch may wrap the dispatch so that dynamo skips it


def _may_be_overwritten(func: torch._ops.OpOverload, tensor: torch.Tensor, more_uses: int = 0) -> bool:
    storage = tensor.untyped_storage()
    return (
        tensor._use_count() <= _TENSOR_USES + _MORE_USES.get(func, 0) + more_uses  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_USES
        and torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    )
