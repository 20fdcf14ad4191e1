"""What a recorded run of the caching allocator must offer to be replayed, in the words of PyTorch's own snapshots.

``brim.recordings.snapshot`` reads such histories from files; anything else with these attributes will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
FREE = 8  # both halves of a free, one behind the other
OTHER = 255  # an action that is passed over


class BlockRecord(Protocol):
    """A block of a snapshot. ``state``: ``active_allocated``, ``inactive``, or waiting for another stream."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def requested(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def stack(self) -> int: ...


class SegmentRecord(Protocol):
    """A segment of a snapshot; for expandable segments, one contiguous mapped range. Blocks tile it in order."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def stream(self) -> int: ...
    @property
    def small(self) -> bool: ...
    @property
    def pool(self) -> PoolId: ...
    @property
    def expandable(self) -> bool: ...
    @property
    def blocks(self) -> Sequence[BlockRecord]: ...


class History(Protocol):
    """One device's events, oldest first, as columns of one length, and the segments when they ended.

    ``actions`` are PyTorch's: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``,
    ``segment_free``, ``segment_map``, ``segment_unmap``, ``oom``; others are passed over. ``addresses`` holds the
    free bytes of the device for ``oom``. ``pools`` is empty when the events do not say which pool they are of.
    ``stacks`` numbers the Python stacks, -1: not recorded.
    """

    @property
    def device(self) -> int: ...
    @property
    def actions(self) -> Sequence[str]: ...
    @property
    def addresses(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def streams(self) -> Sequence[int]: ...
    @property
    def times_us(self) -> Sequence[int]: ...
    @property
    def stacks(self) -> Sequence[int]: ...
    @property
    def pools(self) -> Sequence[PoolId]: ...
    @property
    def segments(self) -> Sequence[SegmentRecord]: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Columns:
    """The columns of a history's events as arrays. ``actions`` are indices of ``ACTIONS``, or ``OTHER``."""

    history: History

    @cached_property
    def actions(self) -> NDArray[np.uint8]:
        numbers, names = _interned(self.history.actions)
        return np.array([ACTIONS.index(name) if name in ACTIONS else OTHER for name in names], np.uint8)[numbers]

    @cached_property
    def completions(self) -> NDArray[np.bool_]:
        """Whether an event is the ``free_completed`` of the ``free_requested`` right before it."""
        found = np.zeros(len(self.actions), bool)
        found[1:] = (self.actions[1:] == FREE_COMPLETED) & (self.actions[:-1] == FREE_REQUESTED)
        found[1:] &= self.addresses[1:] == self.addresses[:-1]
        return found

    @cached_property
    def steps(self) -> NDArray[np.uint8]:
        """``actions``, but ``FREE`` where both halves of a free are one step: those of ``completions`` are in it."""
        found = self.actions.copy()
        found[:-1][self.completions[1:]] = FREE
        return found

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
        """The events of blocks in the order of their addresses, those of one address in their own."""
        events = np.flatnonzero(self.actions <= FREE_COMPLETED)
        return events[np.argsort(self.addresses[events], kind="stable")]

    @cached_property
    def reserved_changes(self) -> NDArray[np.int64]:
        """What each event adds to the bytes that are reserved."""
        added = (self.actions == SEGMENT_ALLOC) | (self.actions == SEGMENT_MAP)
        given_back = (self.actions == SEGMENT_FREE) | (self.actions == SEGMENT_UNMAP)
        changes: NDArray[np.int64] = self.sizes * (added.astype(np.int8) - given_back.astype(np.int8))
        return changes


def _interned(column: Sequence[Any]) -> tuple[NDArray[np.int64], Sequence[Any]]:
    """A column of few different values as their numbers and the values. Some columns are kept so already."""
    if hasattr(column, "columns"):
        numbers, values = column.columns()
        return np.asarray(numbers), values
    known: dict[Any, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in column], np.int64), list(known)


@contextmanager
def contradictions(history: History) -> Iterator[None]:
    """Events that no allocator can have written break its invariants: say so, as FormatError."""
    try:
        yield
    except (AssertionError, KeyError, IndexError) as error:
        raise FormatError(
            f"Cannot replay the {len(history.actions)} events of device {history.device}.",
            "They contradict each other: no caching allocator writes such events.",
            "Dump the snapshot again.",
        ) from error
