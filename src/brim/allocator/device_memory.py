"""Where segments come from: what ``cudaMalloc`` and the virtual memory calls do, without a device."""

from __future__ import annotations

from typing import Protocol

from brim.units import MIB, TIB


class DeviceMemory(Protocol):
    """What the caching allocator asks of a device. ``None`` and ``False`` say that memory is exhausted."""

    @property
    def total_bytes(self) -> int | None: ...

    @property
    def free_bytes(self) -> int | None: ...

    def allocate(self, size: int) -> int | None:
        """A new segment's address (``cudaMalloc``)."""

    def release(self, address: int, size: int) -> None:
        """Give a segment back (``cudaFree``)."""

    def reserve(self, size: int) -> int:
        """Address space without memory behind it (``cuMemAddressReserve``)."""

    def unreserve(self, address: int, size: int) -> None:
        """Give address space back, with nothing mapped to it (``cuMemAddressFree``)."""

    def map(self, address: int, size: int) -> bool:
        """Put memory behind a range of reserved addresses: all of it or nothing."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind a range away."""


class SimulatedDevice:
    """A device with ``capacity_bytes`` for this process (None: without limit).

    ``total_bytes`` is the whole device (default: the capacity); what other processes and the CUDA context hold is
    the difference. Addresses descend, as those of fresh ``cudaMalloc`` calls were seen to do, and are never reused.
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
        self._next_range += size + TIB  # ranges never touch
        return address

    def unreserve(self, address: int, size: int) -> None:
        pass  # what is reserved later lies elsewhere

    def map(self, address: int, size: int) -> bool:
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        self.used_bytes -= size
