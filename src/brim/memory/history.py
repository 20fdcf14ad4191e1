"""What a recorded run of the caching allocator must offer to be replayed, in the words of PyTorch's own snapshots.

``brim.measure.snapshot`` reads such histories from files; anything else with these attributes will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from brim.errors import FormatError
from brim.memory.blocks import PoolId


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


@contextmanager
def contradictions(history: History) -> Iterator[None]:
    """Events that no allocator can have written break its invariants: say so, as FormatError."""
    try:
        yield
    except (AssertionError, KeyError, IndexError) as error:
        raise FormatError(
            f"The {len(history.actions)} events of device {history.device} were to be replayed.",
            "They contradict each other: no caching allocator can have written them.",
            "Dump the snapshot again.",
        ) from error
