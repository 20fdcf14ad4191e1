"""The allocator's state when a recorded run began, found by undoing its events from the state when it ended.

Free neighbours are always merged, so live blocks and segments determine the state; free blocks are what lies between.
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
    History,
)

_HIGHEST = (1 << 63) - 1  # address
Group = tuple[int, bool, PoolId]  # stream, small, pool: what shares one expandable segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """A block in use. ``pending``: freed, waiting for another stream. ``freed_at``: index of the event, -1: never."""

    address: int
    size: int  # 0: to be found out
    requested: int
    stream: int
    pending: bool = False
    freed_at: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A ``cudaMalloc`` segment, or a contiguous mapped range of an expandable one. ``age``: as a ``Block``'s."""

    address: int
    size: int
    group: Group
    expandable: bool
    age: int = 0


@dataclass(kw_only=True, slots=True)
class State:
    """Segments and the blocks in use, both by address. ``lowest``: first address of each expandable segment.

    ``spaces``: the bytes of address space that begin at such addresses, where they are known.
    """

    ranges: dict[int, Range] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)
    lowest: dict[Group, int] = field(default_factory=dict)
    spaces: dict[int, int] = field(default_factory=dict)
    inconsistent: int = 0  # events that do not fit the state that follows them
    guessed: dict[int, int] = field(default_factory=dict)  # end -> address of blocks that may be up to 1 MiB larger

    def enlarge(self, address: int, by: int) -> None:
        """Give the block at ``address`` more of the free memory behind it."""
        live = self.live[address]
        del self.guessed[live.address + live.size]
        self.live[address] = enlarged = replace(live, size=live.size + by)
        self.guessed[enlarged.address + enlarged.size] = address

    @property
    def reserved_bytes(self) -> int:
        return sum(span.size for span in self.ranges.values())


def final_state(history: History) -> State:
    """The state that the snapshot's segments describe."""
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


def starting_state(history: History, config: AllocatorConfig, columns: Columns | None = None) -> State:
    """The state before the first event of ``history``; ``columns`` are its, None: made here."""
    columns = Columns(history) if columns is None else columns
    undo = _Undo(history, config, columns)
    segments = np.flatnonzero((columns.actions >= SEGMENT_ALLOC) & (columns.actions <= SEGMENT_UNMAP))
    for index in segments[::-1].tolist():
        undo.segment(index, int(columns.actions[index]))
    undo.blocks()
    state = undo.state()
    _settle(state, columns, config)
    return state


class _Undo:
    """Steps backwards through a history."""

    def __init__(self, history: History, config: AllocatorConfig, columns: Columns) -> None:
        self._history, self._columns = history, columns
        self._groups = Groups(history, config, columns)
        self._state = final_state(history)
        self._native = {at: span for at, span in self._state.ranges.items() if not span.expandable}
        self._mapped = Mapped()
        for span in self._state.ranges.values():
            if span.expandable:
                self._mapped.add(span.address, span.size)

    def segment(self, index: int, action: int) -> None:
        """Undo an event that took memory from the device or gave it back."""
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
        """Undo all events of blocks. Those of one address follow each other; other addresses do not matter to them.

        A block is in use before its ``free_completed`` and its ``free_requested``, and not before its ``alloc``.
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
        """The block that is in use before the event ``at`` of those, which frees it."""
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
        lay_out(self._state, self._native, self._mapped, self._groups)
        return self._state


def lay_out(state: State, native: dict[int, Range], mapped: Mapped, groups: Groups) -> None:
    """Give ``state`` its segments: those of ``cudaMalloc`` and what is mapped."""
    state.ranges = native
    for address, size in mapped.ranges(groups):
        group = groups.expandable(address)
        state.ranges[address] = Range(address=address, size=size, group=group, expandable=True)
    _drop_impossible(state)
    state.lowest = groups.lowest(state.ranges)


def _drop_impossible(state: State) -> None:
    """Leave out what is empty or lies on another segment: the events were not all of one run."""
    end = 0
    for address in sorted(state.ranges):
        found = state.ranges[address]
        if found.size <= 0 or address < end:
            del state.ranges[address]
            state.inconsistent += 1
        else:
            end = address + found.size


class Mapped:
    """A set of addresses as disjoint ranges, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, size: int) -> None:
        self._replace(address, address + size, keep=True)

    def remove(self, address: int, size: int) -> None:
        self._replace(address, address + size, keep=False)

    def _replace(self, start: int, end: int, *, keep: bool) -> None:
        """Cut ``start`` to ``end`` out of the set, and put it back as one range if it is to be kept."""
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

    def ranges(self, groups: Groups) -> list[tuple[int, int]]:
        """Address and size of each range; where two address spaces touch, they are kept apart."""
        ranges = []
        for start, end in zip(self._starts, self._ends, strict=True):
            cuts = [start, *groups.borders(start, end), end]
            ranges += [(cut, after - cut) for cut, after in pairwise(cuts)]
        return ranges


