"""Byte-limited pools: every large buffer that brim holds comes out of one, so a budget is a fact, not a hope."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from brim.errors import BudgetError
from brim.memory.recorder import Recorder
from brim.units import format_bytes

_HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096  # what O_DIRECT wants of an address, an offset and a length

Mapping = TypeVar("Mapping", bound=mmap.mmap)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class Source(Protocol):
    """Where a pool's bytes come from. The budget, the ledger and the events are the pool's own business."""

    def make(self, bytes: int) -> torch.Tensor:
        """A uint8 tensor of ``bytes``, its address a multiple of PAGE_BYTES on the host."""

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        """As many of them, side by side where that is of use."""

    def release(self, tensor: torch.Tensor) -> None: ...


class HostSource:
    """Anonymous private mappings: page-aligned, given back to the system as soon as the last view is gone.

    ``malloc`` would keep freed memory in its arenas, and RSS is what a RAM budget is measured by.
    """

    def make(self, bytes: int) -> torch.Tensor:
        return _side_by_side(bytes, 1)[0]

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        return _side_by_side(bytes, count)

    def release(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the mapping goes when its last view does."""


def _side_by_side(bytes: int, count: int) -> list[torch.Tensor]:
    """As many in one mapping, each with a storage of its own: huge pages do not end where they do. The mapping goes
    when the last of them does."""
    each = round_up(max(bytes, 1), PAGE_BYTES)
    mapped, start = private_mapping(each * count, mmap.mmap)
    with torch.inference_mode(False):  # threads that know nothing of the mode will write to it
        tensors = [
            torch.frombuffer(mapped, dtype=torch.uint8, count=max(bytes, 1), offset=start + index * each)
            for index in range(count)
        ]
    return [tensor[:bytes] for tensor in tensors]


def private_mapping(count: int, kind: type[Mapping]) -> tuple[Mapping, int]:
    """Room for ``count`` bytes, and where in it they begin. Raises BudgetError where the system refuses.

    They begin on a huge page: a first touch by 4 KiB pages takes longer than the disk takes to fill them, and so does
    pinning them; reads of 3 MB that had a quarter of their target on small pages took half as long again. Nobody
    touches what is mapped before them. Behind them nothing is, as a huge page would be more than was asked for.
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
    with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped, start


class TorchSource:
    """PyTorch's own allocator: VRAM through the caching allocator, or fake tensors while predicting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(bytes, dtype=torch.uint8, device=self.device)

    def row(self, bytes: int, count: int) -> list[torch.Tensor]:
        return [self.make(bytes) for _ in range(count)]

    def release(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the allocator takes it back when its last view goes."""


class Buffer:
    """A run of bytes out of a pool. ``tensor`` is uint8 and one-dimensional."""

    def __init__(self, pool: Pool, tensor: torch.Tensor, bytes: int, storage: int, label: str) -> None:
        self.pool, self.bytes, self.storage, self.label = pool, bytes, storage, label
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, f"{self.label} was used after it was freed"
        return self._tensor

    def part(self, begin: int, end: int) -> Buffer:
        """Bytes ``[begin, end)`` as the target of a move; the pool goes on counting the whole."""
        return Buffer(self.pool, self.tensor[begin:end], end - begin, self.storage, self.label)

    def free(self) -> None:
        """Give the bytes back to the pool. A second call does nothing."""
        if self._tensor is not None:
            tensor, self._tensor = self._tensor, None
            self.pool._take_back(self, tensor)

    def hand_over(self) -> torch.Tensor:
        """Give the tensor away for good: the bytes come back to the pool when its storage dies.

        Only for sources whose ``release`` does nothing, each tensor with a storage of its own.
        """
        tensor, self._tensor = self.tensor, None
        self.pool._watch(self, tensor)
        return tensor


class Pool:
    """Bytes of one tier, up to ``limit_bytes`` and never beyond; every allocation is an event."""

    def __init__(self, tier: str, limit_bytes: int, source: Source, recorder: Recorder) -> None:
        self.tier, self.limit_bytes, self.source, self.recorder = tier, limit_bytes, source, recorder
        self.held_bytes = self.peak_bytes = 0
        self._next_storage = 0
        self._lock = threading.Lock()
        self._storages: set[int] = set()
        self._died: deque[Buffer] = deque()  # handed over, and their storages are gone

    def allocate(self, bytes: int, label: str, source: Source | None = None, category: str = "") -> Buffer:
        """``bytes`` out of the pool. Raises BudgetError when that would pass the limit.

        ``source`` makes them instead of the pool's own; its ``release`` must have nothing to do. ``category`` is what
        the timeline says of them.
        """
        return self._enter(bytes, label, lambda: (source or self.source).make(bytes), category)

    def allocate_row(self, bytes: int, labels: Sequence[str], category: str = "") -> list[Buffer]:
        """A buffer of ``bytes`` for each label, side by side where that makes reading into them faster. Raises
        BudgetError when they would pass the limit together; then there is none of them."""
        self.settle()
        if self.held_bytes + bytes * len(labels) > self.limit_bytes:
            raise self._refusal(bytes * len(labels), ", ".join(labels))
        row, entered = iter(self.source.row(bytes, len(labels))), list[Buffer]()
        try:
            for label in labels:
                entered.append(self._enter(bytes, label, lambda: next(row), category))
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
            f"{format_bytes(self.held_bytes)} of {format_bytes(self.limit_bytes)} are already held.",
            smallest_bytes={self.tier: self.held_bytes + bytes},
        )

    def account(self, bytes: int, label: str) -> Buffer:
        """Count ``bytes`` that somebody else holds in this tier (a module's own tensors) against the limit."""
        return self._enter(bytes, label, lambda: torch.empty(0, dtype=torch.uint8))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in a buffer of this pool that was not handed over."""
        return tensor.untyped_storage()._cdata in self._storages

    def settle(self) -> None:
        """Count what was handed over and has died since. ``allocate`` does so by itself."""
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
        # A storage may die anywhere, even in a garbage collection within this class: no lock may be taken there.
        weakref.finalize(tensor.untyped_storage(), self._died.append, buffer).atexit = False

    def _count_dead(self) -> None:
        while self._died:
            self._uncount(self._died.popleft())

    def _uncount(self, buffer: Buffer) -> None:
        self.held_bytes -= buffer.bytes
        self.recorder.freed(self.tier, buffer.bytes, buffer.storage, buffer.label)
