"""The allocator's state before a recorded run, computed by undoing the events from the final state.

Free neighbours are always merged, so live blocks and segments determine the state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from brim.allocator.blocks import DEFAULT_POOL, PoolId
from brim.allocator.config import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from brim.recordings.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Columns,
    DeviceHistory,
)

_HIGHEST = (1 << 63) - 1  # address
Group = tuple[int, bool, PoolId]  # stream, small, pool: each has one expandable segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """A block in use. ``pending``: freed, waiting for another stream. ``freed_at``: index of the event, -1: never."""

    address: int
    size: int  # 0: not known yet
    requested: int
    stream: int
    pending: bool = False
    freed_at: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A ``cudaMalloc`` segment, or a contiguous mapped range of an expandable one."""

    address: int
    size: int
    group: Group
    expandable: bool


@dataclass(kw_only=True, slots=True)
class State:
    """Segments and blocks in use by address. ``lowest``: first address of each expandable segment."""

    ranges: dict[int, Range] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)
    lowest: dict[Group, int] = field(default_factory=dict)
    inconsistent: int = 0  # events that contradict the state after them
    guessed: dict[int, int] = field(default_factory=dict)  # end -> address of blocks that may be up to 1 MiB larger

    def enlarge(self, address: int, by: int) -> None:
        """Enlarge the block at ``address`` by free memory behind it."""
        live = self.live[address]
        del self.guessed[live.address + live.size]
        self.live[address] = enlarged = replace(live, size=live.size + by)
        self.guessed[enlarged.address + enlarged.size] = address

    @property
    def reserved_bytes(self) -> int:
        return sum(span.size for span in self.ranges.values())


def final_state(history: DeviceHistory) -> State:
    """Return the state of the snapshot's segments."""
    state = State()
    for segment in history.segments:
        group = (segment.stream, segment.small, segment.pool)
        state.ranges[segment.address] = Range(
            address=segment.address, size=segment.size, group=group, expandable=segment.expandable
        )
        for block in segment.blocks:
            if block.state != "inactive":
                state.live[block.address] = Live(
                    address=block.address,
                    size=block.size,
                    requested=block.requested,
                    stream=segment.stream,
                    pending=block.state != "active_allocated",
                )
    return state


def starting_state(columns: Columns, config: AllocatorConfig) -> State:
    """Return the state before the first event."""
    undo = _Undo(columns, config)
    segments = np.flatnonzero((columns.actions >= SEGMENT_ALLOC) & (columns.actions <= SEGMENT_UNMAP))
    for index in segments[::-1].tolist():
        undo.segment(index, int(columns.actions[index]))
    undo.blocks()
    state = undo.state()
    _settle(state, columns, config)
    return state


class _Undo:
    """Steps backwards through a history."""

    def __init__(self, columns: Columns, config: AllocatorConfig) -> None:
        self._history, self._columns = history, columns = columns.history, columns
        self._groups = _Groups(columns, config)
        self._state = final_state(history)
        self._native = {at: span for at, span in self._state.ranges.items() if not span.expandable}
        self._mapped = _Ranges()
        for span in self._state.ranges.values():
            if span.expandable:
                self._mapped.add(span.address, span.size)

    def segment(self, index: int, action: int) -> None:
        """Undo a ``segment_*`` event."""
        address, size = self._history.addresses[index], self._history.sizes[index]
        if action == SEGMENT_ALLOC:
            self._state.inconsistent += self._native.pop(address, None) is None
        elif action == SEGMENT_FREE:
            group = self._groups.native(index)
            self._native[address] = Range(address=address, size=size, group=group, expandable=False)
        elif action == SEGMENT_MAP:
            self._mapped.remove(address, size)
        elif action == SEGMENT_UNMAP:
            self._mapped.add(address, size)

    def blocks(self) -> None:
        """Undo all events of blocks, address by address.

        A block is in use before its ``free_completed`` and ``free_requested``, and not before its ``alloc``.
        """
        state, columns = self._state, self._columns
        events = columns.by_address
        if not len(events):
            return
        actions, addresses = columns.actions[events], columns.addresses[events]
        last = np.append(addresses[1:] != addresses[:-1], True)  # of its address
        live_after = np.append(actions[1:] != ALLOC, False)
        live_after[last] = np.isin(addresses[last], np.fromiter(state.live, np.int64, len(state.live)))
        wrong = (actions == ALLOC) & ~live_after | (actions == FREE_COMPLETED) & live_after
        state.inconsistent += int(np.count_nonzero(wrong))
        first = np.flatnonzero(np.append(True, last[:-1]))
        for address in addresses[first[actions[first] == ALLOC]].tolist():
            state.live.pop(address, None)
        for at in first[actions[first] != ALLOC].tolist():
            state.live[int(addresses[at])] = self._before(at, events, actions, last)

    def _before(
        self, at: int, events: NDArray[np.int64], actions: NDArray[np.uint8], last: NDArray[np.bool_]
    ) -> Live:
        """Return the block that ``events[at]`` frees."""
        if actions[at] == FREE_COMPLETED:
            return self._freed(int(events[at]))
        while not last[at] and actions[at + 1] == FREE_REQUESTED:
            at += 1
        address = int(self._columns.addresses[events[at]])
        if not last[at] and actions[at + 1] == FREE_COMPLETED:
            live = self._freed(int(events[at + 1]))
        elif last[at] and address in self._state.live:
            live = self._state.live[address]
        else:
            live = self._freed(int(events[at]))  # a ring may have lost the completion
        return replace(live, pending=False)

    def _freed(self, index: int) -> Live:
        history = self._history
        return Live(
            address=history.addresses[index],
            size=0,
            requested=history.sizes[index],
            stream=history.streams[index],
            pending=True,
            freed_at=index,
        )

    def state(self) -> State:
        state = self._state
        state.ranges = self._native
        for address, size in self._mapped.ranges(self._groups):
            group = self._groups.expandable(address)
            state.ranges[address] = Range(address=address, size=size, group=group, expandable=True)
        _drop_impossible(state)
        state.lowest = self._groups.lowest(state.ranges)
        return state


