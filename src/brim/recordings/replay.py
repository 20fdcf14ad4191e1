"""The replay of a recorded run on the simulated allocator, compared with the record."""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from brim.allocator.blocks import DEFAULT_POOL, Block, PoolId
from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorConfig
from brim.allocator.out_of_memory import OutOfMemory
from brim.recordings.device import RELEASES, RecordedDevice, SegmentEvent
from brim.recordings.history import (
    ACTIONS,
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Columns,
    DeviceHistory,
)
from brim.recordings.restore import pieces, restore
from brim.recordings.starting_state import State, final_state, starting_state

MOST_EVENTS = 4_000_000  # replayed again to find sizes that no event has
_ROWS = 1 << 12  # events read together
_SHOWN_BY = 100_000  # events that show how the allocator chose among blocks of one size


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Agreement of a replay with the record, and the peaks of both.

    ``segments`` counts all ``segment_*`` events; ``final_blocks`` the blocks of the snapshot's segments, free ones
    included.
    """

    device: int
    allocations: int
    addresses_matched: int
    segments: int
    segments_matched: int
    final_blocks: int
    final_blocks_matched: int
    ooms: int
    ooms_matched: int
    peak_reserved_measured_bytes: int
    peak_reserved_replayed_bytes: int
    peak_allocated_replayed_bytes: int
    inconsistent_events: int

    @property
    def exact(self) -> bool:
        return (
            self.addresses_matched == self.allocations
            and self.segments_matched == self.segments
            and self.final_blocks_matched == self.final_blocks
            and self.ooms_matched == self.ooms
            and self.peak_reserved_replayed_bytes == self.peak_reserved_measured_bytes
            and not self.inconsistent_events
        )


def recorded_start(columns: Columns) -> tuple[AllocatorConfig, State]:
    """Return the recorded settings and the state before the first event.

    The settings include how the allocator chose among free blocks of one size, which no snapshot holds: the order
    that the recorded addresses follow for longer, else the lowest address.
    """
    config = AllocatorConfig.from_snapshot(columns.history.settings)
    start = starting_state(columns, config)
    config = _chosen_config(columns, config, start)
    for _ in range(max(MOST_EVENTS // max(len(columns.actions), 1), 4) if start.guessed else 0):
        run = Run(columns, config, start, stop_at_wrong_guess=True)
        run.all_events()
        if run.wrong_guess is None:
            break
        start.enlarge(*run.wrong_guess)
    return config, start


def _chosen_config(columns: Columns, config: AllocatorConfig, start: State) -> AllocatorConfig:
    by_age = dataclasses.replace(config, oldest_segment_first=True)
    followed = _follows(columns, config, start)
    return by_age if followed < _SHOWN_BY and _follows(columns, by_age, start) > followed else config


def _follows(columns: Columns, config: AllocatorConfig, start: State) -> int:
    """Return the first event whose address differs under ``config``, ``_SHOWN_BY`` at most."""
    run = _FirstDifference(columns, config, start)
    try:
        run.events(0, min(len(columns.actions), _SHOWN_BY))
    except _Differs as difference:
        return difference.event
    return _SHOWN_BY


class _Replaying(CachingAllocator):
    """A caching allocator that keeps its cache if the record does."""

    keeps_cache = False  # a failing request empties no cache during a capture

    def empty_cache(self, pool: PoolId | None = None) -> None:
        if not self.keeps_cache:
            super().empty_cache(pool)


class Run:
    """A replay of a recorded run.

    ``changed_bytes`` is the size of the block that each event allocates or frees, else 0. A block's ``event`` is the
    index of its allocation.
    """

    def __init__(
        self, columns: Columns, config: AllocatorConfig, start: State, *, stop_at_wrong_guess: bool = False
    ) -> None:
        config = dataclasses.replace(config, memory_fraction=1.0)  # the record says what did not fit
        self.columns, self.history, self.start, self.config = columns, columns.history, start, config
        history = columns.history
        self.changed_bytes = array("q", [0]) * len(history.actions)
        self.pools = _PoolOf(history)
        # A reserved range of addresses is larger than this.
        self.most_bytes = measured_peak_bytes(self.columns, start)
        self.stops = stop_at_wrong_guess
        self.wrong_guess: tuple[int, int] | None = None  # address of a starting block, and its missing bytes
        self.device = RecordedDevice()
        self.allocator = _Replaying(self.config, device=self.device)
        self.handles = restore(self.allocator, start)  # by recorded address
        self.device.starts.update(start.ranges, start.lowest.values())
        self.pending: list[SegmentEvent] = []  # since the last request
        self.released_pools: set[PoolId] = set()  # by pending releases
        self.allocations = self.matched = self.segments = self.ooms = self.ooms_matched = 0
        self.inconsistent = start.inconsistent

    def all_events(self) -> None:
        self.events(0, len(self.history.actions))
        self.pending = self._release_cache(self.pending)

    def events(self, begin: int, end: int) -> None:
        """Replay the events from ``begin`` up to ``end``, which must not part a free from its completion."""
        for start in range(begin, end, _ROWS):
            self._replay(start, min(start + _ROWS, end))
            if self.wrong_guess is not None:
                return

    def _replay(self, begin: int, end: int) -> None:
        """Replay a few events. A free that is completed at once, as nearly all are, is one step."""
        columns, handles, changed_bytes = self.columns, self.handles, self.changed_bytes
        request_free, complete_free = self.allocator.request_free, self.allocator.complete_free
        rows = np.flatnonzero(~columns.completions[begin:end]) + begin
        numbers = (columns.steps, columns.addresses, columns.sizes, columns.streams)
        pending = self.pending
        for index, action, address, size, stream in zip(
            rows.tolist(), *(column[rows].tolist() for column in numbers), strict=True
        ):
            if action == ALLOC:
                if size <= 0:
                    self.inconsistent += 1
                    continue
                if pending or self.released_pools:
                    self._alloc_from_device(index, address, size, stream, pending)
                    pending = []
                else:
                    self._alloc(index, address, size, stream)
                if self.wrong_guess is not None:
                    return
            elif action == FREE:
                if pending:
                    pending = self._release_cache(pending)
                block = handles.get(address)
                if block is None or not block.allocated:
                    self._request(index, address)
                    self._complete(index + 1, address)
                    continue
                del handles[address]
                changed_bytes[index] = block.size
                request_free(block)
                complete_free(block)
            elif action == FREE_REQUESTED:
                if pending:
                    pending = self._release_cache(pending)
                self._request(index, address)
            elif action == FREE_COMPLETED:
                if pending:
                    pending = self._release_cache(pending, midway=True)
                self._complete(index, address)
            elif action < OOM:
                self.segments += 1
                pending.append((ACTIONS[action], address, size))
                if action in (SEGMENT_FREE, SEGMENT_UNMAP):
                    self.released_pools.add(self.pools.at(index, address))
            elif action == OOM:
                if size <= 0:
                    self.inconsistent += 1
                    continue
                self._oom(index, size, stream, pending)
                pending = []
        self.pending = pending

    def _alloc_from_device(
        self, index: int, address: int, size: int, stream: int, pending: list[SegmentEvent]
    ) -> None:
        """Replay an allocation that follows requests to the device or releases."""
        released = any(event[0] in RELEASES for event in pending)
        taken = any(event[0] not in RELEASES for event in pending)
        if released and self.config.garbage_collection_threshold and taken:
            self._collect(pending)
        elif released and (self.config.max_split_bytes is None or not taken):
            pending = self._release_cache(pending)
        self._free_pools()
        self.released_pools.clear()
        self.device.expected.extend(pending)
        self.allocator.ignores_free_blocks = released and taken
        self._alloc(index, address, size, stream)
        self.allocator.ignores_free_blocks = False
        self.device.expected.clear()

    def _alloc(self, index: int, address: int, size: int, stream: int) -> None:
        pool = self.pools.at(index, address)
        try:
            block = self.allocator.malloc(size, stream, pool)
        except OutOfMemory:  # the record releases memory that the replay does not have: go on without it
            self.device.expected.clear()
            block = self.allocator.malloc(size, stream, pool)
        self.allocations += 1
        if block.address == address:
            self.matched += 1
        else:
            self._differs(index, block, size)
        block.event = index
        self.handles[address] = block
        self.changed_bytes[index] = block.size

    def _differs(self, index: int, block: Block, nbytes: int) -> None:
        """Correct the guessed size of the block before one that the record did not choose."""
        if not self.stops:
            return
        before = self.start.live.get(self.start.guessed.get(block.address, -1))
        if before is None or before.freed_at <= index:
            return
        rest = block.size + (block.next.size if block.next is not None and block.next.is_free else 0)
        by = rest - self.config.round_size(nbytes) + MIN_BLOCK_BYTES
        if before.size + by <= self.config.round_size(before.requested) + SMALL_BYTES:
            self.wrong_guess = before.address, by

    def _collect(self, pending: list[SegmentEvent]) -> None:
        """Release the segments that the record's garbage collection released, and take them out of ``pending``.

        The memory fraction that started it is not known.
        """
        self.device.expected.extend(pending)
        for event in list(pending):
            pools = (self.allocator.large, self.allocator.small)
            block = next((pool.blocks[event[1]] for pool in pools if event[1] in pool.blocks), None)
            if event[0] == "segment_free" and block is not None and block.is_whole:
                self.allocator.release_segment(block)
                pending.remove(event)
        self.device.expected.clear()

    def _request(self, index: int, address: int) -> None:
        block = self.handles.get(address)
        if block is None or not block.allocated:
            self.inconsistent += 1
            return
        self.changed_bytes[index] = block.size
        self.allocator.request_free(block)
        block.event_count = 1

    def _complete(self, index: int, address: int) -> None:
        block = self.handles.pop(address, None)
        if block is None:
            self.inconsistent += 1
            return
        if block.allocated:  # only its completion is recorded
            self.changed_bytes[index] = block.size
            self.allocator.request_free(block)
        block.event_count = 0
        self.allocator.complete_free(block)

    def _release_cache(self, pending: list[SegmentEvent], *, midway: bool = False) -> list[SegmentEvent]:
        """Empty the cache if memory was released. Return the events that are left."""
        if not pending or pending[0][0] not in RELEASES:
            return pending
        if midway and (self.config.max_split_bytes is not None or self.config.garbage_collection_threshold):
            self._collect(pending)  # the rest of the cache is released after the wait
            return pending
        self.device.expected.extend(event for event in pending if event[0] in RELEASES)
        self._free_pools()
        for pool in [None] if DEFAULT_POOL in self.released_pools else sorted(self.released_pools):
            self.allocator.empty_cache(pool)
        self.released_pools.clear()
        self.device.expected.clear()
        return [event for event in pending if event[0] not in RELEASES]

    def _free_pools(self) -> None:
        """Mark private pools that released memory as used by no graph."""
        for pool in self.released_pools & self.allocator.private_pools.keys():
            self.allocator.private_pools[pool].use_count = 0

    def _oom(self, index: int, size: int, stream: int, pending: list[SegmentEvent]) -> None:
        """Replay a failing request, which first released what it could and may have mapped pages."""
        self.ooms += 1
        if DEFAULT_POOL not in self.released_pools:  # else: an unused private pool
            pending = self._release_cache(pending)
        self._free_pools()
        self.released_pools.clear()
        self.device.expected.extend(pending)
        self.device.lenient = False
        self.device.reserved_next = self._mapped_later(index, size, stream)
        self.allocator.ignores_free_blocks = True
        self.allocator.keeps_cache = not any(event[0] in RELEASES for event in pending)
        try:
            block = self.allocator.malloc(size, stream, self.pools.at(index, -1))
        except OutOfMemory:
            self.ooms_matched += not self.device.expected
        else:
            self.allocator.free(block)
        self.allocator.ignores_free_blocks = self.allocator.keeps_cache = False
        self.device.lenient = True
        self.device.expected.clear()
        self.device.reserved_next = None

    def _mapped_later(self, index: int, size: int, stream: int) -> int | None:
        """Return the address space that a request reserved before it failed: a later one maps it."""
        if not self.config.expandable_segments:
            return None
        pool, columns, starts = self.pools.at(index, -1), self.columns, sorted(self.device.starts)
        of_kind = (columns.actions == SEGMENT_MAP) & (columns.streams == stream)
        of_kind &= (columns.sizes % self.allocator.expandable.page_bytes(small=False) != 0) == (size <= SMALL_BYTES)
        for later in np.flatnonzero(of_kind[index:]) + index:
            address = int(columns.addresses[later])
            before = (
                starts[bisect_right(starts, address) - 1] if starts and starts[0] <= address else -self.most_bytes
            )
            if address - before >= self.most_bytes and self.pools.at(int(later), address) == pool:
                return address
        return None

    def result(self) -> Replay:
        expected = final_state(self.history)
        blocks, matched = _compare(expected, self.allocator, self.handles)
        stats = self.allocator.stats
        return Replay(
            device=self.history.device,
            allocations=self.allocations,
            addresses_matched=self.matched,
            segments=self.segments,
            segments_matched=self.device.matched,
            final_blocks=blocks,
            final_blocks_matched=matched,
            ooms=self.ooms,
            ooms_matched=self.ooms_matched,
            peak_reserved_measured_bytes=measured_peak_bytes(self.columns, self.start),
            peak_reserved_replayed_bytes=stats.reserved_peak_bytes,
            peak_allocated_replayed_bytes=stats.allocated_peak_bytes,
            inconsistent_events=self.inconsistent,
        )


class _Differs(Exception):
    """The first difference between replay and record."""

    def __init__(self, event: int) -> None:
        super().__init__()
        self.event = event


class _FirstDifference(Run):
    def _differs(self, index: int, block: Block, nbytes: int) -> None:
        raise _Differs(index)


class _PoolOf:
    """Pools of allocations and segments, by their events, else by the snapshot's private segments."""

    def __init__(self, history: DeviceHistory) -> None:
        self._pools = history.pools if history.pools else None
        private = sorted((s.address, s.size, s.pool) for s in history.segments if s.pool != DEFAULT_POOL)
        self._starts = [address for address, _, _ in private]
        self._private = private

    def at(self, index: int, address: int) -> PoolId:
        if self._pools is not None:
            return self._pools[index]
        return self.of_segment(address) if self._starts else DEFAULT_POOL

    def of_segment(self, address: int) -> PoolId:
        start, size, pool = self._private[max(bisect_right(self._starts, address) - 1, 0)]
        return pool if start <= address < start + size else DEFAULT_POOL


def _compare(expected: State, allocator: CachingAllocator, handles: dict[int, Block]) -> tuple[int, int]:
    """Count the blocks of the final state, and those with the same address, size and use in the replay."""
    pools = [allocator.small, allocator.large]
    for private in allocator.private_pools.values():
        pools += [private.small, private.large]
    replayed = {(block.address, block.size, False) for pool in pools for block in pool.blocks.values()}
    replayed |= {(block.address, block.size, True) for block in handles.values()}
    addresses = sorted(expected.live)
    recorded = {
        (address, size, live is not None)
        for at in expected.ranges.values()
        for address, size, live, _ in pieces(at, expected, addresses)
    }
    return len(recorded), len(recorded & replayed)


def measured_peak_bytes(columns: Columns, start: State) -> int:
    """Return the recorded peak of reserved memory."""
    return start.reserved_bytes + int(np.cumsum(columns.reserved_changes).max(initial=0))