class Groups:
    """Stream, size class and pool of an address.

    The snapshot's segments tell where they are known. What was given back before, or mapped since, is recognised by
    what was allocated or freed in it.
    """

    def __init__(self, history: History, config: AllocatorConfig, columns: Columns) -> None:
        self._history, self._config, self._columns = history, config, columns
        group_of_address: dict[int, Group] = {}
        mapping = (columns.actions == SEGMENT_MAP) | (columns.actions == SEGMENT_UNMAP)
        self._changes = changes = np.flatnonzero(mapping).tolist()
        if changes:
            self._evidence = self._uses()
            self._used = sorted(self._evidence)
            group_of_address = {history.addresses[index]: self._recognised(index) for index in changes}
        for segment in history.segments:
            if segment.expandable:
                group_of_address[segment.address] = (segment.stream, segment.small, segment.pool)
        self._addresses = sorted(group_of_address)
        self._groups = [group_of_address[address] for address in self._addresses]

    def _uses(self) -> dict[int, Group]:
        """The group of every address that was allocated or freed."""
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

    def _recognised(self, index: int) -> Group:
        """The group of a range that event ``index`` mapped or unmapped."""
        history = self._history
        address, size = history.addresses[index], history.sizes[index]
        at = bisect_left(self._used, address)
        if at < len(self._used) and self._used[at] < address + size:
            return self._evidence[self._used[at]]
        small = size % self._config.large_segment_bytes != 0
        return history.streams[index], small, self._pool(index)

    def _pool(self, index: int) -> PoolId:
        return self._history.pools[index] if self._history.pools else DEFAULT_POOL

    def native(self, index: int) -> Group:
        """The group of a segment that event ``index`` gave back: only small segments are of 2 MiB."""
        small = self._history.sizes[index] == SMALL_SEGMENT_BYTES
        return self._history.streams[index], small, self._pool(index)

    def expandable(self, address: int) -> Group:
        """The group of a mapped address: that of the nearest known range below it, else above it."""
        if not self._addresses:
            return 0, False, DEFAULT_POOL
        return self._groups[max(bisect_right(self._addresses, address) - 1, 0)]

    def borders(self, start: int, end: int) -> list[int]:
        """Known addresses inside ``start`` to ``end`` where another group begins."""
        first, last = bisect_right(self._addresses, start), bisect_left(self._addresses, end)
        return [self._addresses[i] for i in range(max(first, 1), last) if self._groups[i] != self._groups[i - 1]]

    def lowest(self, ranges: Mapping[int, Range]) -> dict[Group, int]:
        """Where the address space of each group begins: pages are mapped from its lowest address on.

        What is mapped later counts, until all of it was given back: then there is new address space.
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
    """Where and when a history allocates, by address."""

    def __init__(self, columns: Columns) -> None:
        self._of = columns

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Addresses in order, and the index of each one's event."""
        events = np.flatnonzero(self._of.actions == ALLOC)
        addresses = self._of.addresses[events]
        order = np.argsort(addresses, kind="stable")
        return addresses[order], events[order]

    def first(self, begin: int, end: int, before: int) -> int | None:
        """The lowest address from ``begin`` to ``end`` at which something was allocated before event ``before``."""
        addresses, events = self._columns
        low, high = np.searchsorted(addresses, [min(begin, _HIGHEST), min(end, _HIGHEST)])
        earlier = np.flatnonzero(events[low:high] < before)
        return int(addresses[low + earlier[0]]) if len(earlier) else None


def _settle(state: State, columns: Columns, config: AllocatorConfig) -> None:
    """Find the sizes that events do not tell, and drop blocks that lie in no segment or on another block."""
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
    """The size of a large block, when only the request is known.

    The rest of a free block is split off when it is over 1 MiB, so a gap of up to 1 MiB belongs to the block. The
    gap ends at the next live block, at the segment's end, or where something was allocated while the block lived.
    """
    if config.max_split_bytes is not None and size >= config.max_split_bytes:
        return end - live.address
    begin = live.address + size
    used = allocations.first(begin, min(end, begin + SMALL_BYTES + 1), live.freed_at)
    end = end if used is None else used
    return end - live.address if end - begin <= SMALL_BYTES else size
