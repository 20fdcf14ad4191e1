"""A long column of few different values."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

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

    def extend(self, numbers: ArrayLike, values: Sequence[T]) -> None:
        """Append many: ``numbers`` say which of ``values`` each is. Where it raises, as ``append``, it adds none."""
        numbers_of_values = self._known | {value: -1 for value in values if value not in self._known}
        if len(numbers_of_values) > 1 << 8 * self._numbers.itemsize:
            raise OverflowError("too many different values")
        for value in values:
            if value not in self._known:
                self._known[value] = len(self._values)
                self._values.append(value)
        own = np.array([self._known[value] for value in values], self._numbers.typecode)
        self._numbers.frombytes(own[np.asarray(numbers, np.int64)].tobytes())

    def columns(self) -> tuple[array[int], list[T]]:
        """The numbers, and the values that they number. Not to be changed."""
        return self._numbers, self._values

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
        part: Interned[T] = Interned(self._numbers.typecode)
        part._numbers, part._values, part._known = self._numbers[index], self._values, self._known
        return part

    def __eq__(self, other: object) -> bool:
        """As any sequence of the same values."""
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows
