"""PyTorch's CUDA caching allocator, step for step, without a device.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.1 to 2.13: rounding, pools, best fit, splitting, merging,
garbage collection, release and retry. The same requests and segment addresses give the same addresses.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

from brim.allocator.blocks import ADDRESS_MASK, DEFAULT_POOL, SIZE_SHIFT, Block, BlockPool, PoolId, PrivatePool, Stats
from brim.allocator.config import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorConfig
from brim.allocator.device_memory import DeviceMemory, SimulatedDevice
from brim.allocator.expandable import ExpandableSegments, OnSegment, expandable_choice
from brim.allocator.out_of_memory import OutOfMemory
from brim.errors import UnsupportedError, UsageError


class CachingAllocator:
    """The allocator of one device.

    ``capacity_bytes`` is the memory of the simulated device (None: no limit), which ``device`` replaces.
    ``on_segment`` is called with ``(action, address, bytes, stream)`` for every ``segment_alloc``, ``segment_free``,
    ``segment_map`` and ``segment_unmap``. ``stats`` and ``live`` (blocks in use by address) are for reading.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        capacity_bytes: int | None = None,
        *,
        device: DeviceMemory | None = None,
        on_segment: OnSegment | None = None,
    ) -> None:
        self.config = config = AllocatorConfig() if config is None else config
        if config.backend != "native":
            raise UnsupportedError(f"Cannot simulate backend:{config.backend}.", todo="Use backend:native.")
        self.device: DeviceMemory = SimulatedDevice(capacity_bytes) if device is None else device
        total = self.device.total_bytes
        if config.memory_fraction < 1 and total is None:
            raise UsageError(
                f"Cannot apply a memory fraction of {config.memory_fraction:g}.", "The size of the device is unknown."
            )
        self.stats = Stats()
        self.live: dict[int, Block] = {}
        self.small, self.large = BlockPool(small=True), BlockPool(small=False)
        self.private_pools: dict[PoolId, PrivatePool] = {}
        self._ages = itertools.count(1) if config.oldest_segment_first else itertools.repeat(0)
        self.expandable = ExpandableSegments(self.device, self.stats, config, on_segment, self._ages)
        self._on_segment = on_segment
        self._allowed = int(config.memory_fraction * (total or 0)) if config.memory_fraction < 1 else None
        self._collects = self._allowed is not None and config.garbage_collection_threshold > 0
        self._plain_rounding = not any(config.roundup_power2_divisions)
        self._unsplittable = config.max_split_bytes or 1 << 62
        self.ignores_free_blocks = False  # for a replay whose record shows that a request found none

    # Requests

    def malloc(self, nbytes: int, stream: int = 0, pool: PoolId | None = None) -> Block:
        """Allocate a block for ``nbytes`` bytes on ``stream``, in the private pool ``pool`` or the common pools.

        Raises OutOfMemory where PyTorch does, after it has released cached memory.
        """
        if nbytes <= 0:
            raise UsageError(f"Cannot allocate {nbytes} bytes.", todo="Request at least one byte.")
        size = (nbytes + 511) & -512 if self._plain_rounding else self.config.round_size(nbytes)
        blocks = self._pool_for(size, stream, pool)
        block = None if self.ignores_free_blocks else self._find_free(blocks, size, stream)
        if block is None:
            block = self._find_new(blocks, size, stream, nbytes)
        rest = block.size - size
        if rest and self._should_split(blocks, size, rest):
            block = self._split(block, size)
        self.mark_live(block, nbytes)
        return block

    def mark_live(self, block: Block, nbytes: int) -> None:
        """Mark a block that is in no pool as in use."""
        block.allocated, block.requested = True, nbytes
        self.live[block.address] = block
        stats = self.stats
        stats.allocated_bytes += block.size
        if stats.allocated_bytes > stats.allocated_peak_bytes:
            stats.allocated_peak_bytes = stats.allocated_bytes

    def free(self, block: Block) -> None:
        """Free a block."""
        self.request_free(block)
        self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """Do the first half of ``free``: the tensor is gone, the memory is not yet reusable."""
        if self.live.pop(block.address, None) is not block:
            raise UsageError(f"Cannot free the block at {block.address:#x}.", "It is not in use.")
        block.allocated = False
        self.stats.allocated_bytes -= block.size

    def complete_free(self, block: Block) -> None:
        """Do the second half of ``free``: merge with free neighbours and insert into the pool."""
        pool = block.pool
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.allocated:
                pool.merge(block, neighbour)
        pool.insert(block)

    def block_pool(self, pool: PoolId, small: bool) -> BlockPool:
        """Return the free blocks of a pool, which is created if it is new."""
        if pool == DEFAULT_POOL:
            return self.small if small else self.large
        private = self.private_pools.get(pool)
        if private is None:
            private = self.private_pools[pool] = PrivatePool()
        return private.small if small else private.large

    def _pool_for(self, size: int, stream: int, pool: PoolId | None) -> BlockPool:
        return self.block_pool(DEFAULT_POOL if pool is None else pool, size <= SMALL_BYTES)

    # Finding a block

    def _find_free(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Take PyTorch's only candidate out of ``pool``; None if there is none or it is refused."""
        if self._collects:
            pool.get_free_calls += 1
        keys = pool.free.get(stream)
        if not keys:
            return None
        index = bisect_left(keys, size << SIZE_SHIFT)
        if index == len(keys):
            return None
        if pool.unmapped:
            index = expandable_choice(pool, keys, index, expandable=self.config.expandable_segments)
            if index == len(keys):
                return None
        limit = self._unsplittable
        block = pool.blocks[keys[index] & ADDRESS_MASK]
        if block.size >= limit if size < limit else block.size >= size + self.config.max_non_split_rounding_bytes:
            return None
        del keys[index], pool.blocks[block.address]
        return block

    def _find_new(self, pool: BlockPool, size: int, stream: int, nbytes: int) -> Block:
        """Allocate a block from the device, releasing cached memory if needed. Raises OutOfMemory."""
        if self._collects:
            self._collect_garbage()
        block = self._new_segment(pool, size, stream)
        if block is None and self._release_available(pool, size, stream):
            block = self._new_segment(pool, size, stream)
        if block is None:
            block = self._retry(pool, size, stream)
        if block is None:
            raise self._out_of_memory(size, nbytes)
        return block

    def _retry(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        self.empty_cache()
        self.stats.alloc_retries += 1
        return self._new_segment(pool, size, stream)

    def _new_segment(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        segment_bytes = self.config.segment_bytes(size)
        if self._allowed is not None and self.stats.reserved_bytes + segment_bytes > self._allowed:
            return None
        if self.config.expandable_segments:
            return self.expandable.allocate(pool, size, stream)
        address = self.device.allocate(segment_bytes)
        if address is None:
            return None
        self.stats.add_reserved(segment_bytes)
        if self._on_segment is not None:
            self._on_segment("segment_alloc", address, segment_bytes, stream)
        return Block(address, segment_bytes, stream, pool, age=next(self._ages))

    def _should_split(self, pool: BlockPool, size: int, rest: int) -> bool:
        if pool.small or self.config.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return size < self._unsplittable and rest > SMALL_BYTES

    def _split(self, rest: Block, size: int) -> Block:
        """Split off and return the first ``size`` bytes of a free block; the rest goes back to the pool."""
        before, pool, segment = rest.prev, rest.pool, rest.segment
        block = Block(rest.address, size, rest.stream, pool, segment, rest.age)
        block.prev, block.next = before, rest
        if before is not None:
            before.next = block
        rest.prev = block
        rest.address += size
        rest.size -= size
        pool.insert(rest)
        return block

    # Giving memory back

    def empty_cache(self, pool: PoolId | None = None) -> None:
        """Release free segments and pages (``torch.cuda.empty_cache``, and the last resort of ``malloc``).

        With ``pool``, release those of one private pool without users.
        """
        if pool is None:
            self._release_blocks(self.large)
            self._release_blocks(self.small)
        for name, private in self.private_pools.items():
            if not private.use_count and pool in (None, name):
                self._release_blocks(private.small)
                self._release_blocks(private.large)

    def release_segment(self, block: Block) -> None:
        """Release a free segment."""
        assert block.is_whole, "only whole segments are released"
        block.pool.remove(block)
        self.device.release(block.address, block.size)
        self.stats.reserved_bytes -= block.size
        if self._on_segment is not None:
            self._on_segment("segment_free", block.address, block.size, block.stream)

    def _release_blocks(self, pool: BlockPool) -> None:
        expandable = []
        for block in pool.ordered():
            if block.segment is not None:
                expandable.append(block)
            elif block.is_whole:
                self.release_segment(block)
        for block in expandable:
            self.expandable.unmap(block)

    def _release_available(self, pool: BlockPool, size: int, stream: int) -> bool:
        """With ``max_split_size``, release a sufficient oversize block, or several, largest first."""
        limit = self.config.max_split_bytes
        if limit is None:
            return False
        enough_bytes = max(size, limit)
        keys = pool.free.get(stream, [])
        index = bisect_left(keys, enough_bytes << SIZE_SHIFT)
        if index < len(keys):
            block = pool.blocks[keys[index] & ADDRESS_MASK]
            if block.is_whole:
                self.release_segment(block)
                return True
        released = 0
        for key in reversed(keys[:index]):
            if released >= enough_bytes or key >> SIZE_SHIFT < limit:
                break
            block = pool.blocks[key & ADDRESS_MASK]
            if block.is_whole:
                released += block.size
                self.release_segment(block)
        return released >= enough_bytes

    def _collect_garbage(self) -> None:
        """Release free large segments, first those passed over more often than the average."""
        assert self._allowed is not None
        excess = self.stats.reserved_bytes - int(self.config.garbage_collection_threshold * self._allowed)
        if excess <= 0:
            return
        calls = self.large.get_free_calls
        segments = [block for block in self.large.ordered() if block.is_whole]
        age = sum(calls - block.gc_base for block in segments)
        reclaimed = 0
        while segments and reclaimed < excess:
            threshold = age / len(segments)
            old = [block for block in segments if calls - block.gc_base >= threshold]
            segments = [block for block in segments if calls - block.gc_base < threshold]
            for block in old:
                age -= calls - block.gc_base
                reclaimed += block.size
                self.release_segment(block)
            if not old:
                return

    def _out_of_memory(self, size: int, nbytes: int) -> OutOfMemory:
        pools = [pool for private in self.private_pools.values() for pool in (private.small, private.large)]
        free = self.device.free_bytes or 0
        return OutOfMemory(
            tried_bytes=self.config.segment_bytes(size),
            request_bytes=nbytes,
            total_bytes=self.device.total_bytes or self.stats.reserved_bytes + free,
            free_bytes=free,
            allowed_bytes=self._allowed,
            allocated_bytes=self.stats.allocated_bytes,
            reserved_bytes=self.stats.reserved_bytes,
            private_free_bytes=sum(block.size for pool in pools for block in pool.blocks.values()),
        )
