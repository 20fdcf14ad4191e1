"""A device that answers as the recorded run's device did."""

from __future__ import annotations

from collections import deque

from brim.units import TIB

SegmentEvent = tuple[str, int, int]  # action, address, bytes
RELEASES = ("segment_free", "segment_unmap")


class RecordedDevice:
    """Gives out memory in the order, at the addresses and with the failures that were recorded.

    ``expected`` holds what the record says happens next; a request succeeds when it is next in line. With
    ``lenient``, a request that the record does not know succeeds at an invented address, so that a replay goes on
    after a difference. ``matched`` counts what was expected and happened.
    """

    total_bytes: int | None = None
    free_bytes: int | None = None

    def __init__(self) -> None:
        self.expected: deque[SegmentEvent] = deque()
        self.lenient = True
        self.matched = 0
        self.unexpected = 0
        self.held: set[int] = set()  # where segments and address space begin that were given out
        self.reserved_next: int | None = (
            None  # where address space lies that a failing request reserves and maps later
        )
        self.next_invented = 1 << 63  # no device has addresses so high

    def _invent(self, size: int) -> int:
        self.unexpected += 1
        self.next_invented += size
        return self.next_invented - size

    def _releases_first(self) -> bool:
        return bool(self.expected) and self.expected[0][0] in RELEASES

    def allocate(self, size: int) -> int | None:
        if self.expected and self.expected[0][0] == "segment_alloc" and self.expected[0][2] == size:
            address = self.expected[0][1]
            if address not in self.held:
                self.held.add(address)
                self.matched += 1
                self.expected.popleft()
                return address
        return self._invent(size) if self.lenient and not self._releases_first() else None

    def release(self, address: int, size: int) -> None:
        self.held.discard(address)
        self._match(("segment_free", address, size))

    def reserve(self, size: int) -> int:
        """New address space begins where the record maps next; something else may have to be given back before."""
        for action, address, _ in self.expected:
            if action == "segment_map" and address not in self.held:
                self.held.add(address)
                return address
        if self.reserved_next is not None:
            address, self.reserved_next = self.reserved_next, None
            self.held.add(address)
            return address
        return self._invent(size + TIB)

    def unreserve(self, address: int, size: int) -> None:
        """The driver may give the same addresses out again, as an H200's was seen to do at once."""
        self.held.discard(address)

    def map(self, address: int, size: int) -> bool:
        if self.expected and self.expected[0] == ("segment_map", address, size):
            self.matched += 1
            self.expected.popleft()
            return True
        if self.lenient and not self._releases_first():
            self.unexpected += 1
            return True
        return False

    def unmap(self, address: int, size: int) -> None:
        self._match(("segment_unmap", address, size))

    def _match(self, event: SegmentEvent) -> None:
        """Releases may come in another order: streams are ordered by handle, which differs from run to run."""
        if event in self.expected:
            self.expected.remove(event)
            self.matched += 1
        else:
            self.unexpected += 1
