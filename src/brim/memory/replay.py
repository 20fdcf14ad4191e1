"""A recorded run, replayed: does the simulated allocator do what the real one did?"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass

from brim.memory.allocator import CachingAllocator
from brim.memory.allocator_config import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorConfig
from brim.memory.blocks import DEFAULT_POOL, Block, BlockPool, PoolId
from brim.memory.history import History, contradictions
from brim.memory.out_of_memory import OutOfMemory
from brim.memory.recorded_device import RELEASES, RecordedDevice, SegmentEvent
from brim.memory.restore import pieces, restore
from brim.memory.starting_state import State, final_state, starting_state

MOST_EVENTS = 4_000_000  # how much is replayed again to find out sizes that no event tells


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

    ``config`` None: the settings in the history. Raises FormatError for events that no allocator can have written.
    """
    config = AllocatorConfig.from_snapshot(history.settings) if config is None else config
    with contradictions(history):
        start = settled_start(history, config)
        run = Run(history, config, start)
        run.all_events()
        return run.result()


def settled_start(history: History, config: AllocatorConfig) -> State:
    """The starting state; sizes that no event tells are corrected until the record's choices follow from them."""
    start = starting_state(history, config)
    for _ in range(max(MOST_EVENTS // max(len(history.actions), 1), 4) if start.guessed else 0):
        run = Run(history, config, start, stop_at_wrong_guess=True)
        run.all_events()
        if run.wrong_guess is None:
            break
        start.enlarge(*run.wrong_guess)
    return start


class _Replaying(CachingAllocator):
    """Passes its cache over when the record shows that a request found nothing there.

    A request that fails waits for other streams in between; the record tells only that their blocks became free.
    """

    passes_over = False
    keeps_cache = False  # during a capture, a request that fails gives nothing back

    def empty_cache(self, pool: PoolId | None = None) -> None:
        if not self.keeps_cache:
            super().empty_cache(pool)

    def _find_free(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        return None if self.passes_over else super()._find_free(pool, size, stream)


class Run:
    """One pass over a history. Subclasses may take note of its events."""

    def __init__(
        self, history: History, config: AllocatorConfig, start: State, *, stop_at_wrong_guess: bool = False
    ) -> None:
        config = dataclasses.replace(config, memory_fraction=1.0)  # the record says what did not fit
        self.history, self.start, self.config = history, start, config
        self.device = RecordedDevice()
        self.allocator = _Replaying(config, device=self.device)
        self.handles = restore(self.allocator, start)  # by recorded address
        self.device.held.update(start.ranges, start.lowest.values())
        self.pools = _PoolOf(history)
        self.released_pools: set[PoolId] = set()  # of the releases that are pending
        self.allocations = self.matched = self.segments = self.ooms = self.ooms_matched = 0
        self.inconsistent = start.inconsistent
        self.stops = stop_at_wrong_guess
        self.wrong_guess: tuple[int, int] | None = None  # a block at the start, and by how much it is larger

    def note(self, index: int, block: Block | None) -> None:
        """Event ``index`` is happening, to this block if it is about one."""

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
                if self.wrong_guess is not None:
                    return
                self.note(index, self.handles[address])
            elif action == "free_requested":
                pending = self._give_back(pending)
                self.note(index, self.handles.get(address))
                self._request(address)
            elif action == "free_completed":
                pending = self._give_back(pending, midway=True)
                self.note(index, self.handles.get(address))
                self._complete(address)
            elif action.startswith("segment_"):
                self.segments += 1
                self.note(index, None)
                pending.append((action, address, size))
                if action in RELEASES:
                    self.released_pools.add(self.pools.at(index, address))
            elif action == "oom":
                self.note(index, None)
                self._oom(index, size, stream, pending)
                pending = []
        self._give_back(pending)

    def _alloc(self, index: int, address: int, size: int, stream: int, pending: list[SegmentEvent]) -> None:
        pool = self.pools.at(index, address)
        released = any(event[0] in RELEASES for event in pending)
        taken = any(event[0] not in RELEASES for event in pending)
        if released and self.config.garbage_collection_threshold and taken:
            self._collect(pending)
        elif released and (self.config.max_split_bytes is None or not taken):
            pending = self._give_back(pending)
        self._free_pools()
        self.released_pools.clear()
        self.device.expected.extend(pending)
        self.allocator.passes_over = released and taken
        try:
            block = self.allocator.malloc(size, stream, pool)
        except OutOfMemory:  # the record gives back what the replay does not have: go on without it
            self.device.expected.clear()
            block = self.allocator.malloc(size, stream, pool)
        self.allocator.passes_over = False
        self.device.expected.clear()
        self.allocations += 1
        if block.address == address:
            self.matched += 1
        elif self.stops:
            self._question(index, block, size)
        self.handles[address] = block

    def _question(self, index: int, block: Block, nbytes: int) -> None:
        """The record did not take this block: it was smaller, if the size of the block before it was guessed."""
        before = self.start.live.get(self.start.guessed.get(block.address, -1))
        if before is None or before.freed_at <= index:
            return
        rest = block.size + (block.next.size if block.next is not None and block.next.is_free else 0)
        by = rest - self.config.round_size(nbytes) + MIN_BLOCK_BYTES
        if before.size + by <= self.config.round_size(before.requested) + SMALL_BYTES:
            self.wrong_guess = before.address, by

    def _collect(self, pending: list[SegmentEvent]) -> None:
        """Give back the whole segments that the record gave back: its memory fraction is not known.

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

    def _give_back(self, pending: list[SegmentEvent], *, midway: bool = False) -> list[SegmentEvent]:
        """Empty the cache if memory was given back; returns what is left to happen."""
        if not pending or pending[0][0] not in RELEASES:
            return pending
        if midway and (self.config.max_split_bytes is not None or self.config.garbage_collection_threshold):
            self._collect(pending)  # the rest of the cache is given back after the waiting
            return pending
        self.device.expected.extend(event for event in pending if event[0] in RELEASES)
        self._free_pools()
        for pool in [None] if DEFAULT_POOL in self.released_pools else sorted(self.released_pools):
            self.allocator.empty_cache(pool)
        self.released_pools.clear()
        self.device.expected.clear()
        return [event for event in pending if event[0] not in RELEASES]

    def _free_pools(self) -> None:
        """Private pools that gave memory back were in use by no graph any more."""
        for pool in self.released_pools & self.allocator.private_pools.keys():
            self.allocator.private_pools[pool].use_count = 0

    def _oom(self, index: int, size: int, stream: int, pending: list[SegmentEvent]) -> None:
        """The failing request gave back what it could and may have mapped pages first."""
        self.ooms += 1
        self._free_pools()
        self.released_pools.clear()
        self.device.expected.extend(pending)
        self.device.lenient = False
        self.allocator.passes_over = True
        self.allocator.keeps_cache = not any(event[0] in RELEASES for event in pending)
        try:
            block = self.allocator.malloc(size, stream, self.pools.at(index, -1))
        except OutOfMemory:
            self.ooms_matched += not self.device.expected
        else:
            self.allocator.free(block)
        self.allocator.passes_over = self.allocator.keeps_cache = False
        self.device.lenient = True
        self.device.expected.clear()

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
            peak_reserved_measured_bytes=measured_peak_bytes(self.history, self.start),
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
