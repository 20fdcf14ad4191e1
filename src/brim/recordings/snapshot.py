"""Reads the memory snapshots that ``torch.cuda.memory._dump_snapshot`` writes, old and new, one device or many.

Schema: ``torch/csrc/cuda/memory_snapshot.cpp`` and ``torch/cuda/memory.py`` of PyTorch 1.11 to 2.13.

An event takes 31 bytes once it is read, a block of a segment 29, whatever they took in the file: no object is kept
for them.
"""

from __future__ import annotations

import io
import operator
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from brim.core.files import regular
from brim.errors import FormatError
from brim.recordings import plain_pickle
from brim.recordings.interned import Interned
from brim.recordings.pickled_rows import Column, Table

PoolId = tuple[int, int]
BYTES_PER_EVENT = 24  # no event takes less in a file
_MOST_SUMMED_BYTES = 1 << 62  # of all events: what is held is summed in 64 bits
_NOT_NUMBERED = np.int32(-2)
STATES = ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive")


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block at the end of the run; ``state`` is one of ``STATES``, ``stack`` an index into ``Snapshot.stacks``."""

    address: int
    size: int
    requested: int
    state: str
    stack: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """A segment at the end of the run. For expandable segments: one contiguous range with memory behind it."""

    address: int
    size: int
    stream: int
    small: bool
    pool: PoolId
    expandable: bool
    blocks: Sequence[BlockRecord]


@dataclass(kw_only=True, slots=True)
class DeviceHistory:
    """One device: its events, oldest first, as columns of one length, and its segments when they ended.

    ``actions`` are PyTorch's words. For ``oom``, ``addresses`` holds the bytes that the device still had.
    ``sizes`` are what was requested (``alloc``, ``free_*``) or taken (``segment_*``). ``pools`` is empty when the
    events do not say. ``stacks`` are indices into ``Snapshot.stacks``, -1: not recorded.
    """

    device: int
    actions: Sequence[str] = ()
    addresses: Sequence[int] = ()
    sizes: Sequence[int] = ()
    streams: Sequence[int] = ()
    times_us: Sequence[int] = ()
    stacks: Sequence[int] = ()
    pools: Sequence[PoolId] = ()
    segments: tuple[SegmentRecord, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All devices that have events or segments, and the Python stacks that they name, innermost frame first."""

    devices: tuple[DeviceHistory, ...]
    stacks: tuple[tuple[str, ...], ...]


