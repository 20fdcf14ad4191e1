"""A recorded run of the caching allocator: its events as columns, and its final segments, in PyTorch's words."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.allocator.blocks import PoolId
from brim.errors import FormatError

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_map",
    "segment_free",
    "segment_unmap",
    "oom",
)
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_MAP, SEGMENT_FREE, SEGMENT_UNMAP, OOM = range(8)
FREE = 8  # a free_requested and its free_completed in one step
OTHER = 255  # an ignored action
STATES = ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive")
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block at the end of the run; ``state`` is one of ``STATES``, ``stack`` an index into ``Snapshot.stacks``."""

    address: int
    size: int
    requested: int
    state: str
    stack: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """A segment at the end of the run; of an expandable segment, one contiguous mapped range. Blocks tile it."""

    address: int
    size: int
    stream: int
    small: bool
    pool: PoolId
    expandable: bool
    blocks: Iterable[BlockRecord]


@dataclass(kw_only=True, slots=True)
class DeviceHistory:
    """The events of a device, oldest first, as columns of one length, and its final segments.

    ``actions`` are those of ``ACTIONS``; others are ignored. ``sizes`` are requested bytes (``alloc``, ``free_*``) or
    a segment's (``segment_*``). The address of an ``oom`` is the free bytes of the device. ``pools`` is empty if not
    recorded. ``stacks`` are indices into ``Snapshot.stacks``, -1: not recorded.
    """

    device: int
    actions: Sequence[str] = ()
    addresses: Sequence[int] = ()
    sizes: Sequence[int] = ()
    streams: Sequence[int] = ()
    times_us: Sequence[int] = ()
    stacks: Sequence[int] = ()
    pools: Sequence[PoolId] = ()
    segments: tuple[SegmentRecord, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


class Interned(Sequence[T]):
    """A long column of few distinct values, stored as their numbers.

    ``code`` is the type code of the numbers: "B" for up to 256 distinct values, "H" for up to 65,536.
    """

    def __init__(self, code: str) -> None:
        self._numbers = array(code)
        self._values: list[T] = []
        self._known: dict[T, int] = {}

    def append(self, value: T) -> None:
        """Append a value. Raises OverflowError for too many distinct values, TypeError for an unhashable one."""
        number = self._known.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        self._numbers.append(number)

    def extend(self, numbers: ArrayLike, values: Sequence[T]) -> None:
        """Append many; ``numbers`` are indices of ``values``. Raises as ``append`` does, and then adds none."""
        numbers_of_values = self._known | {value: -1 for value in values if value not in self._known}
        if len(numbers_of_values) > 1 << 8 * self._numbers.itemsize:
            raise OverflowError("too many different values")
        for value in values:
            if value not in self._known:
                self._known[value] = len(self._values)
                self._values.append(value)
        own = np.array([self._known[value] for value in values], self._numbers.typecode)
        self._numbers.frombytes(own[np.asarray(numbers, np.int64)].tobytes())

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


@dataclass(frozen=True)
class Columns:
    """The columns of a history's events as arrays. ``actions`` are indices of ``ACTIONS``, or ``OTHER``."""

    history: DeviceHistory

    @cached_property
    def actions(self) -> NDArray[np.uint8]:
        numbers, names = _interned(self.history.actions)
        return np.array([ACTIONS.index(name) if name in ACTIONS else OTHER for name in names], np.uint8)[numbers]

    @cached_property
    def completions(self) -> NDArray[np.bool_]:
        """True where an event is the ``free_completed`` of the ``free_requested`` right before it."""
        completions = np.zeros(len(self.actions), bool)
        completions[1:] = (self.actions[1:] == FREE_COMPLETED) & (self.actions[:-1] == FREE_REQUESTED)
        completions[1:] &= self.addresses[1:] == self.addresses[:-1]
        return completions

    @cached_property
    def steps(self) -> NDArray[np.uint8]:
        """``actions``, but ``FREE`` for a ``free_requested`` that is completed right after it."""
        steps = self.actions.copy()
        steps[:-1][self.completions[1:]] = FREE
        return steps

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        return np.asarray(self.history.addresses, np.int64)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.asarray(self.history.sizes, np.int64)

    @cached_property
    def streams(self) -> NDArray[np.int64]:
        numbers, values = _interned(self.history.streams)
        return np.array(values, np.int64)[numbers]

    @cached_property
    def times_us(self) -> NDArray[np.int64]:
        return np.asarray(self.history.times_us, np.int64)

    @cached_property
    def stacks(self) -> NDArray[np.int64]:
        return np.asarray(self.history.stacks, np.int64)

    @cached_property
    def by_address(self) -> NDArray[np.int64]:
        """Indices of the events of blocks by address, those of one address in order."""
        events = np.flatnonzero(self.actions <= FREE_COMPLETED)
        return events[np.argsort(self.addresses[events], kind="stable")]

    def lifetimes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the allocations by address, and the next allocation or completed free at each one's address.

        Without one it is the number of events.
        """
        order = self.by_address[self.actions[self.by_address] != FREE_REQUESTED]
        addresses, is_allocation = self.addresses[order], self.actions[order] == ALLOC
        following = np.append(order[1:], 0)[: len(order)]
        following[np.append(addresses[1:] != addresses[:-1], True)[: len(order)]] = len(self.actions)
        return order[is_allocation], following[is_allocation]

    @property  # not cached, to save memory
    def reserved_changes(self) -> NDArray[np.int64]:
        """Bytes that each event adds to reserved memory."""
        added = (self.actions == SEGMENT_ALLOC) | (self.actions == SEGMENT_MAP)
        released = (self.actions == SEGMENT_FREE) | (self.actions == SEGMENT_UNMAP)
        changes: NDArray[np.int64] = self.sizes * (added.astype(np.int8) - released.astype(np.int8))
        return changes


def _interned(column: Sequence[Any]) -> tuple[NDArray[np.int64], Sequence[Any]]:
    """Return each value's number, and the distinct values."""
    if isinstance(column, Interned):
        return np.asarray(column._numbers), column._values
    known: dict[Any, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in column], np.int64), list(known)


@contextmanager
def contradictions(history: DeviceHistory) -> Iterator[None]:
    """Turn broken invariants of the allocator into FormatError: no allocator can have written such events."""
    try:
        yield
    except (AssertionError, KeyError, IndexError) as error:
        raise FormatError(
            f"Cannot replay the {len(history.actions)} events of device {history.device}.",
            "They contradict each other: no caching allocator writes such events.",
            "Dump the snapshot again.",
        ) from error
