"""The allocator at one moment of a recorded run: what is used, what lies free in which pieces, and what pins it.

A segment can be given back only when nothing in it is in use: whatever is in use in a segment that has free memory
pins that memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from brim.memory.allocator import CachingAllocator
from brim.memory.blocks import Block
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
    born: dict[int, tuple[int, int]],
    *,
    what: str,
    event: int,
    time_s: float = 0.0,
    requested_bytes: int = 0,
) -> Moment:
    """Describe ``allocator``. ``used``: blocks that are in use or wait for a stream; ``born``: event and stack by
    their addresses."""
    free = [block for pool in _pools(allocator) for block in pool]
    found = [_use(blocks, born) for blocks in _segments([*used, *free])]
    pinned = [one for one in found if one.free_bytes and one.blocks_in_use]
    pinned.sort(key=lambda one: (-one.free_bytes, one.address))
    return Moment(
        what=what,
        event=event,
        time_s=time_s,
        allocated_bytes=sum(one.allocated_bytes for one in found),
        reserved_bytes=sum(one.bytes for one in found),
        requested_bytes=requested_bytes,
        largest_free_bytes=max((one.largest_free_bytes for one in found), default=0),
        pinned_bytes=sum(one.free_bytes for one in pinned),
        cached_bytes=sum(one.free_bytes for one in found if not one.blocks_in_use),
        free_by_size=_by_size([block.size for block in free]),
        segments=tuple(pinned[:MOST_SEGMENTS]),
        segments_with_pins=len(pinned),
    )


def _pools(allocator: CachingAllocator) -> Iterator[list[Block]]:
    private = allocator.private_pools.values()
    for pool in [allocator.small, allocator.large, *(one for p in private for one in (p.small, p.large))]:
        yield [block for block in pool.blocks.values() if block.mapped]


def _segments(blocks: list[Block]) -> Iterator[list[Block]]:
    """Blocks that share a segment, in order; ranges of an expandable segment that are mapped apart are apart."""
    starts = [block for block in blocks if block.prev is None or not block.prev.mapped]
    for start in starts:
        made: list[Block] = []
        block: Block | None = start
        while block is not None and block.mapped:
            made.append(block)
            block = block.next
        yield made


def _use(blocks: list[Block], born: dict[int, tuple[int, int]]) -> SegmentUse:
    first = blocks[0]
    in_use = sorted((block for block in blocks if not block.is_free), key=lambda block: (-block.size, block.address))
    free = [block.size for block in blocks if block.is_free]
    pins = []
    for block in in_use[:MOST_PINS]:
        event, stack = born.get(block.address, (-1, -1))
        pins.append(Pin(address=block.address, bytes=block.size, event=event, stack=stack))
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


def _by_size(sizes: list[int]) -> tuple[FreeBlocks, ...]:
    made = []
    low = 0
    for limit in (*SIZE_LIMITS, -1):
        inside = [size for size in sizes if low < size and (size <= limit or limit < 0)]
        made.append(FreeBlocks(limit_bytes=limit, count=len(inside), bytes=sum(inside)))
        low = limit
    return tuple(made)
