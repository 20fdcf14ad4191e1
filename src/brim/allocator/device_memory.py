"""The device memory below the allocator: ``cudaMalloc`` and the virtual memory calls, simulated."""

from __future__ import annotations

from typing import Protocol

from brim.units import MIB, TIB


class DeviceMemory(Protocol):
    """The device calls of the caching allocator. ``None`` and ``False`` mean that memory is exhausted."""

    @property
    def total_bytes(self) -> int | None: ...

    @property
    def free_bytes(self) -> int | None: ...

    def allocate(self, size: int) -> int | None:
        """Allocate a segment and return its address (``cudaMalloc``)."""

    def release(self, address: int, size: int) -> None:
        """Free a segment (``cudaFree``)."""

    def reserve(self, size: int) -> int:
        """Reserve address space without memory (``cuMemAddressReserve``)."""

    def unreserve(self, address: int, size: int) -> None:
        """Free address space with nothing mapped (``cuMemAddressFree``)."""

    def map(self, address: int, size: int) -> bool:
        """Map memory to a range of reserved addresses, all or nothing."""

    def unmap(self, address: int, size: int) -> None:
        """Unmap the memory of a range."""


class SimulatedDevice:
    """A device with ``capacity_bytes`` for this process (None: no limit).

    ``total_bytes`` is the size of the device (default: the capacity); other processes and the CUDA context hold the
    difference. Addresses descend, as observed with fresh ``cudaMalloc`` calls, and are never reused.
    """

    def __init__(self, capacity_bytes: int | None = None, total_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.used_bytes = 0
        self._next_segment = 1 << 62
        self._next_range = 1 << 62

    @property
    def free_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes

    def _take(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.used_bytes + size > self.capacity_bytes:
            return False
        self.used_bytes += size
        return True

    def allocate(self, size: int) -> int | None:
        if not self._take(size):
            return None
        self._next_segment -= -(-size // (2 * MIB)) * 2 * MIB
        return self._next_segment

    def release(self, address: int, size: int) -> None:
        self.used_bytes -= size

    def reserve(self, size: int) -> int:
        address = self._next_range
        self._next_range += size + TIB  # a gap between ranges
        return address

    def unreserve(self, address: int, size: int) -> None:
        pass  # address space is never reused

    def map(self, address: int, size: int) -> bool:
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        self.used_bytes -= size
