"""A long column of few different values."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T", bound=Hashable)


class Interned(Sequence[T]):
    """Numbers of values: one or a few bytes each, instead of a reference, and an object, for each.

    ``code`` is the type code of those numbers: "B" for up to 256 different values, "H" for up to 65,536.
    """

    def __init__(self, code: str) -> None:
        self._numbers = array(code)
        self._values: list[T] = []
        self._known: dict[T, int] = {}

    def append(self, value: T) -> None:
        """Raises OverflowError where there are too many different values, TypeError for what cannot be hashed."""
        number = self._known.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[T]:
        return map(self._values.__getitem__, self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Interned[T]: ...
    def __getitem__(self, index: int | slice) -> T | Interned[T]:
        if isinstance(index, int):
            return self._values[self._numbers[index]]
        made: Interned[T] = Interned(self._numbers.typecode)
        made._numbers, made._values, made._known = self._numbers[index], self._values, self._known
        return made

    def __eq__(self, other: object) -> bool:
        """As any sequence of the same values."""
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows
