"""Byte-limited pools, from which all of brim's large buffers are allocated, to enforce a budget."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from brim.errors import BudgetError
from brim.memory.recorder import Recorder
from brim.units import format_bytes

_HUGE_PAGE_BYTES = 2 << 20
_SLAB_BYTES = 64 << 20
PAGE_BYTES = 4096  # the alignment of addresses, offsets and lengths for O_DIRECT

Mapping = TypeVar("Mapping", bound=mmap.mmap)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class Source(Protocol):
    """Allocates memory for a pool."""

    def make(self, bytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor of ``bytes``, page-aligned on the host."""

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        """Allocate ``count`` tensors, adjacent if that is useful."""

    def release(self, tensor: torch.Tensor) -> None: ...


class HostSource:
    """Allocates anonymous private mappings: page-aligned, and returned to the system with the last view.

    ``malloc`` would keep freed memory in its arenas, and a RAM budget is measured by the resident set.
    """

    def make(self, bytes: int) -> torch.Tensor:
        return self._adjacent(bytes, 1)[0]

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        return self._adjacent(bytes, count)

    def release(self, tensor: torch.Tensor) -> None:
        pass

    @staticmethod
    def _adjacent(bytes: int, count: int) -> list[torch.Tensor]:
        """Allocate tensors with separate storages in one mapping, so that huge pages can span them."""
        each = round_up(max(bytes, 1), PAGE_BYTES)
        mapped, start = private_mapping(each * count, mmap.mmap)
        with torch.inference_mode(False):  # other threads, outside the mode, write to it
            tensors = [
                torch.frombuffer(mapped, dtype=torch.uint8, count=max(bytes, 1), offset=start + index * each)
                for index in range(count)
            ]
        return [tensor[:bytes] for tensor in tensors]


def private_mapping(count: int, kind: type[Mapping]) -> tuple[Mapping, int]:
    """Map ``count`` bytes; return the mapping and their offset in it. Raises BudgetError if the system refuses.

    The bytes begin on a huge page: first accesses and pinning by 4 KiB pages take longer than the disk takes to fill
    them, and reads of 3 MB with a quarter of their target on small pages took 1.5 times as long. The mapping before
    them is never accessed, and ends with them, as another huge page would exceed ``count``.
    """
    huge = count >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    try:
        mapped = kind(-1, count + huge * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"Cannot allocate {format_bytes(count)} of RAM.",
            f"The system refuses: {error.strerror}.",
            "Give a smaller budget, or end other programs.",
        ) from error
    if not huge:
        return mapped, 0
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE_BYTES
    mapped.resize(start + round_up(count, mmap.PAGESIZE))
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped, start


