"""Blocks, the pools that hold the free ones, and the counters of the caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ADDRESS_BITS = 64
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
SIZE_SHIFT = 2 * ADDRESS_BITS  # of the keys that order free blocks
PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A piece of a segment: in use, free, or (expandable segments only) address space without memory behind it."""

    address: int
    size: int
    stream: int
    pool: BlockPool
    segment: AddressRange | None = None
    age: int = 0  # the number of its segment in order of allocation; 0 for all if addresses alone decide
    requested: int = 0
    allocated: bool = False
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None
    event: int = -1  # of a recorded run: the event that allocated it
    event_count: int = 0  # streams whose events it still waits for
    key: int = field(init=False)  # of a free block: its key in its pool
    gc_base: int = field(init=False)  # of a free block: the pool's clock when it was inserted

    @property
    def is_free(self) -> bool:
        """True if neither in use nor waiting for another stream; also for unmapped blocks."""
        return not self.allocated and not self.event_count

    @property
    def is_whole(self) -> bool:
        """True for an entire ``cudaMalloc`` segment that is not split."""
        return self.segment is None and self.prev is None and self.next is None

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Link this block between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The address space of an expandable segment, which is mapped in pages of ``page_bytes``."""

    address: int
    bytes: int
    page_bytes: int


class PrivatePool:
    """The memory of one set of CUDA graph captures, or of one ``MemPool``."""

    __slots__ = ("large", "small", "use_count")

    def __init__(self) -> None:
        self.use_count = 1
        self.large = BlockPool(small=False, private=self)
        self.small = BlockPool(small=True, private=self)


class BlockPool:
    """The free blocks of a size class, ordered by (stream, size, age, address) for best fit.

    ``free[stream]`` has a free block's key ``size << 128 | age << 64 | address``: one bisection finds the smallest
    sufficient block of the oldest segment at the lowest address, as PyTorch's ordered set does.
    """

    __slots__ = ("blocks", "free", "get_free_calls", "holes", "private", "small", "unmapped")

    def __init__(self, *, small: bool, private: PrivatePool | None = None) -> None:
        self.small, self.private = small, private
        self.free: dict[int, list[int]] = {}
        self.blocks: dict[int, Block] = {}  # free and mapped, by address
        self.unmapped: dict[int, list[int]] = {}  # stream -> addresses in order
        self.holes: dict[int, Block] = {}  # unmapped, by address
        self.get_free_calls = 0  # the clock of garbage collection

    def insert(self, block: Block) -> None:
        address = block.address
        block.gc_base = self.get_free_calls
        block.key = key = block.size << SIZE_SHIFT | block.age << ADDRESS_BITS | address
        keys = self.free.get(block.stream)
        if keys is None:
            keys = self.free[block.stream] = []
        insort(keys, key)
        self.blocks[address] = block

    def remove(self, block: Block) -> None:
        keys = self.free[block.stream]
        del keys[bisect_left(keys, block.key)], self.blocks[block.address]

    def insert_hole(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.stream, []), block.address)
        self.holes[block.address] = block

    def remove_hole(self, block: Block) -> None:
        addresses = self.unmapped[block.stream]
        del addresses[bisect_left(addresses, block.address)]
        del self.holes[block.address]

    def ordered(self) -> list[Block]:
        """Return the free blocks by (stream, size, age, address)."""
        return [self.blocks[key & ADDRESS_MASK] for stream in sorted(self.free) for key in self.free[stream]]

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Merge a free neighbour of the same kind into ``block``; without one do nothing."""
        if neighbour is None or not neighbour.is_free or neighbour.mapped is not block.mapped:
            return
        if neighbour.mapped:
            self.remove(neighbour)
        else:
            self.remove_hole(neighbour)
        if block.prev is neighbour:
            block.address = neighbour.address
            block.prev = neighbour.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.prev = block
        block.size += neighbour.size


@dataclass(slots=True)
class Stats:
    """The counters of ``torch.cuda.memory_stats`` over all pools, bytes with their peaks.

    ``allocated``: blocks of tensors. ``reserved``: segments.
    """

    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    alloc_retries: int = 0

    def add_reserved(self, count: int) -> None:
        self.reserved_bytes += count
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def reset_peaks(self) -> None:
        """Reset the peaks, as ``torch.cuda.reset_peak_memory_stats`` does."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.reserved_peak_bytes = self.reserved_bytes
