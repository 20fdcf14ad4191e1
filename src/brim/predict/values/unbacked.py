"""Numbers that a program reads from tensors whose values a trace does not have.

They are made up. Programs may compute with them, store and print them. A decision by one (a comparison, a shape, a
loop's length) is recorded with its line, or refused in a strict trace.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from brim.catalog.gpus import read_facts
from brim.predict.values.assumptions import Values
from brim.predict.values.known import MADE_UP, forget, known


class UnknownNumber(float):
    """The result of ``item()`` for an unknown value."""

    _values: Values

    def __new__(cls, number: float, values: Values) -> UnknownNumber:
        made = super().__new__(cls, number)
        made._values = values
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> UnknownNumber:
        return self

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)  # the value in a file does not matter

    def _mark(self, number: Any) -> Any:
        return UnknownNumber(number, self._values) if type(number) is float else number

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Results of NumPy's functions are made up too, and its comparisons are decisions."""
        if ufunc.__name__ in _FINITE:
            self._values.questions.finite = True
        elif ufunc.__name__.startswith(("less", "greater", "equal", "not_equal", "logical", "sign")):
            self._values.decide()
        plain = [float.__float__(value) if type(value) is UnknownNumber else value for value in inputs]
        result = getattr(ufunc, method)(*plain, **options)
        return (
            self._mark(float(result)) if getattr(result, "shape", None) == () and result.dtype.kind == "f" else result
        )

    def __round__(self, digits: int | None = None) -> Any:  # type: ignore[override]
        """Round to ``digits``, for printing; without digits the result may be used as an index."""
        if digits is None:
            self._values.decide()
        return self._mark(float.__round__(self, digits))

    def __index__(self) -> int:
        self._values.decide()
        return int(float.__int__(self))

    def __hash__(self) -> int:
        return float.__hash__(self)


def _computing(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def compute(self: UnknownNumber, *others: Any) -> Any:
        return self._mark(plain(self, *others))

    return compute


def _deciding(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def decide(self: UnknownNumber, *others: Any) -> Any:
        answer = plain(self, *others)
        if answer is not NotImplemented:
            self._values.decide()
        return answer

    return decide


def _ordering(name: str, mirrored: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def decide(self: UnknownNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and self._values.is_made_up(other) and self._values.optimizer_asks():
            # PyTorch gets the operands swapped, and could not tell which is newer.
            result = getattr(other, mirrored)(float.__float__(self))
            self._values.answer(result, plain(*self._values.as_compared(1.0, 1.0, (True, True))))
            return result
        if not isinstance(other, (int, float)):
            return NotImplemented
        self._values.decide()
        return plain(*self._values.as_compared(float.__float__(self), other, (True, type(other) is UnknownNumber)))

    return decide


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "pos", "abs",
              "mod", "rmod", "floordiv", "rfloordiv"):  # fmt: skip
    setattr(UnknownNumber, f"__{_name}__", _computing(f"__{_name}__"))
for _name, _mirrored in (("lt", "gt"), ("le", "ge"), ("gt", "lt"), ("ge", "le")):
    setattr(UnknownNumber, f"__{_name}__", _ordering(f"__{_name}__", _mirrored))
for _name in ("eq", "ne", "bool", "int", "trunc", "floor", "ceil"):
    setattr(UnknownNumber, f"__{_name}__", _deciding(f"__{_name}__"))

_FINITE = {"isnan": False, "isinf": False, "isfinite": True}


@contextmanager
def unknown_numbers(values: Values) -> Iterator[None]:
    """For one trace, Python's functions of numbers recognize unknown ones."""
    with ExitStack() as stack:
        for name in ("exp", "log", "log2", "log10", "log1p", "expm1", "sqrt", "pow", "fabs"):
            stack.enter_context(mock.patch.object(math, name, _unknown_result(getattr(math, name), values)))
        for name, answer in _FINITE.items():
            stack.enter_context(mock.patch.object(math, name, _finite(getattr(math, name), answer, values)))
        for name in ("max", "min"):
            stack.enter_context(mock.patch.object(builtins, name, _of_unknown(getattr(builtins, name))))
        # L-BFGS reads its losses by float(), which returns a plain number that could not be recognized.
        stack.enter_context(mock.patch.object(sys.modules[torch.optim.LBFGS.__module__], "float", _read, create=True))
        yield


def _read(number: Any) -> float:
    read: float = number.item() if isinstance(number, torch.Tensor) else float(number)
    return read


def _unknown_result(function: Callable[..., Any], values: Values) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = function(*args)
        return UnknownNumber(result, values) if any(type(arg) is UnknownNumber for arg in args) else result

    return call


def _finite(function: Callable[[Any], bool], answer: bool, values: Values) -> Callable[[Any], bool]:
    """Assume that unknown numbers are finite, like values of tensors."""

    def call(number: Any) -> bool:
        if type(number) is not UnknownNumber:
            return function(number)
        values.questions.finite = True
        return answer

    return call


def _of_unknown(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Return an unknown number as the maximum or minimum with an unknown one: no decision that affects memory."""

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
_SIZED = frozenset(read_facts("operators.json")["functions"]["sized"])


def unknown_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values | None:
    """The trace's values where an argument is an unknown number; raises UnsupportedError where a strict trace would
    need it for a size or a position."""
    found: Values | None = None
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if type(arg) is UnknownNumber:
            found = arg._values
        elif type(arg) is slice:
            for part in (arg.start, arg.stop, arg.step):
                if type(part) is UnknownNumber:
                    part._values.decide()
        elif isinstance(arg, (tuple, list)):
            for part in arg:
                if type(part) is UnknownNumber:
                    found = part._values
    if found is not None and getattr(func, "__name__", "") in _SIZED:
        found.decide()
    return found


def mark_made_up(values: Values, args: tuple[Any, ...], result: Any) -> Any:
    """Mark tensors that were made from an unknown number, or written with one, as assumed."""
    for tensor in (result, args[0] if args else None):
        source = known(tensor)
        if isinstance(tensor, torch.Tensor) and source is not None and not _read_only(tensor, result):
            if values.strict:
                forget(tensor)
            source.state.origin |= MADE_UP
    return result


def _read_only(tensor: torch.Tensor, result: Any) -> bool:
    """Return True if the function did not write the input: its result is another tensor with its own storage."""
    other = isinstance(result, torch.Tensor) and result is not tensor
    return other and result.untyped_storage()._cdata != tensor.untyped_storage()._cdata
