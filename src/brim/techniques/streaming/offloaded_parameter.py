"""A parameter whose values are offloaded, and which loads them for code that reads it.

While a block is not in the compute tier, other code may still use its weights: an average of weights, an L2 term over
``parameters()``, an ``nn.Embedding`` that picks rows, a print. Reads get the true values, one tensor
at a time, with gradients if they are recorded; a look-up gets its rows only; in-place writes change
the resting values. Operations that cannot do so (a view, whose changes would be lost) are refused.

While the block is in use its parameters are ordinary parameters, without overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from brim.catalog.gpus import read_facts
from brim.errors import UnsupportedError
from brim.techniques.offloaded_tensor import Backing, OffloadedTensor, offloaded_tensor

_TODO = "Clone it first, replace all its values (copy_, load_state_dict), or call .brim.remove()."
_NOT_IN_PLACE = ("__int__", "__index__", "__invert__", "__iter__")
_GETTERS = ("__get__", "__set__", "__delete__")
_OF_VALUES = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
_WITHOUT_HISTORY = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Attributes and methods that need no values.
_METADATA = frozenset(read_facts("operators.json")["functions"]["without_values"])


class ParameterBacking(Backing, Protocol):
    """The values of an offloaded parameter."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The result of ``nn.functional.embedding``, on the parameter's device."""


class OffloadedParameter(nn.Parameter):
    """The class of an ``nn.Parameter`` between ``offload`` and ``reveal``."""

    _backing: ParameterBacking

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_metadata(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function == _SET_DATA:
            return reveal(args[0], args[1])
        if function in _WITHOUT_HISTORY:
            return _offloaded(args[0])
        if function is functional.embedding:
            rows = _rows(*args, **kwargs)
            if rows is not None:
                return rows
        if _is_in_place(function, kwargs):
            return _write(function, args, kwargs)
        return _read(function, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self._backing.value(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self._backing.value(), self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Parameter offloaded by brim, shape={list(self.shape)}, dtype={self.dtype}, device={self.device}"


def hollow(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the parameter's shape on ``device`` that takes no memory and reads as NaN."""
    with torch.inference_mode(False):
        filler = float("nan") if parameter.dtype.is_floating_point else 0
        return torch.full((), filler, dtype=parameter.dtype, device=device).expand(parameter.shape)


def offload(parameter: nn.Parameter, stand_in: torch.Tensor, backing: ParameterBacking) -> None:
    """Replace the memory of ``parameter`` by ``stand_in``, a ``hollow`` tensor; ``backing`` has its values."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = stand_in
    if type(parameter) is nn.Parameter:
        parameter.__class__ = OffloadedParameter
    if isinstance(parameter, OffloadedParameter):
        parameter._backing = backing


def reveal(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Make ``parameter`` an ordinary parameter over the memory of ``data``."""
    if type(parameter) is OffloadedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter._backing
    parameter.data = data


def _is_metadata(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in _GETTERS:
        return function not in _OF_VALUES and function != _SET_DATA and function not in _WITHOUT_HISTORY
    return name in _METADATA


def _is_in_place(function: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or kwargs.get("out") is not None


def _write(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation that writes to one of its arguments."""
    first = args[0] if args else None
    if isinstance(first, OffloadedParameter) and torch.is_grad_enabled() and first.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():  # a leaf: autograd refuses it
            return function(*args, **kwargs)
    stand_ins: dict[int, OffloadedParameter] = {}

    def replaced(parameter: OffloadedParameter) -> OffloadedTensor:
        stand_in = _offloaded(parameter)
        stand_ins[id(stand_in)] = parameter
        return stand_in

    args, kwargs = tree_map_only(OffloadedParameter, replaced, (args, kwargs))
    result = function(*args, **kwargs)
    return stand_ins.get(id(result), result)  # an in-place operation returns its argument


def _read(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation that only reads its arguments."""
    copies: dict[int, OffloadedParameter] = {}

    def loaded(parameter: OffloadedParameter) -> torch.Tensor:
        if torch.is_grad_enabled() and parameter.requires_grad:
            value: torch.Tensor = _Value.apply(parameter, parameter._backing.value)  # type: ignore[no-untyped-call]
            return value
        value = parameter._backing.value()
        copies[value.untyped_storage()._cdata] = parameter
        return value

    args, kwargs = tree_map_only(OffloadedParameter, loaded, (args, kwargs))
    result = function(*args, **kwargs)
    for tensor in result if isinstance(result, (list, tuple)) else [result]:
        if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata in copies:
            parameter = copies[tensor.untyped_storage()._cdata]
            raise UnsupportedError(
                f"{getattr(function, '__name__', function)} cannot make a view of {_description(parameter)}.",
                "Writes to the view would not reach the weight.",
                _TODO,
            )
    return result


def _description(parameter: OffloadedParameter) -> str:
    return f"a weight {list(parameter.shape)} that brim keeps elsewhere"


def _offloaded(parameter: OffloadedParameter) -> OffloadedTensor:
    shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
    what = _description(parameter).capitalize()
    return offloaded_tensor(
        shape, stride, parameter.dtype, parameter.device, what=what, todo=_TODO, backing=parameter._backing
    )


def _rows(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    """``nn.functional.embedding`` of a table at rest; None where it needs the entire table."""
    if not isinstance(weight, OffloadedParameter) or isinstance(input, OffloadedParameter):
        return None
    if max_norm is not None or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    picked: torch.Tensor = _LookUp.apply(weight, input, weight._backing.rows, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]
    return picked


class _Value(torch.autograd.Function):
    """Copies the parameter's values, and passes gradients through to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, value: Callable[[], torch.Tensor]) -> torch.Tensor:
        return value()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _LookUp(torch.autograd.Function):
    """Rows of a table that is elsewhere; the gradient is that of ``nn.functional.embedding``."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        rows: Callable[[torch.Tensor], torch.Tensor],
        padding: int,
        by_frequency: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.options = weight.shape[0], padding, by_frequency
        return rows(ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (ids,) = ctx.saved_tensors
        table_gradient = torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.options)
        return table_gradient, None, None, None, None
