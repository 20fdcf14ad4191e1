"""RAM of a rank whose shards are offloaded: weights, gradients and the optimizer's states.

FSDP2 keeps shards and their gradients page-locked beside a GPU, each in an allocation of its own. PyTorch's allocator
of page-locked memory rounds to powers of two, and caches freed blocks for the next request of the same rounded size
(aten/src/ATen/core/CachingHostAllocator.h, ``allocate`` and ``maybe_cache_block``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from brim.core import Category, Storage
from brim.estimation.breakdown import NAMES

KEPT = "page_locked_and_free"  # in a breakdown: freed by tensors, cached by the allocator
_LOCKED = (Category.PARAMETER, Category.GRADIENT)


@dataclass(frozen=True, kw_only=True)
class RamPeak:
    """``allocated``: bytes of tensors at their peak; ``reserved``: of the memory for them. ``breakdown`` sums to
    ``reserved``."""

    allocated: int
    reserved: int
    breakdown: dict[str, int]


@dataclass(kw_only=True)
class _Ram:
    """Bytes in RAM at a moment, by name; ``free`` blocks of page-locked memory, by size."""

    page_locked: bool
    bytes_by_name: dict[str, int] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=dict)

    def take(self, storage: Storage) -> None:
        size = self._size(storage)
        self._add(NAMES[storage.category], size)
        if self._is_locked(storage) and self.free.get(size):
            self.free[size] -= 1
            self._add(KEPT, -size)

    def give(self, storage: Storage) -> None:
        size = self._size(storage)
        self._add(NAMES[storage.category], -size)
        if self._is_locked(storage):
            self.free[size] = self.free.get(size, 0) + 1
            self._add(KEPT, size)

    def _is_locked(self, storage: Storage) -> bool:
        return self.page_locked and storage.category in _LOCKED

    def _size(self, storage: Storage) -> int:
        return locked_bytes(storage.bytes) if self._is_locked(storage) else storage.bytes

    def _add(self, name: str, bytes: int) -> None:
        self.bytes_by_name[name] = self.bytes_by_name.get(name, 0) + bytes


def ram_peak(storages: Iterable[Storage], *, page_locked: bool) -> RamPeak:
    """The peak of storages in RAM. ``page_locked``: there is a GPU beside it."""
    changes: list[tuple[int, bool, Storage]] = []
    for storage in storages:
        changes.append((storage.born, True, storage))
        if storage.died is not None:
            changes.append((storage.died, False, storage))
    changes.sort(key=lambda change: change[:2])
    ram, breakdown = _Ram(page_locked=page_locked), dict[str, int]()
    tensors = allocated = reserved = 0
    for _, born, storage in changes:
        (ram.take if born else ram.give)(storage)
        tensors += storage.bytes if born else -storage.bytes
        allocated, now = max(allocated, tensors), sum(ram.bytes_by_name.values())
        if now > reserved:
            reserved, breakdown = now, {name: count for name, count in ram.bytes_by_name.items() if count}
    return RamPeak(allocated=allocated, reserved=reserved, breakdown=breakdown)


def locked_bytes(bytes: int) -> int:
    """Bytes of page-locked memory that a request of ``bytes`` takes."""
    return 1 << (bytes - 1).bit_length() if bytes else 0