def _drop_impossible(state: State) -> None:
    """Remove segments that are empty or overlap another: the events are of several runs."""
    end = 0
    for address in sorted(state.ranges):
        span = state.ranges[address]
        if span.size <= 0 or address < end:
            del state.ranges[address]
            state.inconsistent += 1
        else:
            end = address + span.size


class _Ranges:
    """A set of addresses, as sorted disjoint ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, size: int) -> None:
        self._replace(address, address + size, keep=True)

    def remove(self, address: int, size: int) -> None:
        self._replace(address, address + size, keep=False)

    def _replace(self, start: int, end: int, *, keep: bool) -> None:
        """Remove ``start`` to ``end`` from the set, and add it as one range if ``keep``."""
        first = bisect_left(self._ends, start + (not keep))
        last = bisect_right(self._starts, end - (not keep))
        starts, ends = [start] if keep else [], [end] if keep else []
        if first < last:
            left, right = self._starts[first], self._ends[last - 1]
            if keep:
                starts, ends = [min(left, start)], [max(right, end)]
            else:
                starts = [left] * (left < start) + [end] * (end < right)
                ends = [start] * (left < start) + [right] * (end < right)
        self._starts[first:last], self._ends[first:last] = starts, ends

    def ranges(self, groups: _Groups) -> list[tuple[int, int]]:
        """Return address and size of each range; adjacent address spaces stay apart."""
        ranges = []
        for start, end in zip(self._starts, self._ends, strict=True):
            cuts = [start, *groups.borders(start, end), end]
            ranges += [(cut, after - cut) for cut, after in pairwise(cuts)]
        return ranges


class _Groups:
    """Stream, size class and pool of addresses.

    They are those of the snapshot's segments. For memory released before, they are those of the blocks that were
    allocated or freed in it.
    """

    def __init__(self, columns: Columns, config: AllocatorConfig) -> None:
        self._history, self._config, self._columns = history, config, columns = columns.history, config, columns
        group_of_address: dict[int, Group] = {}
        mapping = (columns.actions == SEGMENT_MAP) | (columns.actions == SEGMENT_UNMAP)
        self._changes = changes = np.flatnonzero(mapping).tolist()
        if changes:
            self._group_of_use = self._uses()
            self._used = sorted(self._group_of_use)
            group_of_address = {history.addresses[index]: self._group_of_change(index) for index in changes}
        for segment in history.segments:
            if segment.expandable:
                group_of_address[segment.address] = (segment.stream, segment.small, segment.pool)
        self._addresses = sorted(group_of_address)
        self._groups = [group_of_address[address] for address in self._addresses]

    def _uses(self) -> dict[int, Group]:
        """Return the group of every address that was allocated or freed."""
        history, config = self._history, self._config
        groups: dict[Group, Group] = {}  # few, for very many addresses
        groups_of_addresses = {}
        events = np.flatnonzero(self._columns.actions <= FREE_COMPLETED)[::-1]
        addresses, latest = np.unique(self._columns.addresses[events], return_index=True)
        for address, index in zip(addresses.tolist(), events[latest].tolist(), strict=True):
            small = config.round_size(history.sizes[index]) <= SMALL_BYTES
            group = (history.streams[index], small, self._pool(index))
            groups_of_addresses[address] = groups.setdefault(group, group)
        return groups_of_addresses

    def _group_of_change(self, index: int) -> Group:
        """Return the group of the range that event ``index`` mapped or unmapped."""
        history = self._history
        address, size = history.addresses[index], history.sizes[index]
        at = bisect_left(self._used, address)
        if at < len(self._used) and self._used[at] < address + size:
            return self._group_of_use[self._used[at]]
        small = size % self._config.large_segment_bytes != 0
        return history.streams[index], small, self._pool(index)

    def _pool(self, index: int) -> PoolId:
        return self._history.pools[index] if self._history.pools else DEFAULT_POOL

    def native(self, index: int) -> Group:
        """Return the group of the segment that event ``index`` released: only small segments have 2 MiB."""
        small = self._history.sizes[index] == SMALL_SEGMENT_BYTES
        return self._history.streams[index], small, self._pool(index)

    def expandable(self, address: int) -> Group:
        """Return the group of a mapped address: that of the nearest known range below it, else above it."""
        if not self._addresses:
            return 0, False, DEFAULT_POOL
        return self._groups[max(bisect_right(self._addresses, address) - 1, 0)]

    def borders(self, start: int, end: int) -> list[int]:
        """Return known addresses between ``start`` and ``end`` at which another group begins."""
        first, last = bisect_right(self._addresses, start), bisect_left(self._addresses, end)
        return [self._addresses[i] for i in range(max(first, 1), last) if self._groups[i] != self._groups[i - 1]]

    def lowest(self, ranges: Mapping[int, Range]) -> dict[Group, int]:
        """Return the first address of each group's address space, the lowest that is mapped.

        Later mappings count until all memory of the group is unmapped: then it gets a new address space.
        """
        lowest: dict[Group, int] = {}
        mapped: dict[Group, int] = {}
        for at in ranges.values():
            if at.expandable:
                lowest[at.group] = min(lowest.get(at.group, at.address), at.address)
                mapped[at.group] = mapped.get(at.group, 0) + at.size
        for index in self._changes:
            address, size = self._history.addresses[index], self._history.sizes[index]
            group = self.expandable(address)
            if self._columns.actions[index] == SEGMENT_MAP and mapped.get(group):
                mapped[group] += size
                lowest[group] = min(lowest[group], address)
            elif mapped.get(group):
                mapped[group] -= size
        return lowest


class _Allocations:
    """The allocations of a history, by address."""

    def __init__(self, columns: Columns) -> None:
        self._of = columns

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sorted addresses, and the index of each one's event."""
        events = np.flatnonzero(self._of.actions == ALLOC)
        addresses = self._of.addresses[events]
        order = np.argsort(addresses, kind="stable")
        return addresses[order], events[order]

    def first(self, begin: int, end: int, before: int) -> int | None:
        """Return the lowest address from ``begin`` to ``end`` of an allocation before event ``before``."""
        addresses, events = self._columns
        low, high = np.searchsorted(addresses, [min(begin, _HIGHEST), min(end, _HIGHEST)])
        earlier = np.flatnonzero(events[low:high] < before)
        return int(addresses[low + earlier[0]]) if len(earlier) else None


