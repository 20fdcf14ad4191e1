"""A recorded run, replayed: does the simulated allocator do what the real one did?"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass

from brim.memory.allocator import CachingAllocator
from brim.memory.allocator_config import AllocatorConfig
from brim.memory.blocks import DEFAULT_POOL, Block, PoolId
from brim.memory.history import History
from brim.memory.out_of_memory import OutOfMemory
from brim.memory.recorded_device import RELEASES, RecordedDevice, SegmentEvent
from brim.memory.restore import pieces, restore
from brim.memory.starting_state import State, final_state, starting_state


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How far a replay agrees with the record, and the peaks of both.

    ``segments`` counts what was taken from the device and given back (``segment_alloc``, ``segment_free``,
    ``segment_map``, ``segment_unmap``); ``final_blocks`` the blocks of the snapshot's segments, free ones included.
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


def replay(history: History, config: AllocatorConfig | None = None) -> Replay:
    """Rebuild the start of ``history``, replay it, and compare every address, segment and peak.

    ``config`` None: the settings in the history.
    """
    config = AllocatorConfig.from_snapshot(history.settings) if config is None else config
    config = dataclasses.replace(config, memory_fraction=1.0)  # the record says what did not fit
    start = starting_state(history, config)
    run = _Run(history, config, start)
    run.all_events()
    return run.result(start)


class _Run:
    """One pass over a history."""

    def __init__(self, history: History, config: AllocatorConfig, start: State) -> None:
        self.history = history
        self.device = RecordedDevice()
        self.allocator = CachingAllocator(config, device=self.device)
        self.handles = restore(self.allocator, start)  # by recorded address
        self.pools = _PoolOf(history)
        self.allocations = self.matched = self.segments = self.ooms = self.ooms_matched = 0
        self.inconsistent = start.inconsistent

    def all_events(self) -> None:
        history = self.history
        pending: list[SegmentEvent] = []
        rows = zip(history.actions, history.addresses, history.sizes, history.streams, strict=True)
        for index, (action, address, size, stream) in enumerate(rows):
            if action in ("alloc", "oom") and size <= 0:
                self.inconsistent += 1
            elif action == "alloc":
                self._alloc(index, address, size, stream, pending)
                pending = []
            elif action == "free_requested":
                pending = self._give_back(pending)
                self._request(address)
            elif action == "free_completed":
                pending = self._give_back(pending)
                self._complete(address)
            elif action.startswith("segment_"):
                self.segments += 1
                pending.append((action, address, size))
            elif action == "oom":
                self._oom(size, stream, pending)
                pending = []
        self._give_back(pending)

    def _alloc(self, index: int, address: int, size: int, stream: int, pending: list[SegmentEvent]) -> None:
        pool = self.pools.at(index, address)
        if pending and pending[0][0] in RELEASES:
            if self.allocator.config.garbage_collection_threshold:
                self._collect(pending)
            elif self._released_before(size, stream, pool, pending):
                pending = self._give_back(pending)
        self.device.expected.extend(pending)
        block = self.allocator.malloc(size, stream, pool)
        self.device.expected.clear()
        self.allocations += 1
        self.matched += block.address == address
        self.handles[address] = block

    def _released_before(self, size: int, stream: int, pool: PoolId, pending: list[SegmentEvent]) -> bool:
        """Whether memory was given back before this request (``empty_cache``) and not because of it.

        A request that a cached block serves gives nothing back. One that finds none may, when the device is full;
        the outcome is the same either way, unless only a part of what is free was given back.
        """
        if self.allocator.would_hit(size, stream, pool):
            return True
        return pending[-1][0] in RELEASES

    def _collect(self, pending: list[SegmentEvent]) -> None:
        """Give back the whole segments that the record gave back: its memory fraction, hence its threshold, is unknown.

        Takes them out of ``pending``.
        """
        self.device.expected.extend(pending)
        for event in list(pending):
            pools = (self.allocator.large, self.allocator.small)
            block = next((pool.blocks[event[1]] for pool in pools if event[1] in pool.blocks), None)
            if event[0] == "segment_free" and block is not None and block.is_whole:
                self.allocator.release_segment(block)
                pending.remove(event)
        self.device.expected.clear()

    def _request(self, address: int) -> None:
        block = self.handles.get(address)
        if block is None or not block.allocated:
            self.inconsistent += 1
            return
        self.allocator.request_free(block)
        block.event_count = 1

    def _complete(self, address: int) -> None:
        block = self.handles.pop(address, None)
        if block is None:
            self.inconsistent += 1
            return
        if block.allocated:  # the record says only that it was completed
            self.allocator.request_free(block)
        block.event_count = 0
        self.allocator.complete_free(block)

    def _give_back(self, pending: list[SegmentEvent]) -> list[SegmentEvent]:
        """Empty the cache if memory was given back; returns what is left to happen."""
        if not pending or pending[0][0] not in RELEASES:
            return pending
        self.device.expected.extend(event for event in pending if event[0] in RELEASES)
        given_back = {self.pools.of_segment(address) for action, address, _ in pending if action in RELEASES}
        private = given_back - {DEFAULT_POOL}
        for pool in private & self.allocator.private_pools.keys():
            self.allocator.private_pools[pool].use_count = 0
        self.allocator.empty_cache(private.pop() if len(given_back) == 1 and private else None)
        self.device.expected.clear()
        return [event for event in pending if event[0] not in RELEASES]

    def _oom(self, size: int, stream: int, pending: list[SegmentEvent]) -> None:
        """The failing request gave back what it could and may have mapped pages first."""
        self.ooms += 1
        self.device.expected.extend(pending)
        self.device.lenient = False
        try:
            block = self.allocator.malloc(size, stream, DEFAULT_POOL)
        except OutOfMemory:
            self.ooms_matched += not self.device.expected
        else:
            self.allocator.free(block)
        self.device.lenient = True
        self.device.expected.clear()

    def result(self, start: State) -> Replay:
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
            peak_reserved_measured_bytes=measured_peak_bytes(self.history, start),
            peak_reserved_replayed_bytes=stats.reserved_peak_bytes,
            peak_allocated_replayed_bytes=stats.allocated_peak_bytes,
            inconsistent_events=self.inconsistent,
        )


class _PoolOf:
    """The pool of an allocation or a segment: from its event, else from the snapshot's private segments."""

    def __init__(self, history: History) -> None:
        self._pools = history.pools
        private = sorted((s.address, s.size, s.pool) for s in history.segments if s.pool != DEFAULT_POOL)
        self._starts = [address for address, _, _ in private]
        self._private = private

    def at(self, index: int, address: int) -> PoolId:
        return self._pools[index] if self._pools else self.of_segment(address)

    def of_segment(self, address: int) -> PoolId:
        if not self._starts:
            return DEFAULT_POOL
        start, size, pool = self._private[max(bisect_right(self._starts, address) - 1, 0)]
        return pool if start <= address < start + size else DEFAULT_POOL


def _compare(expected: State, allocator: CachingAllocator, handles: dict[int, Block]) -> tuple[int, int]:
    """Blocks of the final state, and how many of them the replay ended with: same address, size and use."""
    pools = [allocator.small, allocator.large]
    for private in allocator.private_pools.values():
        pools += [private.small, private.large]
    found = {(block.address, block.size, False) for pool in pools for block in pool.blocks.values()}
    found |= {(block.address, block.size, True) for block in handles.values()}
    addresses = sorted(expected.live)
    wanted = {
        (address, size, live is not None)
        for at in expected.ranges.values()
        for address, size, live, _ in pieces(at, expected, addresses)
    }
    return len(wanted), len(wanted & found)


def measured_peak_bytes(history: History, start: State) -> int:
    """The most that was reserved at once, by the record alone."""
    held = peak = start.reserved_bytes
    for action, size in zip(history.actions, history.sizes, strict=True):
        if action in ("segment_alloc", "segment_map"):
            held += size
            peak = max(peak, held)
        elif action in RELEASES:
            held -= size
    return peak
