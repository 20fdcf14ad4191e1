"""The allocator at one moment of a recorded run: what is used, what lies free in which pieces, and what pins it.

A segment can be given back only when nothing in it is in use: whatever is in use in a segment that has free memory
pins that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from brim.allocator.blocks import Block
from brim.allocator.caching_allocator import CachingAllocator
from brim.units import GIB, MIB

# Free blocks are counted by size: up to each of these, and larger.
SIZE_LIMITS = (512 << 10, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 100 * MIB, 500 * MIB, GIB)
MOST_SEGMENTS = 100  # those that pin most are listed
MOST_PINS = 3  # blocks per segment


@dataclass(frozen=True, kw_only=True)
class FreeBlocks:
    """The free blocks of up to ``limit_bytes`` (-1: of any size above the other limits)."""

    limit_bytes: int
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A block in use. ``event`` is the index of the event that allocated it, -1: it was there before the first.

    ``stack`` is the number of the stack that asked for it, -1: not recorded.
    """

    address: int
    bytes: int
    event: int
    stack: int


@dataclass(frozen=True, kw_only=True)
class SegmentUse:
    """A segment, or a mapped range of an expandable one, whose free memory ``pins`` keep, largest first."""

    address: int
    bytes: int
    stream: int
    small: bool
    expandable: bool
    allocated_bytes: int
    free_bytes: int
    largest_free_bytes: int
    blocks_in_use: int
    pins: tuple[Pin, ...]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The allocator when event ``event`` happened. ``what``: ``peak``, ``oom`` or ``end``.

    ``requested_bytes`` is the request that failed. ``pinned_bytes`` are free in segments that something in use keeps
    from being given back; ``cached_bytes`` are free in segments without anything in use. Segments are listed by
    what they pin, the most first.
    """

    what: str
    event: int
    time_s: float
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int
    largest_free_bytes: int
    pinned_bytes: int
    cached_bytes: int
    free_by_size: tuple[FreeBlocks, ...]
    segments: tuple[SegmentUse, ...]
    segments_with_pins: int

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


def moment(
    allocator: CachingAllocator,
    used: Iterable[Block],
    stack_of: Callable[[Block], int],
    *,
    what: str,
    event: int,
    time_s: float = 0.0,
    requested_bytes: int = 0,
) -> Moment:
    """Describe ``allocator``. ``used``: blocks that are in use or wait for a stream; ``stack_of`` tells who asked."""
    free = [block for pool in _pools(allocator) for block in pool]
    segments = Segments()
    for blocks in _segments([*used, *free]):
        segments.add(_use(blocks, stack_of), [block.size for block in blocks if block.is_free])
    return segments.moment(what=what, event=event, time_s=time_s, requested_bytes=requested_bytes)


class Segments:
    """All segments of a moment. Only those that pin most are kept."""

    def __init__(self) -> None:
        self._allocated_bytes = self._reserved_bytes = self._pinned_bytes = self._cached_bytes = 0
        self._largest_free_bytes = self._with_pins = 0
        self._pinned: list[SegmentUse] = []
        self._free = {limit: [0, 0] for limit in (*SIZE_LIMITS, -1)}  # count and bytes

    def add(self, use: SegmentUse, free: Iterable[int]) -> None:
        """A segment, and the bytes of each of its free blocks."""
        self._allocated_bytes += use.allocated_bytes
        self._reserved_bytes += use.bytes
        self._largest_free_bytes = max(self._largest_free_bytes, use.largest_free_bytes)
        for size in free:
            counted = self._free[next((limit for limit in SIZE_LIMITS if size <= limit), -1)]
            counted[0] += 1
            counted[1] += size
        if not use.blocks_in_use:
            self._cached_bytes += use.free_bytes
        elif use.free_bytes:
            self._with_pins += 1
            self._pinned_bytes += use.free_bytes
            self._pinned.append(use)
            if len(self._pinned) > 2 * MOST_SEGMENTS:
                self._cut()

    def _cut(self) -> None:
        self._pinned.sort(key=lambda one: (-one.free_bytes, one.address))
        del self._pinned[MOST_SEGMENTS:]

    def moment(self, *, what: str, event: int, time_s: float = 0.0, requested_bytes: int = 0) -> Moment:
        self._cut()
        return Moment(
            what=what,
            event=event,
            time_s=time_s,
            allocated_bytes=self._allocated_bytes,
            reserved_bytes=self._reserved_bytes,
            requested_bytes=requested_bytes,
            largest_free_bytes=self._largest_free_bytes,
            pinned_bytes=self._pinned_bytes,
            cached_bytes=self._cached_bytes,
            free_by_size=tuple(
                FreeBlocks(limit_bytes=limit, count=count, bytes=bytes)
                for limit, (count, bytes) in self._free.items()
            ),
            segments=tuple(self._pinned),
            segments_with_pins=self._with_pins,
        )


def _pools(allocator: CachingAllocator) -> Iterator[list[Block]]:
    private = allocator.private_pools.values()
    for pool in [allocator.small, allocator.large, *(size_pool for p in private for size_pool in (p.small, p.large))]:
        yield [block for block in pool.blocks.values() if block.mapped]


def _segments(blocks: list[Block]) -> Iterator[list[Block]]:
    """Blocks that share a segment, in order; ranges of an expandable segment that are mapped apart are apart."""
    starts = [block for block in blocks if block.prev is None or not block.prev.mapped]
    for start in starts:
        segment: list[Block] = []
        block: Block | None = start
        while block is not None and block.mapped:
            segment.append(block)
            block = block.next
        yield segment


def _use(blocks: list[Block], stack_of: Callable[[Block], int]) -> SegmentUse:
    first = blocks[0]
    in_use = sorted((block for block in blocks if not block.is_free), key=lambda block: (-block.size, block.address))
    free = [block.size for block in blocks if block.is_free]
    pins = [
        Pin(address=block.address, bytes=block.size, event=block.event, stack=stack_of(block))
        for block in in_use[:MOST_PINS]
    ]
    size = sum(block.size for block in blocks)
    return SegmentUse(
        address=first.address,
        bytes=size,
        stream=first.stream,
        small=first.pool.small,
        expandable=first.segment is not None,
        allocated_bytes=size - sum(free),
        free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        blocks_in_use=len(in_use),
        pins=tuple(pins),
    )
