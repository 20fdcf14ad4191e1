"""What a rank has in RAM where its shards are offloaded: weights, gradients and the optimizer's states.

FSDP2 keeps shards and their gradients page-locked beside a GPU, each in memory of its own, and PyTorch's allocator of
such memory gives out powers of two (aten/src/ATen/core/CachingHostAllocator.h, ``allocate``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from brim.core import Category, Storage
from brim.estimation.breakdown import NAMES

_LOCKED = (Category.PARAMETER, Category.GRADIENT)


@dataclass(frozen=True, kw_only=True)
class RamPeak:
    """``allocated``: bytes of tensors at their peak, ``reserved`` of the memory that was taken for them.
    ``breakdown`` sums to ``reserved``."""

    allocated: int
    reserved: int
    breakdown: dict[str, int]


def ram_peak(storages: Iterable[Storage], *, page_locked: bool) -> RamPeak:
    """Of storages in RAM. ``page_locked``: there is a GPU beside it."""
    taken = {}
    changes: list[tuple[int, bool, Storage]] = []
    for storage in storages:
        rounds = page_locked and storage.category in _LOCKED
        taken[storage.id] = locked_bytes(storage.bytes) if rounds else storage.bytes
        changes.append((storage.born, True, storage))
        if storage.died is not None:
            changes.append((storage.died, False, storage))
    changes.sort(key=lambda change: change[:2])
    now = most = at = 0
    tensors = allocated = 0
    for index, (_, born, storage) in enumerate(changes):
        now += taken[storage.id] if born else -taken[storage.id]
        tensors += storage.bytes if born else -storage.bytes
        allocated = max(allocated, tensors)
        if now > most:
            most, at = now, index + 1
    breakdown: dict[str, int] = {}
    for _, born, storage in changes[:at]:
        name = NAMES[storage.category]
        breakdown[name] = breakdown.get(name, 0) + (taken[storage.id] if born else -taken[storage.id])
    held = {name: bytes for name, bytes in breakdown.items() if bytes}
    return RamPeak(allocated=allocated, reserved=most, breakdown=held)


def locked_bytes(bytes: int) -> int:
    """What page-locked memory for so many bytes takes."""
    return 1 << (bytes - 1).bit_length() if bytes else 0
