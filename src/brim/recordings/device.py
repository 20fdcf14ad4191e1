"""A simulated device that answers as the recorded one did."""

from __future__ import annotations

from collections import deque

from brim.units import TIB

SegmentEvent = tuple[str, int, int]  # action, address, bytes
RELEASES = ("segment_free", "segment_unmap")


class RecordedDevice:
    """Memory in the recorded order, at the recorded addresses and with the recorded failures.

    ``expected`` are the next recorded events; a request succeeds if it is the first of them. With ``lenient``, any
    other request succeeds at an invented address, so that a replay goes on after a difference. ``matched`` counts
    the expected events that happened.
    """

    total_bytes: int | None = None
    free_bytes: int | None = None

    def __init__(self) -> None:
        self.expected: deque[SegmentEvent] = deque()
        self.lenient = True
        self.matched = 0
        self.starts: set[int] = set()  # of the current segments and address spaces
        self.reserved_next: int | None = None  # address space that a failing request reserves and a later one maps
        self.next_invented = 1 << 63  # no device has addresses so high

    def _invent(self, size: int) -> int:
        self.next_invented += size
        return self.next_invented - size

    def _releases_first(self) -> bool:
        return bool(self.expected) and self.expected[0][0] in RELEASES

    def allocate(self, size: int) -> int | None:
        if self.expected and self.expected[0][0] == "segment_alloc" and self.expected[0][2] == size:
            address = self.expected[0][1]
            if address not in self.starts:
                self.starts.add(address)
                self.matched += 1
                self.expected.popleft()
                return address
        return self._invent(size) if self.lenient and not self._releases_first() else None

    def release(self, address: int, size: int) -> None:
        self.starts.discard(address)
        self._match(("segment_free", address, size))

    def reserve(self, size: int) -> int:
        """Reserve address space at the address that the record maps next, perhaps after releases."""
        for action, address, _ in self.expected:
            if action == "segment_map" and address not in self.starts:
                self.starts.add(address)
                return address
        if self.reserved_next is not None:
            address, self.reserved_next = self.reserved_next, None
            self.starts.add(address)
            return address
        return self._invent(size + TIB)

    def unreserve(self, address: int, size: int) -> None:
        """Free addresses, which the driver may give out again (an H200's does so at once)."""
        self.starts.discard(address)

    def map(self, address: int, size: int) -> bool:
        if self.expected and self.expected[0] == ("segment_map", address, size):
            self.matched += 1
            self.expected.popleft()
            return True
        return self.lenient and not self._releases_first()

    def unmap(self, address: int, size: int) -> None:
        self._match(("segment_unmap", address, size))

    def _match(self, event: SegmentEvent) -> None:
        """Count an expected release in any order: it follows the streams' handles, which differ from run to run."""
        if event in self.expected:
            self.expected.remove(event)
            self.matched += 1