def _settle(state: State, columns: Columns, config: AllocatorConfig) -> None:
    """Compute sizes that no event has, and drop blocks outside of segments or on another block."""
    starts, addresses = sorted(state.ranges), sorted(state.live)
    allocations = _Allocations(columns)
    for address, after in pairwise([*addresses, 1 << 64]):
        live = state.live[address]
        where = bisect_right(starts, address) - 1
        span = state.ranges[starts[where]] if where >= 0 else None
        end = min(after, span.address + span.size) if span is not None else address
        size = live.size or config.round_size(live.requested)
        if span is None or address + size > end:
            del state.live[address]
            state.inconsistent += 1
            continue
        if not live.size and not span.expandable and not span.group[1] and address + size < end:
            size = _unsplit_size(live, size, end, allocations, config)
            if address + size < end:
                state.guessed[address + size] = address
        if size != live.size:
            state.live[address] = replace(live, size=size)


def _unsplit_size(live: Live, size: int, end: int, allocations: _Allocations, config: AllocatorConfig) -> int:
    """Return the size of a large block of which only the request is known.

    A remainder of up to 1 MiB is not split off, so such a gap behind the block belongs to it. The gap ends at the
    next live block, at the segment's end, or at an allocation during the block's life.
    """
    if config.max_split_bytes is not None and size >= config.max_split_bytes:
        return end - live.address
    begin = live.address + size
    used = allocations.first(begin, min(end, begin + SMALL_BYTES + 1), live.freed_at)
    end = end if used is None else used
    return end - live.address if end - begin <= SMALL_BYTES else size