class TorchSource:
    """Allocates by PyTorch: VRAM by the caching allocator, or fake tensors for predictions."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(bytes, dtype=torch.uint8, device=self.device)

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        return [self.make(bytes) for _ in range(count)]

    def release(self, tensor: torch.Tensor) -> None:
        pass


@dataclass(eq=False, repr=False)
class Buffer:
    """Bytes allocated from a pool. ``tensor`` is uint8 and one-dimensional."""

    pool: Pool
    _tensor: torch.Tensor | None
    bytes: int
    storage: int
    label: str
    origin: Buffer | None = None  # of which this is a part

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, f"{self.label} was used after it was freed"
        return self._tensor

    def part(self, begin: int, end: int) -> Buffer:
        """Return bytes ``[begin, end)`` as the target of a move; the pool still counts the full buffer."""
        part = self.tensor[begin:end]
        return Buffer(self.pool, part, end - begin, self.storage, self.label, self.origin or self)

    def free(self) -> None:
        """Return the bytes to the pool. A second call does nothing."""
        if self._tensor is not None:
            tensor, self._tensor = self._tensor, None
            self.pool._take_back(self, tensor)

    def hand_over(self) -> torch.Tensor:
        """Transfer ownership of the tensor: the pool counts the bytes until its storage is freed.

        Only for sources whose ``release`` does nothing, and tensors with separate storages.
        """
        tensor, self._tensor = self.tensor, None
        self.pool._watch(self, tensor)
        return tensor


class Pool:
    """Allocates up to ``limit_bytes`` of a tier, and records every allocation."""

    def __init__(self, tier: str, limit_bytes: int, source: Source, recorder: Recorder) -> None:
        self.tier, self.limit_bytes, self.source, self.recorder = tier, limit_bytes, source, recorder
        self.held_bytes = self.peak_bytes = 0
        self._next_storage = 0
        self._lock = threading.Lock()
        self._storages: set[int] = set()
        self._died: deque[Buffer] = deque()  # handed over, with freed storages

    def allocate(self, bytes: int, label: str, source: Source | None = None, category: str = "") -> Buffer:
        """Allocate ``bytes`` from the pool. Raises BudgetError above the limit.

        ``source`` replaces the pool's source; its ``release`` must do nothing. ``category`` is for the timeline.
        """
        return self._enter(bytes, label, lambda: (source or self.source).make(bytes), category)

    def allocate_row(self, bytes: int, labels: Sequence[str]) -> list[Buffer]:
        """Allocate a buffer of ``bytes`` for each label, adjacent if that makes reads faster.

        Raises BudgetError, and allocates none of them, if together they exceed the limit.
        """
        self.settle()
        if self.held_bytes + bytes * len(labels) > self.limit_bytes:
            raise self._refusal(bytes * len(labels), ", ".join(labels))
        row, entered = iter(self.source.row(bytes, len(labels))), list[Buffer]()
        try:
            for label in labels:
                entered.append(self._enter(bytes, label, lambda: next(row)))
        except BaseException:
            for buffer in entered:
                buffer.free()
            raise
        return entered

    def _enter(self, bytes: int, label: str, make: Callable[[], torch.Tensor], category: str = "") -> Buffer:
        with self._lock:
            self._count_dead()
            if self.held_bytes + bytes > self.limit_bytes:
                raise self._refusal(bytes, label)
            tensor = make()
            self.held_bytes += bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            buffer = Buffer(self, tensor, bytes, self._next_storage, label)
            self._next_storage += 1
            self._storages.add(tensor.untyped_storage()._cdata)
            self.recorder.allocated(self.tier, bytes, buffer.storage, label, category)
            return buffer

    def _refusal(self, bytes: int, label: str) -> BudgetError:
        return BudgetError(
            f"Cannot allocate {format_bytes(bytes)} of {self.tier} for {label}.",
            f"{format_bytes(self.held_bytes)} of {format_bytes(self.limit_bytes)} are already in use.",
            smallest_bytes={self.tier: self.held_bytes + bytes},
        )

    def account(self, bytes: int, label: str) -> Buffer:
        """Count ``bytes`` allocated elsewhere in this tier (a module's own tensors) against the limit."""
        return self._enter(bytes, label, lambda: torch.empty(0, dtype=torch.uint8))

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is in a buffer of this pool that was not handed over."""
        return tensor.untyped_storage()._cdata in self._storages

    def settle(self) -> None:
        """Uncount buffers that were handed over and freed since, as ``allocate`` does itself."""
        with self._lock:
            self._count_dead()

    def _take_back(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        with self._lock:
            self._storages.discard(tensor.untyped_storage()._cdata)
            self.source.release(tensor)
            self._uncount(buffer)

    def _watch(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        with self._lock:
            self._storages.discard(tensor.untyped_storage()._cdata)
        # A storage may be freed anywhere, even by a garbage collection within this class, so this takes no lock.
        weakref.finalize(tensor.untyped_storage(), self._died.append, buffer).atexit = False

    def _count_dead(self) -> None:
        while self._died:
            self._uncount(self._died.popleft())

    def _uncount(self, buffer: Buffer) -> None:
        self.held_bytes -= buffer.bytes
        self.recorder.freed(self.tier, buffer.bytes, buffer.storage, buffer.label)


class Arena:
    """Allocates pieces by first fit from slabs of ``pool``, which are kept until ``trim``.

    It is for short-lived memory that is too expensive to allocate and page-lock each time. Pieces freed in reverse
    order, as in a backward pass, leave no holes, and the next step reuses their addresses.
    """

    def __init__(self, pool: Pool, label: str, *, slab_bytes: int | None = None) -> None:
        self._pool, self._label = pool, label
        # At most a sixteenth: a small budget must not lack the unused end of the last slab.
        self._slab_bytes = slab_bytes or min(_SLAB_BYTES, round_up(pool.limit_bytes // 16, PAGE_BYTES))
        self._slabs: list[_Slab] = []

    @property
    def used_bytes(self) -> int:
        return sum(slab.used_bytes for slab in self._slabs)

    def take(self, bytes: int) -> Piece:
        """Allocate at least ``bytes`` in full pages. Raises BudgetError if the pool has no room for another slab."""
        length = round_up(bytes, PAGE_BYTES)
        for slab in self._slabs:
            at = slab.take(length)
            if at is not None:
                return Piece(slab, at, length)
        slab = _Slab(self._allocate(length))
        self._slabs.append(slab)
        at = slab.take(length)
        assert at is not None, "a new slab is large enough"
        return Piece(slab, at, length)

    def _allocate(self, length: int) -> Buffer:
        if length < self._slab_bytes:
            try:
                return self._pool.allocate(self._slab_bytes, self._label)
            except BudgetError:  # a smaller slab may fit
                return self._pool.allocate(length, self._label)
        return self._pool.allocate(length, self._label)

    def trim(self) -> None:
        """Free slabs without pieces."""
        for slab in self._slabs:
            if not slab.used_bytes:
                slab.buffer.free()
        self._slabs = [slab for slab in self._slabs if slab.used_bytes]


class _Slab:
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.used_bytes = 0
        self._free = [(0, buffer.bytes)]  # (begin, end), by address, never adjacent

    def take(self, length: int) -> int | None:
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= length:
                self._free[index : index + 1] = [(begin + length, end)] if end - begin > length else []
                self.used_bytes += length
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        self.used_bytes -= end - begin
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            begin, index = self._free.pop(index - 1)[0], index - 1
        self._free.insert(index, (begin, end))


class Piece(Buffer):
    """A run of pages of a slab. ``free`` returns it to the arena."""

    def __init__(self, slab: _Slab, at: int, length: int) -> None:
        buffer = slab.buffer
        super().__init__(buffer.pool, buffer.tensor[at : at + length], length, buffer.storage, buffer.label)
        self._slab, self._at = slab, at

    def free(self) -> None:
        if self._tensor is not None:
            self._tensor = None
            self._slab.give(self._at, self._at + self.bytes)