def read(path: str | Path) -> Snapshot:
    """The snapshot in a file. Runs nothing that is in it.

    Raises FormatError if the file is missing, no plain data, or not a memory snapshot.
    """
    try:
        with regular(path).open("rb", buffering=0) as file:
            return _read(file, os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise FormatError(f"Cannot read {path} as a memory snapshot.", f"{error}.") from error


def parse(data: bytes, name: str = "the snapshot") -> Snapshot:
    """The snapshot in ``data``; ``name`` is what errors call it."""
    return _read(io.BytesIO(data), len(data), name)


def _read(source: BinaryIO, size: int, name: str) -> Snapshot:
    if not size:
        raise FormatError(f"Cannot read {name} as a memory snapshot.", "It is empty.")
    reader = _Reader(name, size)
    document = plain_pickle.load(source, size, name, reader)
    return reader.snapshot(document)


class _Entry(NamedTuple):
    """A block's history before torch 2.0: where it begins, what was asked for and who asked (a stack's number)."""

    address: Any
    requested: Any
    stack: int


class _Event:
    """Takes the place of every event that is in the columns."""

    __slots__ = ()


class _Block:
    """Takes the place of every block that is in the columns."""

    __slots__ = ()


_EVENT, _BLOCK = _Event(), _Block()


class _BlockColumns:
    """All blocks of a file, in its order."""

    def __init__(self) -> None:
        self.addresses, self.sizes, self.requested = array("q"), array("q"), array("q")
        self.states, self.stacks = array("B"), array("i")

    def __len__(self) -> int:
        return len(self.stacks)


class _Blocks(Sequence[BlockRecord]):
    """The blocks of one segment. A record is made whenever one is asked for."""

    def __init__(self, columns: _BlockColumns, rows: range) -> None:
        self._columns, self._rows = columns, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> BlockRecord: ...
    @overload
    def __getitem__(self, index: slice) -> _Blocks: ...
    def __getitem__(self, index: int | slice) -> BlockRecord | _Blocks:
        if isinstance(index, slice):
            return _Blocks(self._columns, self._rows[index])
        row, found = self._rows[index], self._columns
        state = STATES[found.states[row]]
        return BlockRecord(found.addresses[row], found.sizes[row], found.requested[row], state, found.stacks[row])

    def __eq__(self, other: object) -> bool:
        """As any sequence of the same records."""
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as the columns that it looks at


class _Columns:
    """All events of a file, in its order."""

    def __init__(self) -> None:
        self.actions: Interned[str] = Interned("B")
        self.addresses, self.sizes, self.times_us = array("q"), array("q"), array("q")
        self.streams: Interned[int] = Interned("H")
        self.stacks = array("i")
        self.pools: Interned[PoolId] = Interned("H")

    def __len__(self) -> int:
        return len(self.stacks)

    def cut(self, device: int, rows: slice) -> DeviceHistory:
        """The events of one device. All of them are given as they are, not copied."""
        every = rows == slice(0, len(self))
        names = ("actions", "addresses", "sizes", "streams", "times_us", "stacks", "pools")
        columns = {name: getattr(self, name) if every else getattr(self, name)[rows] for name in names}
        return DeviceHistory(device=device, **columns)


class _Reader:
    """Turns events and blocks into columns and stacks into numbers while they are read."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.limit = name, size // BYTES_PER_EVENT + 16
        self.all, self.blocks = _Columns(), _BlockColumns()
        self.frames: dict[int, int] = {}  # id of a frame's dictionary -> number
        self.frame_texts: list[str] = []
        self.holders: list[Any] = []  # keeps the dictionaries whose ids are known
        self.stacks: dict[bytes, int] = {}
        self.lists: Sequence[Any] = ()  # of frames that many rows named last, and the number of each one's stack
        self.of_lists = np.zeros(0, np.int32)

    def refuse(self, found: str) -> FormatError:
        return FormatError(f"Cannot read {self.name} as a memory snapshot of PyTorch.", found)

    def one(self, item: dict[Any, Any]) -> Any:
        if "action" in item:
            return self.event(item)
        if "state" in item:
            return self.block(item)
        if "real_size" in item:
            return _Entry(item.get("addr", -1), item["real_size"], self.stack(item.get("frames")))
        return item

    def many(self, table: Table) -> _Event | None:
        """Put many events into the columns at once. None if not all of them are as they should be, or nearly."""
        columns, count, of = self.all, table.count, table.columns
        numbers = [self.numbers(of, names, count) for names in (("addr", "device_free"), ("size",), ("time_us",))]
        actions, streams, pools = of.get("action"), self.numbers(of, ("stream",), count), of.get("pool_id")
        stacks = self.stack_numbers(of.get("frames"), count)
        if actions is None or actions.rows is not None or not _all_are(str, actions) or not _all_are(tuple, pools):
            return None
        if len(columns) + count > self.limit or "size" not in of or of["size"].rows is not None:
            return None
        if streams is None or stacks is None or any(one is None for one in numbers):
            return None
        addresses, sizes, times_us = (np.asarray(one) for one in numbers)
        if min(addresses.min(), sizes.min()) < 0:
            return None
        distinct, which = np.unique(streams, return_inverse=True)
        pool_ids = [self.pool(one) for one in pools.values or ()] if pools is not None else []
        try:
            columns.streams.extend(which, distinct.tolist())
            columns.actions.extend(actions.numbers, actions.values or ())
            columns.pools.extend(pools.numbers if pools is not None else (), pool_ids)
        except OverflowError as error:
            raise self.refuse(f"Its events have too many different streams, actions or pools: {error}.") from error
        for column, found in ((columns.addresses, addresses), (columns.sizes, sizes), (columns.times_us, times_us)):
            column.frombytes(np.ascontiguousarray(found, np.int64).tobytes())
        columns.stacks.frombytes(stacks.tobytes())
        return _EVENT

    def numbers(self, of: dict[Any, Column], names: Sequence[str], count: int) -> NDArray[np.int64] | None:
        """What rows hold under the first of ``names`` that they have, 0 where they have none; None: no numbers."""
        made = np.zeros(count, np.int64)
        for name in reversed(names):
            found = of.get(name)
            if found is None:
                continue
            if found.values is not None:
                return None
            made[slice(None) if found.rows is None else found.rows] = found.numbers
        return made

    def stack_numbers(self, frames: Column | None, count: int) -> NDArray[np.int32] | None:
        """The number of each row's stack; None: something else than lists of frames is among them."""
        made = np.full(count, -1, np.int32)
        if frames is None:
            return made
        if frames.values is None:
            return None
        if frames.values is not self.lists:
            if not _all_are(list, frames):
                return None
            self.lists, self.of_lists = frames.values, np.zeros(0, np.int32)
        new = len(frames.values) - len(self.of_lists)
        if new > 0:  # mostly the same lists as in the rows before
            self.of_lists = np.append(self.of_lists, np.full(max(new, len(self.of_lists)), _NOT_NUMBERED))
        unknown = np.unique(frames.numbers[self.of_lists[frames.numbers] == _NOT_NUMBERED])
        self.of_lists[unknown] = [self.stack(frames.values[number]) for number in unknown.tolist()]
        made[slice(None) if frames.rows is None else frames.rows] = self.of_lists[frames.numbers]
        return made

    def event(self, item: dict[Any, Any]) -> _Event:
        """Put an event into the columns."""
        columns, number = self.all, len(self.all)
        action, stream = item["action"], item.get("stream", 0)
        stack = self.stack(item.get("frames"))
        try:
            if not isinstance(action, str) or not isinstance(stream, int) or abs(stream) >> 63:
                raise TypeError
            columns.addresses.append(item.get("addr", item.get("device_free", 0)))
            columns.sizes.append(item["size"])
            columns.times_us.append(item.get("time_us", 0))
            columns.actions.append(action)
            columns.streams.append(stream)
            if "pool_id" in item:
                columns.pools.append(self.pool(item["pool_id"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise self.refuse(f"Event {number} is {_short(item)}.") from error
        columns.stacks.append(stack)
        if columns.sizes[-1] < 0 or columns.addresses[-1] < 0:
            raise self.refuse(f"Event {number} is {_short(item)}.")
        item.clear()
        if number >= self.limit:
            raise self.refuse("It has more events than its size allows.")
        return _EVENT

    def pool(self, value: Any) -> PoolId:
        if not (isinstance(value, (tuple, list)) and len(value) == 2 and all(type(part) is int for part in value)):
            raise self.refuse(f"A pool's id is {_short(value)}.")
        return value[0], value[1]

    def block(self, item: dict[Any, Any]) -> _Block:
        """A block; before torch 2.0 its request and its stack are in the first entry of its history."""
        history, state, size = item.get("history"), item["state"], item.get("size", -1)
        entries = history if isinstance(history, list) else []
        first = next((one for one in entries[:1] if type(one) is _Entry), _Entry(-1, size, -1))
        requested = item.get("requested_size", first.requested)
        numbers: tuple[Any, Any, Any] = (item.get("address", first.address), size, requested)
        if not all(type(number) is int and -1 <= number < 1 << 63 for number in numbers) or state not in STATES:
            raise self.refuse(f"A block is {_short(item)}.")
        stack = self.stack(item["frames"]) if "frames" in item else first.stack
        item.clear()
        columns = self.blocks
        columns.addresses.append(numbers[0])
        columns.sizes.append(numbers[1])
        columns.requested.append(numbers[2])
        columns.states.append(STATES.index(state))
        columns.stacks.append(stack)
        return _BLOCK

    def stack(self, frames: Any) -> int:
        """The number of a stack. A list that was seen is marked with its number, because events share them."""
        if not frames:
            return -1
        if type(frames) is not list:
            raise self.refuse(f"A stack is {_short(frames)}.")
        if type(frames[0]) is _StackNumber:
            return int(frames[0])
        known = self.frames
        try:
            numbers = array("I", [known[id(frame)] for frame in frames])
        except KeyError:
            numbers = array("I", [self.frame(frame) for frame in frames])
        made = self.stacks.setdefault(numbers.tobytes(), len(self.stacks))
        frames[:] = [_StackNumber(made)]
        return made

    def frame(self, frame: Any) -> int:
        number = self.frames.get(id(frame))
        if number is None:
            if type(frame) is not dict:
                raise self.refuse(f"A stack frame is {_short(frame)}.")
            number = self.frames[id(frame)] = len(self.frame_texts)
            where, line, what = (frame.get(key, "?") for key in ("filename", "line", "name"))
            self.frame_texts.append(f"{what} at {where}:{line}" if where != "??" else str(what))
            self.holders.append(frame)
        return number

    def snapshot(self, document: Any) -> Snapshot:
        if isinstance(document, list):  # torch.cuda.memory_snapshot() of old, segments only
            document = {"segments": document}
        if not isinstance(document, dict) or not isinstance(document.get("segments"), list):
            raise self.refuse(f"It holds {_short(document)}.")
        settings = document.get("allocator_settings") or {}
        if not isinstance(settings, dict):
            raise self.refuse(f"Its allocator settings are {_short(settings)}.")
        devices = self.traces(document.get("device_traces") or [])
        segments: dict[int, list[SegmentRecord]] = {}
        start = 0
        for item in document["segments"]:
            device, segment = self.segment(item, start)
            segments.setdefault(device, []).append(segment)
            start += len(segment.blocks)
        if start != len(self.blocks):
            raise self.refuse("It has blocks outside its segments.")
        made = []
        for device in sorted(devices.keys() | segments.keys()):
            history = devices.get(device) or DeviceHistory(device=device)
            history.segments = self.ordered(segments.get(device, []))
            history.settings = settings
            made.append(history)
        return Snapshot(devices=tuple(made), stacks=tuple(self.stack_texts()))

    def traces(self, traces: Any) -> dict[int, DeviceHistory]:
        """The columns, cut into devices. Every event must be in one trace, in order."""
        if not isinstance(traces, list):
            raise self.refuse(f"Its device traces are {_short(traces)}.")
        every, made, start = self.all, {}, 0
        if every.pools and len(every.pools) != len(every):
            raise self.refuse("Some of its events name a pool and others do not.")
        for device, trace in enumerate(traces):
            if not isinstance(trace, list) or trace.count(_EVENT) != len(trace):
                raise self.refuse(f"The trace of device {device} is not a list of events.")
            end = start + len(trace)
            if end > len(every):
                raise self.refuse(f"The trace of device {device} is not a list of its own events.")
            if trace:
                made[device] = every.cut(device, slice(start, end))
            start = end
        if start != len(every):
            raise self.refuse("It has events outside its device traces.")
        if np.asarray(every.sizes, np.float64).sum() >= _MOST_SUMMED_BYTES:
            raise self.refuse("Its events take more bytes than 64-bit numbers hold.")
        return made

    def segment(self, item: Any, start: int) -> tuple[int, SegmentRecord]:
        """A device's number and one of its segments, whose blocks begin at ``start``."""
        blocks = item.get("blocks") if isinstance(item, dict) else None
        if not isinstance(blocks, list) or any(block is not _BLOCK for block in blocks):
            raise self.refuse(f"A segment is {_short(item)}.")
        if start + len(blocks) > len(self.blocks):
            raise self.refuse("Two of its segments have the same blocks.")
        device, address, size, stream = (
            item.get(key, default)
            for key, default in (("device", 0), ("address", -1), ("total_size", -1), ("stream", 0))
        )
        numbers = (device, address, size, stream)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise self.refuse(f"A segment is {_short(item)}.")
        record = SegmentRecord(
            address=address,
            size=size,
            stream=stream,
            small=item.get("segment_type") == "small",
            pool=self.pool(item.get("segment_pool_id", (0, 0))),
            expandable=item.get("is_expandable") is True,
            blocks=self.tiled(range(start, start + len(blocks)), address, size),
        )
        return device, record

    def tiled(self, rows: range, address: int, size: int) -> _Blocks:
        """The blocks of a segment with their addresses: old snapshots leave them to be counted up."""
        addresses, sizes, at = self.blocks.addresses, self.blocks.sizes, address
        for row in rows:
            if addresses[row] not in (-1, at) or sizes[row] <= 0 or at >= 1 << 63:
                raise self.refuse(f"The blocks of the segment at {address:#x} do not lie side by side.")
            addresses[row] = at
            at += sizes[row]
        if at != address + size:
            raise self.refuse(f"The blocks of the segment at {address:#x} do not fill it.")
        return _Blocks(self.blocks, rows)

    def ordered(self, segments: list[SegmentRecord]) -> tuple[SegmentRecord, ...]:
        segments.sort(key=lambda segment: segment.address)
        for before, after in pairwise(segments):
            if before.address + before.size > after.address:
                raise self.refuse(f"The segments at {before.address:#x} and {after.address:#x} overlap.")
        return tuple(segments)

    def stack_texts(self) -> list[tuple[str, ...]]:
        return [tuple(self.frame_texts[number] for number in array("I", key)) for key in self.stacks]


class _StackNumber(int):
    """Takes the place of a stack's frames once they are known."""

    __slots__ = ()


def _all_are(kind: type, column: Column | None) -> bool:
    """Whether a column holds nothing else; one that is not there does not."""
    return column is None or (column.values is not None and all(type(one) is kind for one in column.values))


def _short(value: Any) -> str:
    """What a value is, without following it inside."""
    if isinstance(value, dict):
        return f"a dictionary with {[key[:20] for key in list(value)[:8] if isinstance(key, str)]}"
    shown = f" ({str(value)[:80]})" if isinstance(value, (str, int, float)) else ""
    return f"a {type(value).__name__}{shown}"
