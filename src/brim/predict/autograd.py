"""Autograd as it runs plain CUDA tensors, where PyTorch's C++ treats subclasses, such as traced tensors, otherwise.

It asks ``isTensorSubclassLike`` (true for every tensor while a dispatch mode is active) and then makes a copy where a
plain run writes in place. The trace writes in place too, under the conditions that the C++ code checks. Nor does it
check for a subclass whether a factor is zero, and takes a general formula, which is much longer; the formulas in
``BY_VALUES`` are those of torch/csrc/autograd/FunctionsManual.cpp for factors without zeros.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_LATER = 1 << 40  # added to the number of a node that is created before the program has as many of its own
_counted: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)


class BackwardOrder:
    """Renumbers the nodes that backward passes create as the device's thread would: among those of forward passes.

    Autograd runs the node with the highest number first, and each thread counts its own nodes. With CUDA, backward
    passes run in a thread of the device (torch/csrc/autograd/engine.cpp): nodes that ``create_graph`` makes there are
    numbered separately from those of forward passes. A trace's backward passes run in the program's own thread,
    which numbers all nodes in one sequence.
    """

    def __init__(self) -> None:
        self._created = 0  # nodes created by all backward passes
        self._has_later = False  # True if nodes are numbered above all of the program's
        # (first number of the program's nodes, the offset that is added to numbers from there on)
        self._starts, self._excess = [0], [_counted() if _counted is not None else 0]

    def run(self, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass. A pass within another is a part of it."""
        if _counted is None or torch._C._current_graph_task_id() != -1:
            return engine(outputs, *args, **kwargs)
        begin = _counted()
        own = begin - self._excess[-1]
        if self._has_later:
            for node in _reached(outputs, lambda number: True):
                if _LATER <= node._sequence_nr() < _LATER + own:
                    node._set_sequence_nr(self._among_own(node._sequence_nr() - _LATER))
        # The thread counts autocast's regions from 0: the end of one that recomputes frees copies of weights.
        regions = torch.autocast_increment_nesting()
        for _ in range(regions):
            torch.autocast_decrement_nesting()
        try:
            results = engine(outputs, *args, **kwargs)
        finally:
            for _ in range(regions - 1):
                torch.autocast_increment_nesting()
        created = _counted() - begin
        if created:
            self._starts.append(own)
            self._excess.append(self._excess[-1] + created)
            for node in _reached(results, lambda number: begin <= number < begin + created):
                number = self._created + node._sequence_nr() - begin
                self._has_later |= number >= own
                node._set_sequence_nr(self._among_own(number) if number < own else _LATER + number)
            self._created += created
        return results

    def _among_own(self, number: int) -> int:
        return number + self._excess[bisect_right(self._starts, number) - 1]


def _reached(tensors: Iterable[Any] | None, follow: Callable[[int], bool]) -> Iterator[Any]:
    """The nodes that produced ``tensors``, and their predecessors, while ``follow`` accepts their numbers."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors or () if isinstance(tensor, torch.Tensor)]
    done: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in done or not hasattr(node, "_set_sequence_nr") or not follow(node._sequence_nr()):
            continue
        done.add(node)
        nodes += [following for following, _ in node.next_functions]
        yield node


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


def as_plain(func: OpOverload, args: tuple[Any, ...]) -> OpOverload:
    """Return the operation that a run with plain tensors executes instead of ``func``."""
    if func is _aten.add.Tensor:
        if len(args) == 2 and _called_by_engine() and _may_be_overwritten(func, args[0]) and not _in_node(*_ADDING):
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


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
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


def _may_be_overwritten(func: OpOverload, tensor: torch.Tensor, more_uses: int = 0) -> bool:
    storage = tensor.untyped_storage()
    return (
        tensor._use_count() <= _TENSOR_USES + _MORE_USES.get(func, 0) + more_uses  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(storage._cdata) <= _STORAGE_USES
        and torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    )


class _Product(torch.autograd.Function):
    """``prod_backward``; ``dim`` None: of all elements."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        result = torch.prod(source) if dim is None else torch.prod(source, dim, keepdim)
        ctx.save_for_backward(source, result)
        ctx.dim = None if keepdim else dim
        ctx.flat = dim is None
        ctx.summed = dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, result = ctx.saved_tensors
        if ctx.flat:
            zeros = (source == 0).nonzero()
        else:
            if ctx.dim is not None:
                gradient, result = gradient.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
            mask = source == 0
            zeros = mask.sum(ctx.summed, True)
            zeros.sum()
        return gradient * (result / source).conj(), None, None


class _RunningProduct(torch.autograd.Function):
    """``cumprod_backward``."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int) -> torch.Tensor:
        result = torch.cumprod(source, dim)
        ctx.save_for_backward(source, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, result = ctx.saved_tensors
        weighted = result.conj() * gradient
        zeros = source == 0
        zeros.any()
        return _reversed_sums(weighted, ctx.dim).div(source.conj()), None


def _reversed_sums(source: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = source.flip(dim)
    sums = flipped.cumsum(dim)  # C++ frees both at the end of its statement
    return sums.flip(dim)


def _looks_at_values(source: torch.Tensor) -> bool:
    """Return True if C++ would read values in the backward pass; transforms have formulas of their own."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    floating = source.is_floating_point() or source.is_complex()
    return floating and source.dim() > 0 and source.requires_grad and torch.is_grad_enabled() and not inside


def _prod(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    dim = args[0] if args else kwargs.get("dim")
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    plain = set(kwargs) <= {"dim", "keepdim"} and len(args) <= 2 and isinstance(dim, int | None)
    if not plain or isinstance(dim, bool) or not _looks_at_values(source):
        return torch.prod(source, *args, **kwargs)
    return _Product.apply(source, dim, bool(keepdim))  # type: ignore[no-any-return,no-untyped-call]


def _cumprod(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    dim = args[0] if args else kwargs.get("dim")
    plain = set(kwargs) <= {"dim", "dtype"} and len(args) <= 1 and kwargs.get("dtype") in (None, source.dtype)
    if (
        not plain
        or not isinstance(dim, int)
        or not _looks_at_values(source)
        or source.numel() <= 1
        or source.shape[dim] == 1
    ):
        return torch.cumprod(source, *args, **kwargs)
    return _RunningProduct.apply(source, dim)  # type: ignore[no-any-return,no-untyped-call]


def _vander(source: torch.Tensor, *, N: int | None = None) -> torch.Tensor:
    """LinearAlgebra.cpp, ``linalg_vander``: a column of ones, and running products."""
    columns = source.shape[-1] if N is None else N
    if columns <= 1 or not _looks_at_values(source):
        return torch.linalg.vander(source, N=N)  # type: ignore[no-any-return]
    shape = (*source.shape, columns - 1)
    powers = _cumprod(source.unsqueeze(-1).expand(shape), -1)
    return torch.cat((powers.new_ones((*source.shape, 1)), powers), -1)


# PyTorch's functions whose backward passes look at values, and their replacements.
BY_VALUES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vander: _vander,
    torch.prod: _prod, torch.Tensor.prod: _prod, torch.cumprod: _cumprod, torch.Tensor.cumprod: _cumprod,
}  # fmt: skip
