"""The second half of a long recording, replayed in another process while the first is replayed in this one.

What it begins with is read off the record, which tells of each address what was done there last. That is what the
replay will find only if it agrees with the record so far. So the state from which the second half set out is compared
with the one in which the first half ends, in all that can matter to an event, and where they differ the second half
counts for nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from brim.allocator.blocks import DEFAULT_POOL, Block, BlockPool, PoolId
from brim.allocator.config import SMALL_BYTES
from brim.allocator.expandable import UNBOUNDED_BYTES
from brim.recordings.history import (
    ALLOC,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Columns,
)
from brim.recordings.replay import Replay, Run
from brim.recordings.starting_state import Group, Groups, Live, Mapped, Range, State, lay_out

LONG_EVENTS = 500_000  # of fewer a process costs more than it saves
_FIRST = 0.46  # of the events: this process has more to do meanwhile than the other
_MOST_LOOKS = 20  # at other events, for each event, to find out sizes
_ADDED = (
    "allocations",
    "addresses_matched",
    "segments",
    "segments_matched",
    "ooms",
    "ooms_matched",
    "inconsistent_events",
)


def border(columns: Columns) -> int | None:
    """The event with which the second half of a long recording begins: one behind an allocation, where nothing waits.

    None where it is not worth it, or where this process should not be copied.
    """
    count = len(columns.actions)
    if count < LONG_EVENTS or processors() < 2 or threading.active_count() > 1:
        return None
    allocations = np.flatnonzero((columns.actions == ALLOC) & (columns.sizes > 0))
    at = int(np.searchsorted(allocations, int(count * _FIRST)))
    return int(allocations[at]) + 1 if at < len(allocations) else None


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin(run: Run, middle: int) -> None:
    """Set ``run`` to the event ``middle``, with nothing counted yet."""
    later = _Later(run, middle)
    run.begin(later.state())
    run.allocator.have_taken(later.taken)
    run.device.held = later.held
    for address, block in run.handles.items():
        block.event = later.events.get(address, -1)


class _TooCostlyError(Exception):
    """The beginning of the second half takes longer to find than the first half to be replayed."""


class _Later:
    """The state before an event, found by what the record says of each address until then.

    ``run`` has replayed nothing yet. ``events`` are what allocated the state's blocks, by address; ``taken`` counts
    the segments that were taken by then, ``held`` is where segments begin, as a ``RecordedDevice`` has them.
    """

    def __init__(self, run: Run, middle: int) -> None:
        self._run, self._middle = run, middle
        columns = run.columns
        events = columns.by_address[columns.by_address < middle]
        events = events[columns.sizes[events] > 0]
        self._of, self._addresses, self._actions = events, columns.addresses[events], columns.actions[events]
        self._at_start, self._looks = sorted(run.start.live), _MOST_LOOKS * len(run.columns.actions)
        self.events: dict[int, int] = {}
        self.taken = 0
        self.held = set(run.device.held)
        self._groups = Groups(run.history, run.config, columns)
        self._native = {at: found for at, found in run.start.ranges.items() if not found.expandable}
        self._mapped, self._mapped_bytes = Mapped(), dict[Group, int]()
        for found in run.start.ranges.values():
            if found.expandable:
                self._mapped.add(found.address, found.size)
                self._mapped_bytes[found.group] = self._mapped_bytes.get(found.group, 0) + found.size
        self._lowest, self._ages = dict(run.start.lowest), dict[Group, int]()
        blocks = [*run.handles.values(), *(block for pool in _pools(run).values() for block in _free(pool))]
        self._spaces = {one.segment.address: one.segment.bytes for one in blocks if one.segment is not None}

    def state(self) -> State:
        run, state = self._run, State()
        actions = run.columns.actions[: self._middle]
        for index in np.flatnonzero((actions >= SEGMENT_ALLOC) & (actions <= SEGMENT_UNMAP)).tolist():
            self._segment(index, int(actions[index]))
        lay_out(state, self._native, self._mapped, self._groups)
        expandable = {found.group for found in state.ranges.values() if found.expandable}
        state.lowest = {group: self._lowest[group] for group in expandable}
        state.spaces = self._spaces
        for address, found in state.ranges.items():
            if found.expandable:
                state.ranges[address] = dataclasses.replace(found, age=self._ages.get(found.group, 0))
        self._use(state)
        return state

    def _segment(self, index: int, action: int) -> None:
        """An event that took memory from the device or gave it back."""
        history, groups = self._run.history, self._groups
        address, size = history.addresses[index], history.sizes[index]
        if action == SEGMENT_ALLOC:
            group = groups.native(index)
            self._native[address] = Range(
                address=address, size=size, group=group, expandable=False, age=self._next_age()
            )
            self.held.add(address)
        elif action == SEGMENT_FREE:
            self._native.pop(address, None)
            self.held.discard(address)
        else:
            group, is_mapped = groups.expandable(address), action == SEGMENT_MAP
            if is_mapped and not self._mapped_bytes.get(group):  # new address space
                page = self._run.allocator.expandable.page_bytes(group[1])
                self._lowest[group], self._ages[group] = address, self._next_age()
                self._spaces[address] = -(-UNBOUNDED_BYTES // page) * page
                self.held.add(address)
            self._mapped_bytes[group] = self._mapped_bytes.get(group, 0) + (size if is_mapped else -size)
            if not self._mapped_bytes[group]:  # its address space was given back
                self.held.discard(self._lowest.get(group, address))
            (self._mapped.add if is_mapped else self._mapped.remove)(address, size)

    def _next_age(self) -> int:
        self.taken += 1
        return self.taken if self._run.config.oldest_segment_first else 0

    def _use(self, state: State) -> None:
        """Put the blocks into ``state`` that are in use or wait for another stream."""
        history = self._run.history
        last = np.append(self._addresses[1:] != self._addresses[:-1], True)[: len(self._of)]
        known = set(self._addresses[last].tolist())
        state.live = {address: live for address, live in self._run.start.live.items() if address not in known}
        starts = sorted(state.ranges)
        for at in np.flatnonzero(last & (self._actions != FREE_COMPLETED)).tolist():
            address, pending = int(self._addresses[at]), bool(self._actions[at] != ALLOC)
            while at >= 0 and self._addresses[at] == address and self._actions[at] != ALLOC:
                at -= 1
            if at < 0 or self._addresses[at] != address:  # it was there at the start
                live = self._run.start.live.get(address)
                if live is not None:
                    state.live[address] = dataclasses.replace(live, pending=pending)
                continue
            where = bisect_right(starts, address) - 1
            if where < 0:
                continue
            event, found = int(self._of[at]), state.ranges[starts[where]]
            self.events[address] = event
            size = self._size(event, address, found)
            live = Live(address=address, size=size, requested=history.sizes[event], stream=history.streams[event])
            state.live[address] = dataclasses.replace(live, pending=pending)

    def _size(self, event: int, address: int, found: Range) -> int:
        """What a block took that was allocated by ``event``: a rest of up to 1 MiB is not split off a large one."""
        config = self._run.config
        size = config.round_size(self._run.history.sizes[event])
        if found.expandable or found.group[1]:
            return size
        end = found.address + found.size
        whole = config.max_split_bytes is not None and size >= config.max_split_bytes
        behind = self._next_in_use(
            event, address + size, end if whole else min(end, address + size + SMALL_BYTES + 1)
        )
        free = (end if behind is None else behind) - address
        return free if whole or free - size <= SMALL_BYTES else size

    def _next_in_use(self, event: int, begin: int, end: int) -> int | None:
        """The lowest address from ``begin`` to ``end`` at which something was in use before ``event``."""
        low, high = np.searchsorted(self._addresses, [begin, end])
        earlier = np.flatnonzero(self._of[low:high] < event) + low
        addresses = self._addresses[earlier]
        last = np.append(addresses[1:] != addresses[:-1], True)[: len(addresses)]
        used = addresses[last & (self._actions[earlier] != FREE_COMPLETED)]
        touched = set(addresses[last].tolist())
        kept = self._at_start[bisect_left(self._at_start, begin) : bisect_left(self._at_start, end)]
        self._looks -= int(high - low) + len(kept)
        if self._looks < 0:
            raise _TooCostlyError
        return min([*used[:1].tolist(), *(at for at in kept if at not in touched)], default=None)


def standing(run: Run) -> bytes:
    """A digest of all that the next events can depend on, and of what is told about what is there."""
    allocator, device = run.allocator, run.device
    names = {id(pool): name for name, pair in _pools(run).items() for pool in pair}
    free = [block for pair in _pools(run).values() for block in _free(pair)]
    stats = allocator.stats
    told = (
        sorted((address, *_told(block, names), block.event) for address, block in run.handles.items()),
        sorted(_told(block, names) for block in free),
        sorted(allocator.live),
        (stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes),
        sorted((name, one.use_count) for name, one in allocator.private_pools.items() if one.use_count != 1),
        (sorted(device.held), device.next_invented, list(device.expected), device.reserved_next),
        (run.pending, sorted(run.released_pools)),
    )
    return hashlib.sha256(repr(told).encode()).digest()


def _pools(run: Run) -> dict[PoolId, tuple[BlockPool, BlockPool]]:
    allocator = run.allocator
    pools = {DEFAULT_POOL: (allocator.small, allocator.large)}
    return pools | {name: (private.small, private.large) for name, private in allocator.private_pools.items()}


def _free(pools: tuple[BlockPool, BlockPool]) -> list[Block]:
    """Their free blocks, and what nothing is mapped to."""
    return [block for pool in pools for block in (*pool.blocks.values(), *pool.holes.values())]


def _told(block: Block, names: dict[int, Any]) -> tuple[Any, ...]:
    before, after = (-1 if one is None else one.address for one in (block.prev, block.next))
    kind = (block.stream, names[id(block.pool)], block.pool.small, str(block.segment), block.age, block.mapped)
    waits = (block.allocated, block.event_count, sorted(block.stream_uses or ()))
    return block.address, block.size, *kind, *waits, before, after


def joined(first: Replay, second: Replay) -> Replay:
    """Both halves as one, of which the second ended the run."""
    peaks = ("peak_reserved_replayed_bytes", "peak_allocated_replayed_bytes")
    counts = {name: getattr(first, name) + getattr(second, name) for name in _ADDED}
    most = {name: max(getattr(first, name), getattr(second, name)) for name in peaks}
    return dataclasses.replace(second, **counts, **most)
