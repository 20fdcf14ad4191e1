"""The allocator at one moment of a recorded run: memory in use, free pieces by size, and the blocks that pin them.

A segment can be given back only when nothing in it is in use: a block in use pins its segment's free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from brim.allocator.blocks import Block
from brim.allocator.caching_allocator import CachingAllocator
from brim.recordings.history import DeviceHistory, SegmentRecord
from brim.units import GIB, MIB

# Upper bounds of the sizes by which free blocks are counted; larger ones are counted apart.
SIZE_LIMITS = (512 << 10, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 100 * MIB, 500 * MIB, GIB)
MOST_SEGMENTS = 100  # listed
MOST_PINS = 3  # listed per segment


@dataclass(frozen=True, kw_only=True)
class FreeBlocks:
    """Number and bytes of the free blocks of up to ``limit_bytes`` (-1: above the other limits)."""

    limit_bytes: int
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A block in use. ``event``: the index of its allocation, -1: before the first event.

    ``stack``: the number of the stack that allocated it, -1: not recorded.
    """

    address: int
    bytes: int
    event: int
    stack: int


@dataclass(frozen=True, kw_only=True)
class SegmentUse:
    """A segment, or a mapped range of an expandable one. ``pins``: its largest blocks in use."""

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
    """The allocator at the event ``event``. ``what``: ``peak``, ``oom`` or ``end``.

    ``requested_bytes`` is the size of the failed request. ``pinned_bytes`` are free in segments with blocks in use,
    ``cached_bytes`` in segments without. ``segments`` are ordered by their pinned bytes, the most first.
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


Piece = tuple[int, Pin | None]  # bytes; the block in use, None: free


class _Segments:
    """Adds up the segments of a moment and keeps those that pin most."""

    def __init__(self) -> None:
        self._allocated_bytes = self._reserved_bytes = self._pinned_bytes = self._cached_bytes = 0
        self._largest_free_bytes = self._with_pins = 0
        self._pinned: list[SegmentUse] = []
        self._free = {limit: [0, 0] for limit in (*SIZE_LIMITS, -1)}  # count and bytes

    def add(self, address: int, pieces: Iterable[Piece], *, stream: int, small: bool, expandable: bool) -> None:
        used_bytes = free_bytes = largest_free_bytes = count = 0
        pins: list[Pin] = []
        for size, pin in pieces:
            if pin is None:
                free_bytes, largest_free_bytes = free_bytes + size, max(largest_free_bytes, size)
                counted = self._free[next((limit for limit in SIZE_LIMITS if size <= limit), -1)]
                counted[0] += 1
                counted[1] += size
            else:
                used_bytes, count = used_bytes + size, count + 1
                if len(pins) < MOST_PINS or size > pins[-1].bytes:
                    pins = sorted([*pins, pin], key=lambda pin: (-pin.bytes, pin.address))[:MOST_PINS]
        self._allocated_bytes += used_bytes
        self._reserved_bytes += used_bytes + free_bytes
        self._largest_free_bytes = max(self._largest_free_bytes, largest_free_bytes)
        if not count:
            self._cached_bytes += free_bytes
        elif free_bytes:
            self._with_pins += 1
            self._pinned_bytes += free_bytes
            use = SegmentUse(
                address=address,
                bytes=used_bytes + free_bytes,
                stream=stream,
                small=small,
                expandable=expandable,
                allocated_bytes=used_bytes,
                free_bytes=free_bytes,
                largest_free_bytes=largest_free_bytes,
                blocks_in_use=count,
                pins=tuple(pins),
            )
            self._pinned.append(use)
            if len(self._pinned) > 2 * MOST_SEGMENTS:
                self._cut()

    def _cut(self) -> None:
        self._pinned.sort(key=lambda use: (-use.free_bytes, use.address))
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
    """Describe ``allocator``. ``used``: blocks in use or waiting for a stream; ``stack_of``: a block's stack."""
    segments = _Segments()
    free = [block for pool in _pools(allocator) for block in pool]
    for blocks in _blocks_by_segment([*used, *free]):
        pieces = (
            (
                block.size,
                None
                if block.is_free
                else Pin(address=block.address, bytes=block.size, event=block.event, stack=stack_of(block)),
            )
            for block in blocks
        )
        first = blocks[0]
        segments.add(
            first.address, pieces, stream=first.stream, small=first.pool.small, expandable=first.segment is not None
        )
    return segments.moment(what=what, event=event, time_s=time_s, requested_bytes=requested_bytes)


def final_moment(history: DeviceHistory) -> Moment:
    """Describe the segments of a snapshot without events. No object is kept per block."""
    segments = _Segments()
    for segment in history.segments:
        segments.add(
            segment.address,
            pieces_of(segment),
            stream=segment.stream,
            small=segment.small,
            expandable=segment.expandable,
        )
    return segments.moment(what="peak", event=0)


def pieces_of(segment: SegmentRecord) -> Iterator[Piece]:
    """Yield a segment's blocks in use and the free memory between them, in order."""
    at, end = segment.address, segment.address + segment.size
    for block in segment.blocks:
        if block.state == "inactive":
            continue
        if block.address > at:
            yield block.address - at, None
        yield block.size, Pin(address=block.address, bytes=block.size, event=-1, stack=block.stack)
        at = block.address + block.size
    if at < end:
        yield end - at, None


def _pools(allocator: CachingAllocator) -> Iterator[list[Block]]:
    private = allocator.private_pools.values()
    for pool in [allocator.small, allocator.large, *(size_pool for p in private for size_pool in (p.small, p.large))]:
        yield [block for block in pool.blocks.values() if block.mapped]


def _blocks_by_segment(blocks: list[Block]) -> Iterator[list[Block]]:
    """Yield the blocks of each segment in order. Ranges mapped apart are apart."""
    starts = [block for block in blocks if block.prev is None or not block.prev.mapped]
    for start in starts:
        segment: list[Block] = []
        block: Block | None = start
        while block is not None and block.mapped:
            segment.append(block)
            block = block.next
        yield segment
