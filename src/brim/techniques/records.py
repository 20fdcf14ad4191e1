"""Flat records of bytes, one per block, that rest in RAM or on disk and come to RAM or VRAM to be changed.

Records that rest elsewhere pass through one buffer of a fixed size. It is not cut into equal slots: a model's largest
block (an embedding) may be eight times as large as the others; it takes the entire buffer, in which several of the
others fit side by side, one being read, one in use, one being written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from brim.core.hardware import DISK, RAM
from brim.errors import BrimError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.layout import ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import All, Done, Settled, Waitable


@dataclass(eq=False)
class _Place:
    record: int
    begin: int
    bytes: int
    used: bool = False
    ready: Waitable = field(default_factory=Done)
    written: Waitable = field(default_factory=Done)
    displaced: list[_Place] = field(default_factory=list)  # overwritten once ``ready`` succeeds

    def overlaps(self, begin: int, bytes: int) -> bool:
        return begin < self.begin + self.bytes and self.begin < begin + bytes


class Records:
    """Records of ``sizes`` in bytes. ``tier`` is ``ram`` (each has its own memory) or ``disk``.

    Records on disk pass through a buffer in RAM, and with ``on_gpu`` those in RAM pass through one in VRAM. Those on
    disk pass through both then, which are equally large: a record has the same place in each. ``buffer_bytes`` bounds
    it; it is raised to the largest record. With ``brief`` the buffer is allocated when a
    record comes, and ``free_buffer`` frees it until the next one.
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
        on_gpu: bool = False,
    ) -> None:
        self.tier, self._memory, self._label = tier, memory, label
        self.pool = memory.compute if on_gpu else memory.ram  # in which records are changed
        self._passes, self._passes_both = on_gpu or tier == DISK, on_gpu and tier == DISK
        self.sizes = {record: round_up(bytes, PAGE_BYTES) for record, bytes in sizes.items()}
        self.read_bytes = self.written_bytes = 0  # of the disk, since the beginning
        self._stores: dict[int, Buffer] = {}
        self._copied: dict[int, Waitable] = {}  # the last copy from or to a store
        self._extents: dict[int, Extent] = {}
        self._places: list[_Place] = []  # the least recently used first
        self._brief, self._buffer_bytes = brief, 0
        self._buffer: Buffer | None = None
        self._between: Buffer | None = None  # in RAM, of records that pass through both
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
        if self._passes and self.sizes:
            largest = max(self.sizes.values())
            self._buffer_bytes = round_up(max(buffer_bytes, largest), PAGE_BYTES)
            if not self._brief:
                self._allocated_buffer()

    def _allocated_buffer(self) -> Buffer:
        if self._buffer is None:
            self._buffer = self.pool.allocate(self._buffer_bytes, f"{self._label} on their way")
            if self._passes_both:
                self._between = self._memory.ram.allocate(self._buffer_bytes, f"{self._label} between disk and VRAM")
        return self._buffer

    def free_buffer(self) -> None:
        """Free a brief buffer once its records are on disk. Raises the TransferError of a failed write, without
        freeing it.
        """
        if self._brief and self._buffer is not None:
            self.settle()
            self._places.clear()
            buffers, self._buffer, self._between = (self._buffer, self._between), None, None
            for buffer in filter(None, buffers):
                buffer.free()

    # -- loading and releasing

    def enter(self, record: int, *, empty: bool = False) -> torch.Tensor:
        """Return the record's bytes (uint8, in ``pool``), to be used until ``leave``. ``empty``: a new record, which
        is not read.

        Raises the TransferError of its read, or of the write of a displaced record, which is not lost.
        """
        if not self._passes:
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
        Settled(place.written).wait()  # it must not change while it is written; ``leave`` writes it again
        return self._view(place)

    def leave(self, record: int, *, changed: bool = True) -> None:
        """End the use of a record. In a buffer, it is written in the background if it was ``changed``."""
        place = self._find(record)
        if place is None:
            return
        place.used = False
        if changed:
            place.written = self._write(place)

    def secure(self, record: int) -> None:
        """Wait until the record in the buffer is on disk too, so that it may be changed and forgotten.

        A failed write is tried again. Raises its TransferError; then the record is unchanged.
        """
        place = self._find(record)
        if place is not None:
            if _failed(place.written):
                place.written = self._write(place)
            place.written.wait()

    def forget(self, record: int) -> None:
        """Drop the record from the buffer, so that it is read again. It must not be in use."""
        place = self._find(record)
        if place is not None:
            self._places.remove(place)

    def expect(self, records: Sequence[int]) -> None:
        """Start to read the next records, as far as there is room beside those in use."""
        ends = accumulate(self.sizes.get(record, 0) for record in records)
        records = [record for record, end in zip(records, ends, strict=True) if end <= self._buffer_bytes]
        for record in records:
            if (
                self._passes
                and record in self.sizes
                and self._locate(record) is None
                and self._fetch(record, records) is None
            ):
                return

    def settle(self) -> None:
        """Wait for all reads and writes. Raises the TransferError of a failed write, whose record stays in the
        buffer.
        """
        for place in list(self._places):
            for written_place in (*place.displaced, place):
                self._memory.engine.finish(Settled(written_place.ready))
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
            if record in self._stores:
                self.forget(record)  # what is in VRAM is outdated
            else:
                self.leave(record)
            return
        self.forget(record)
        extent = self._extents[record]
        part = Extent(path=extent.path, offset=extent.offset + offset, bytes=values.numel())
        source = TensorSource(name="", dtype=torch.uint8, shape=tuple(values.shape), extents=(part,))
        self._memory.scratch().overwrite([source], [values])

    def _resting(self, record: int) -> torch.Tensor | None:
        """The record's bytes, if they are in RAM; those that pass through both buffers are on disk then."""
        if record in self._stores:
            self._memory.engine.finish(self._copied.get(record, Done()))
            return self._stores[record].tensor
        place = self._locate(record)
        if place is not None and self._passes_both:
            self._memory.engine.finish(Settled(place.ready))
            self.secure(record)
        if place is None or self._passes_both:
            return None
        try:
            place.ready.wait()
        except BrimError:
            self._undo(place)
            return self._resting(record)
        Settled(place.written).wait()
        return self._view(place)

    def free(self) -> None:
        """Wait for all reads and writes and free everything. A second call does nothing."""
        for place in self._places:
            for written_place in (*place.displaced, place):
                self._memory.engine.finish(Settled(written_place.ready))
                Settled(written_place.written).wait()
        self._places.clear()
        for copied in self._copied.values():
            self._memory.engine.finish(Settled(copied))
        for extent in self._extents.values():
            self._memory.scratch().release(extent)
        for buffer in filter(None, (*self._stores.values(), self._buffer, self._between)):
            buffer.free()
        self._extents, self._stores, self._buffer, self._between = {}, {}, None, None

    # -- places in the buffer

    def _locate(self, record: int) -> _Place | None:
        """The record's place in the buffer; None: all of it is on disk."""
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
        """Make room and start to read; None where that would displace a record in use or in ``keep``."""
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
            place.ready = self._read(place, after)
        self._places.append(place)
        return place

    def _rooms(self, bytes: int, keep: Collection[int]) -> Iterator[tuple[int, int]]:
        """The possible places of a record, as (age rank of the records there, lowest is oldest; offset)."""
        buffer = self._allocated_buffer()
        for begin in {0, *(place.begin + place.bytes for place in self._places)}:
            overlapping = [(age, p) for age, p in enumerate(self._places, 1) if p.overlaps(begin, bytes)]
            if begin + bytes <= buffer.bytes and not any(p.used or p.record in keep for _, p in overlapping):
                yield max((age for age, _ in overlapping), default=0), begin

    def _freed(self, displaced: Sequence[_Place]) -> list[Waitable]:
        """The transfers to wait for before ``displaced`` is overwritten. Failed writes are repeated."""
        after: list[Waitable] = []
        for other in displaced:
            if _failed(other.written):
                other.written = self._write(other)
            after += [Settled(other.ready), other.written]
        return after

    def _undo(self, place: _Place) -> None:
        """Drop a place whose read failed, and restore the displaced records whose writes failed."""
        self._places.remove(place)
        for other in place.displaced:
            Settled(other.written).wait()
            clear = not any(p.overlaps(other.begin, other.bytes) for p in self._places)
            if _failed(other.written) and clear:
                self._places.insert(0, other)

    def _read(self, place: _Place, after: Sequence[Waitable]) -> Waitable:
        buffer, engine = self._allocated_buffer(), self._memory.engine
        target = buffer.part(place.begin, place.begin + place.bytes)
        label = f"{self._label} {place.record}"
        if place.record in self._stores:
            after = [*after, self._copied.get(place.record, Done())]
            source, route = self._stores[place.record].tensor, (RAM, self.pool.tier)
            self._copied[place.record] = engine.copy(source, target, label, after, route)
            return self._copied[place.record]
        extent = self._extents[place.record]
        self.read_bytes += place.bytes
        run = ReadRun(path=extent.path, offset=extent.offset, bytes=place.bytes, at=0, direct=True)
        if self._between is None:
            return engine.read([run], target, label, after)
        between = self._between.part(place.begin, place.begin + place.bytes)
        read = engine.read([run], between, label, after)
        return engine.copy(between.tensor, target, label, [read], (RAM, self.pool.tier))

    def _write(self, place: _Place) -> Waitable:
        view, engine, label = self._view(place), self._memory.engine, f"{self._label} {place.record}"
        if place.record in self._stores:
            store, route = self._stores[place.record], (self.pool.tier, RAM)
            self._copied[place.record] = engine.copy(view, store, label, [engine.mark()], route)
            return self._copied[place.record]
        self.written_bytes += place.bytes
        if self._between is None:
            return engine.write(view, self._extents[place.record], label, [])
        between = self._between.part(place.begin, place.begin + place.bytes)
        after = [engine.mark(), Settled(place.written)]
        copied = engine.copy(view, between, label, after, (self.pool.tier, RAM))
        return engine.write(between.tensor, self._extents[place.record], label, [copied])


def _failed(condition: Waitable) -> bool:
    """Return whether a transfer has ended with an error."""
    if not getattr(condition, "done", False):
        return False
    try:
        condition.wait()
    except BrimError:
        return True
    return False
