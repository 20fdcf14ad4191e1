"""Expandable segments: address space that is mapped page by page on demand.

Follows ``find_expandable_block``, ``map_block``, ``unmap_block`` and ``try_allocate_expandable_block`` of PyTorch's
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from brim.allocator.blocks import ADDRESS_MASK, AddressRange, Block, BlockPool, Stats
from brim.allocator.config import AllocatorConfig
from brim.allocator.device_memory import DeviceMemory
from brim.units import MIB, TIB

SMALL_PAGE_BYTES = 2 * MIB
UNBOUNDED_BYTES = 256 * TIB  # address space of a segment on a device of unknown size
OnSegment = Callable[[str, int, int, int], None]


@dataclass(eq=False)
class ExpandableSegments:
    """The expandable segments of an allocator. ``on_segment`` is called for ``segment_map`` and ``segment_unmap``."""

    _device: DeviceMemory
    _stats: Stats
    _config: AllocatorConfig
    _on_segment: OnSegment | None
    _ages: Iterator[int]

    def page_bytes(self, small: bool) -> int:
        return SMALL_PAGE_BYTES if small else self._config.large_segment_bytes

    def allocate(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Take a free block of at least ``size`` bytes out of ``pool``; None if the device has no memory left.

        As in PyTorch, pages mapped before a failure stay mapped and free in the pool.
        """
        candidate = self._find(pool, size, stream)
        if candidate is None or (not candidate.mapped and not self._map(candidate, min(candidate.size, size))):
            return None
        while candidate.size < size:
            after = candidate.next
            assert after is not None and not after.mapped, "an expandable block ends in unmapped address space"
            if not self._map(after, min(size - candidate.size, after.size)):
                return None
            candidate = after
        pool.remove(candidate)
        return candidate

    def _find(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Return the lowest run of unmapped and free blocks with room for ``size``, else new address space."""
        for address in pool.unmapped.get(stream, ()):
            block = pool.holes[address]
            if block.prev is not None and block.prev.is_free:
                block = block.prev
            if _has_room(block, size):
                return block
        block = self.reserve(pool, stream)
        return block if block.size >= size else None

    def reserve(self, pool: BlockPool, stream: int) -> Block:
        """Reserve the address space of another segment: 9/8 of the device unless the settings say less."""
        page = self.page_bytes(pool.small)
        total = self._device.total_bytes
        reserved_bytes = UNBOUNDED_BYTES if total is None else total + total // 8
        reserve = self._config.reserve
        if isinstance(reserve, float) and total is not None:
            reserved_bytes = min(reserved_bytes, int(reserve * total))
        elif isinstance(reserve, int):
            reserved_bytes = min(reserved_bytes, reserve)
        size = -(-reserved_bytes // page) * page
        return self.adopt(pool, stream, AddressRange(self._device.reserve(size), size, page))

    def adopt(self, pool: BlockPool, stream: int, segment: AddressRange) -> Block:
        """Add address space with nothing mapped to ``pool``."""
        block = Block(segment.address, segment.bytes, stream, pool, segment, next(self._ages))
        block.mapped = False
        pool.insert_hole(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first ``size`` bytes of an unmapped block, rounded up to pages."""
        assert block.segment is not None
        page = block.segment.page_bytes
        mapped = -(-size // page) * page
        if not self._device.map(block.address, mapped):
            return False
        pool, start = block.pool, block.address
        pool.remove_hole(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(start + mapped, block.size - mapped, block.stream, pool, block.segment, block.age)
            rest.mapped = False
            rest.splice(block, block.next)
            pool.insert_hole(rest)
            block.size = mapped
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        pool.insert(block)
        self._stats.add_reserved(mapped)
        if self._on_segment is not None:
            self._on_segment("segment_map", start, mapped, block.stream)
        return True

    def unmap(self, block: Block) -> None:
        """Unmap the full pages inside a free block; free address space with nothing mapped."""
        assert block.segment is not None
        base, page = block.segment.address, block.segment.page_bytes
        begin = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        pool, stream = block.pool, block.stream
        self._device.unmap(begin, end - begin)
        pool.remove(block)
        if begin > block.address:
            before = Block(block.address, begin - block.address, stream, pool, block.segment, block.age)
            before.splice(block.prev, block)
            pool.insert(before)
        if end < block.address + block.size:
            after = Block(end, block.address + block.size - end, stream, pool, block.segment, block.age)
            after.splice(block, block.next)
            pool.insert(after)
        block.address, block.size, block.mapped = begin, end - begin, False
        pool.merge(block, block.prev)
        pool.merge(block, block.next)
        if block.prev is not None or block.next is not None:
            pool.insert_hole(block)
        else:
            self._device.unreserve(block.address, block.size)
        self._stats.reserved_bytes -= end - begin
        if self._on_segment is not None:
            self._on_segment("segment_unmap", begin, end - begin, stream)


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.is_free:
        room += block.size
        block = block.next
    return room >= size


def expandable_choice(pool: BlockPool, keys: list[int], index: int, *, expandable: bool) -> int:
    """Return the index of the free block to take instead of ``keys[index]``.

    A block before unmapped address space counts as large as it can grow. With expandable segments off (``expandable``
    False), their blocks are skipped.
    """
    block = pool.blocks[keys[index] & ADDRESS_MASK]
    if block.segment is None:
        return index
    if not expandable:
        index += 1
        while index < len(keys) and pool.blocks[keys[index] & ADDRESS_MASK].segment is not None:
            index += 1
        return index
    while block.segment is not None and index + 1 < len(keys):
        after = pool.blocks[keys[index + 1] & ADDRESS_MASK]
        if _grown_bytes(after) >= _grown_bytes(block):
            break
        block = after
        index += 1
    return index


def _grown_bytes(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
