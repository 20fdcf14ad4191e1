"""Numbers that a program reads from tensors whose values a trace does not have.

They may be computed with, kept and printed. Whatever would let a value decide something (a comparison, a shape, a
loop's length) is refused with the line that asked.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from brim.predict.failures import decision
from brim.predict.values import KnownValues, known


class UnknownNumber(float):
    """What ``item()`` gives for a value that is not known: fit for arithmetic and printing, not for decisions."""

    def __new__(cls) -> UnknownNumber:
        return super().__new__(cls, math.nan)

    def _same(self, *others: object) -> UnknownNumber:
        return UnknownNumber()

    def _refuse(self, *others: object) -> Any:
        raise decision()

    def __round__(self, digits: int | None = None) -> Any:  # type: ignore[override]
        """To so many digits, for printing; to an integer it may be an index."""
        return self._refuse() if digits is None else UnknownNumber()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions of it are unknown too, and its questions are refused."""
        if ufunc.__name__ in _FINITE:
            return _FINITE[ufunc.__name__]
        if ufunc.__name__.startswith(("is", "less", "greater", "equal", "not_equal", "logical", "sign")):
            self._refuse()
        return UnknownNumber()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __int__ = __trunc__ = __index__ = _refuse
    __floor__ = __ceil__ = __hash__ = _refuse


_FINITE = {"isnan": False, "isinf": False, "isfinite": True}


@contextmanager
def unknown_numbers(values: KnownValues) -> Iterator[None]:
    """Python's functions of numbers see that one is unknown, for the duration of one trace."""
    with ExitStack() as stack:
        for name in ("exp", "log", "log2", "log10", "log1p", "expm1", "sqrt", "pow", "fabs"):
            stack.enter_context(mock.patch.object(math, name, _unknown_result(getattr(math, name))))
        for name, answer in _FINITE.items():
            stack.enter_context(mock.patch.object(math, name, _finite(getattr(math, name), answer, values)))
        for name in ("max", "min"):
            stack.enter_context(mock.patch.object(builtins, name, _of_unknown(getattr(builtins, name))))
        yield


def _unknown_result(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return UnknownNumber() if any(type(arg) is UnknownNumber for arg in args) else function(*args)

    return call


def _finite(function: Callable[[Any], bool], answer: bool, values: KnownValues) -> Callable[[Any], bool]:
    """Unknown values are taken to be finite, as those of tensors are."""

    def call(number: Any) -> bool:
        if type(number) is not UnknownNumber:
            return function(number)
        values.used_finite = True
        return answer

    return call


def _of_unknown(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """The larger or smaller of numbers of which one is unknown is unknown: no decision that memory could see."""

    def pick(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            for arg in args:
                if type(arg) is UnknownNumber:
                    return arg
                if (
                    isinstance(arg, torch.Tensor)
                    and arg.dim() == 0
                    and arg.dtype.is_floating_point
                    and not known(arg)
                ):
                    return arg
        return builtin(*args, **kwargs)

    return pick


# Functions of torch and Tensor whose plain numbers are sizes, positions or counts.
_SIZED = frozenset({
    "arange", "chunk", "empty", "expand", "eye", "linspace", "narrow", "new_empty", "new_ones", "new_zeros", "ones",
    "rand", "randint", "randn", "randperm", "range", "repeat", "repeat_interleave", "reshape", "roll", "select",
    "split", "tensor_split", "tile", "topk", "tril", "triu", "unfold", "view", "zeros",
})  # fmt: skip


def holds_unknown(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is an unknown number; raises UnsupportedError where it would be a size or a position."""
    found = False
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if type(arg) is UnknownNumber:
            found = True
        elif type(arg) is slice:
            if UnknownNumber in (type(arg.start), type(arg.stop), type(arg.step)):
                raise decision()
        elif isinstance(arg, (tuple, list)) and any(type(part) is UnknownNumber for part in arg):
            found = True
    if found and getattr(func, "__name__", "") in _SIZED:
        raise decision()
    return found


def forget_values(args: tuple[Any, ...], result: Any) -> Any:
    """What was made from an unknown number, or written with one, has no known values."""
    for tensor in (result, args[0] if args else None):
        source = known(tensor)
        if isinstance(tensor, torch.Tensor) and source is not None and not _read_only(tensor, result):
            source.state["valid"] = False
    return result


def _read_only(tensor: torch.Tensor, result: Any) -> bool:
    """An input that the function did not write: its result is another tensor with a storage of its own."""
    other = isinstance(result, torch.Tensor) and result is not tensor
    return other and result.untyped_storage()._cdata != tensor.untyped_storage()._cdata
