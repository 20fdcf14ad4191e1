"""Flat records of bytes, one per block, that rest in RAM or on disk and come to RAM to be worked on.

Those on disk pass through one buffer of a fixed size. It is not cut into equal slots: a model's largest block (an
embedding) may be eight times as large as the others, and then it has the buffer for itself while many of the others
fit side by side, one being read, one being worked on, one being written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from brim.core.hardware import DISK
from brim.errors import BrimError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.layout import ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import All, Done, Settled, Waitable


@dataclass(eq=False)
class _Place:
    """A part of the buffer that holds a record, or is about to."""

    record: int
    begin: int
    bytes: int
    used: bool = False
    ready: Waitable = field(default_factory=Done)
    written: Waitable = field(default_factory=Done)
    displaced: list[_Place] = field(default_factory=list)  # what is lost once ``ready`` is done, but not if it fails

    def overlaps(self, begin: int, bytes: int) -> bool:
        return begin < self.begin + self.bytes and self.begin < begin + bytes


class Records:
    """``sizes`` in bytes by record. ``tier`` is ``ram`` (each has its own memory) or ``disk``.

    ``buffer_bytes`` bounds the RAM that records on disk pass through; the largest needs that much at least. With
    ``brief`` it is taken when a record first comes, and ``let_go`` gives it back until one comes again.
    """

    def __init__(
        self,
        memory: Memory,
        sizes: Mapping[int, int],
        *,
        tier: str,
        buffer_bytes: int,
        label: str,
        brief: bool = False,
    ) -> None:
        self.tier, self._memory, self._label = tier, memory, label
        self.sizes = {record: round_up(bytes, PAGE_BYTES) for record, bytes in sizes.items()}
        self.read_bytes = self.written_bytes = 0  # of the disk, since the beginning
        self._stores: dict[int, Buffer] = {}
        self._extents: dict[int, Extent] = {}
        self._places: list[_Place] = []  # the least recently used first
        self._brief, self._buffer_bytes = brief, 0
        self._buffer: Buffer | None = None
        try:
            self._reserve(buffer_bytes)
        except BaseException:
            self.free()
            raise

    def _reserve(self, buffer_bytes: int) -> None:
        for record, bytes in self.sizes.items():
            if self.tier == DISK:
                self._extents[record] = self._memory.scratch().reserve(bytes)
            else:
                self._stores[record] = self._memory.ram.allocate(bytes, f"{self._label} {record}")
        if self._extents:
            largest = max(self.sizes.values())
            self._buffer_bytes = round_up(max(buffer_bytes, largest), PAGE_BYTES)
            if not self._brief:
                self._whole_buffer()

    def _whole_buffer(self) -> Buffer:
        if self._buffer is None:
            self._buffer = self._memory.ram.allocate(self._buffer_bytes, f"{self._label} on their way")
        return self._buffer

    def let_go(self) -> None:
        """Give back a brief buffer, once all in it is on the disk. Raises the TransferError of a write that failed;
        then it stays."""
        if self._brief and self._buffer is not None:
            self.settle()
            self._places.clear()
            buffer, self._buffer = self._buffer, None
            buffer.free()

    # -- coming and going

    def enter(self, record: int, *, empty: bool = False) -> torch.Tensor:
        """The record's bytes (uint8, in RAM) to be read and written until ``leave``; ``empty``: it has none yet.

        Raises the TransferError of its read, or of the write of what was in its way (which is kept).
        """
        if record in self._stores:
            return self._stores[record].tensor
        place = self._locate(record)
        if place is None:
            place = self._fetch(record, (), empty=empty)
            assert place is not None, "a record does not fit beside those in use"
        self._places.remove(place)
        self._places.append(place)
        place.used = True
        try:
            place.ready.wait()
        except BaseException:
            self._undo(place)
            raise
        place.displaced.clear()
        Settled(place.written).wait()  # nobody may change what is being written; it will be written again
        return self._view(place)

    def leave(self, record: int, *, changed: bool = True) -> None:
        """The record was worked on; what rests on disk is written there in the background."""
        place = self._find(record)
        if place is None:
            return
        place.used = False
        if changed:
            place.written = self._write(place)

    def secure(self, record: int) -> None:
        """What is in the buffer is on the disk as well when this returns: it may be changed, and forgotten.

        A write that failed is tried again. Raises its TransferError; then the record is as it was.
        """
        place = self._find(record)
        if place is not None:
            if _failed(place.written):
                place.written = self._write(place)
            place.written.wait()

    def forget(self, record: int) -> None:
        """What is in the buffer is not what the record is to be: it will be read again. It must not be in use."""
        place = self._find(record)
        if place is not None:
            self._places.remove(place)

    def expect(self, records: Sequence[int]) -> None:
        """Begin to read what comes next, as far as there is room beside what is in use."""
        for record in records:
            if record in self._extents and self._locate(record) is None and self._fetch(record, records) is None:
                return

    def settle(self) -> None:
        """Wait for all that is under way. Raises the TransferError of a failed write, whose record stays in RAM."""
        for place in list(self._places):
            for written_place in (*place.displaced, place):
                Settled(written_place.ready).wait()
                written_place.written.wait()

    # -- parts

    def get(self, record: int, offset: int, bytes: int) -> torch.Tensor:
        """A copy (uint8) of a part of a record."""
        if (there := self._resting(record)) is not None:
            return there[offset : offset + bytes].clone()
        data = torch.empty(bytes, dtype=torch.uint8)
        if not self._memory.fake:
            extent = self._extents[record]
            self._memory.file(extent.path).read(extent.offset + offset, data)
        return data

    def put(self, record: int, offset: int, values: torch.Tensor) -> None:
        """Replace a part of a record; ``values`` is uint8."""
        there = self._resting(record)
        if there is not None:
            there[offset : offset + values.numel()].copy_(values)
            self.leave(record)
            return
        extent = self._extents[record]
        part = Extent(path=extent.path, offset=extent.offset + offset, bytes=values.numel())
        source = TensorSource(name="", dtype=torch.uint8, shape=tuple(values.shape), extents=(part,))
        self._memory.scratch().overwrite([source], [values])

    def _resting(self, record: int) -> torch.Tensor | None:
        """The record's bytes where they are in RAM anyway."""
        if record in self._stores:
            return self._stores[record].tensor
        place = self._locate(record)
        if place is None:
            return None
        try:
            place.ready.wait()
        except BrimError:
            self._undo(place)
            return self._resting(record)
        Settled(place.written).wait()
        return self._view(place)

    def free(self) -> None:
        """Wait for what is under way and give everything back. A second call does nothing."""
        for place in self._places:
            for written_place in (*place.displaced, place):
                Settled(written_place.ready).wait()
                Settled(written_place.written).wait()
        self._places.clear()
        for extent in self._extents.values():
            self._memory.scratch().release(extent)
        for buffer in (*self._stores.values(), *([self._buffer] if self._buffer else [])):
            buffer.free()
        self._extents, self._stores, self._buffer = {}, {}, None

    # -- places in the buffer

    def _locate(self, record: int) -> _Place | None:
        """Where the record is in the buffer. If not there, all that was ever written of it is on the disk."""
        for place in list(self._places):
            if any(other.record == record for other in place.displaced):
                Settled(place.ready).wait()
                if _failed(place.ready):
                    self._undo(place)
        return self._find(record)

    def _find(self, record: int) -> _Place | None:
        return next((place for place in self._places if place.record == record), None)

    def _view(self, place: _Place) -> torch.Tensor:
        assert self._buffer is not None
        return self._buffer.tensor[place.begin : place.begin + place.bytes]

    def _fetch(self, record: int, keep: Collection[int], *, empty: bool = False) -> _Place | None:
        """Make room and begin to read; None where that would displace what is in use or in ``keep``."""
        bytes = self.sizes[record]
        begin = min(self._rooms(bytes, keep), default=None)
        if begin is None:
            return None
        place = _Place(record, begin[1], bytes)
        for other in [other for other in self._places if other.overlaps(place.begin, bytes)]:
            self._places.remove(other)
            place.displaced += [other, *other.displaced]
        after = self._freed(place.displaced)
        if empty:
            place.ready = All(after)
        else:
            extent = self._extents[record]
            run = ReadRun(path=extent.path, offset=extent.offset, bytes=bytes, at=0, direct=True)
            target = self._whole_buffer().part(place.begin, place.begin + bytes)
            place.ready = self._memory.engine.read([run], target, f"{self._label} {record}", after)
            self.read_bytes += bytes
        self._places.append(place)
        return place

    def _rooms(self, bytes: int, keep: Collection[int]) -> Iterator[tuple[int, int]]:
        """Where a record could go: how recently what is there was used (the least is best), and the offset."""
        buffer = self._whole_buffer()
        for begin in {0, *(place.begin + place.bytes for place in self._places)}:
            there = [(age, p) for age, p in enumerate(self._places, 1) if p.overlaps(begin, bytes)]
            if begin + bytes <= buffer.bytes and not any(p.used or p.record in keep for _, p in there):
                yield max((age for age, _ in there), default=0), begin

    def _freed(self, displaced: Sequence[_Place]) -> list[Waitable]:
        """What must be done before others' memory is written to. A write that failed is tried again."""
        after: list[Waitable] = []
        for other in displaced:
            if _failed(other.written):
                other.written = self._write(other)
            after += [Settled(other.ready), other.written]
        return after

    def _undo(self, place: _Place) -> None:
        """It could not be brought: whatever could not be written because of it is back, whole."""
        self._places.remove(place)
        for other in place.displaced:
            Settled(other.written).wait()
            clear = not any(p.overlaps(other.begin, other.bytes) for p in self._places)
            if _failed(other.written) and clear:
                self._places.insert(0, other)

    def _write(self, place: _Place) -> Waitable:
        self.written_bytes += place.bytes
        label = f"{self._label} {place.record}"
        return self._memory.engine.write(self._view(place), self._extents[place.record], label, [])


def _failed(condition: Waitable) -> bool:
    """Whether it is over and went wrong."""
    if not getattr(condition, "done", False):
        return False
    try:
        condition.wait()
    except BrimError:
        return True
    return False
