"""A reader of the memory snapshots of ``torch.cuda.memory._dump_snapshot``, old and new, one device or many.

Schema: ``torch/csrc/cuda/memory_snapshot.cpp`` and ``torch/cuda/memory.py`` of PyTorch 1.11 to 2.13.

An event takes 31 bytes in memory, a block of a segment 29: both become rows of columns, not objects.
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brim.allocator.blocks import PoolId
from brim.core.files import regular
from brim.errors import FormatError
from brim.recordings import plain_pickle
from brim.recordings.history import STATES, BlockRecord, DeviceHistory, Interned, SegmentRecord
from brim.recordings.pickled_rows import Column, Table

BYTES_PER_EVENT = 24  # in a file, at least
_MOST_SUMMED_BYTES = 1 << 62  # of all events: sums have 64 bits
_NOT_NUMBERED = np.int32(-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Devices with events or segments, and the Python stacks that they number, innermost frame first."""

    devices: tuple[DeviceHistory, ...]
    stacks: tuple[tuple[str, ...], ...]


def read(path: str | Path) -> Snapshot:
    """Read the snapshot in a file, without running anything in it.

    Raises FormatError if the file is missing, not plain data, or not a memory snapshot.
    """
    try:
        with regular(path).open("rb", buffering=0) as file:
            return _read(file, os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise FormatError(f"Cannot read {path} as a memory snapshot.", f"{error}.") from error


def parse(data: bytes, name: str = "the snapshot") -> Snapshot:
    """Read the snapshot in ``data``; errors call it ``name``."""
    return _read(io.BytesIO(data), len(data), name)


def _read(source: BinaryIO, size: int, name: str) -> Snapshot:
    if not size:
        raise FormatError(f"Cannot read {name} as a memory snapshot.", "It is empty.")
    reader = _Reader(name, size)
    document = plain_pickle.load(source, size, name, reader)
    return reader.snapshot(document)


class _Entry(NamedTuple):
    """A block's history before torch 2.0: its address, the requested bytes and the number of the stack."""

    address: Any
    requested: Any
    stack: int


class _Event:
    """The replacement of every event that is in the columns."""

    __slots__ = ()


class _Block:
    """The replacement of every block that is in the columns."""

    __slots__ = ()


_EVENT, _BLOCK = _Event(), _Block()


class _BlockColumns:
    """All blocks of a file, in the file's order."""

    def __init__(self) -> None:
        self.addresses, self.sizes, self.requested = array("q"), array("q"), array("q")
        self.states, self.stacks = array("B"), array("i")

    def __len__(self) -> int:
        return len(self.stacks)


@dataclass(eq=False)
class _Blocks:
    """The blocks of one segment, as records made on iteration."""

    _columns: _BlockColumns
    _rows: range

    def __iter__(self) -> Iterator[BlockRecord]:
        columns = self._columns
        for row in self._rows:
            state = STATES[columns.states[row]]
            size, requested = columns.sizes[row], columns.requested[row]
            yield BlockRecord(columns.addresses[row], size, requested, state, columns.stacks[row])


class _Columns:
    """All events of a file, in the file's order."""

    def __init__(self) -> None:
        self.actions: Interned[str] = Interned("B")
        self.addresses, self.sizes, self.times_us = array("q"), array("q"), array("q")
        self.streams: Interned[int] = Interned("H")
        self.stacks = array("i")
        self.pools: Interned[PoolId] = Interned("H")

    def __len__(self) -> int:
        return len(self.stacks)

    def cut(self, device: int, rows: slice) -> DeviceHistory:
        """Return the events of one device; the whole columns are not copied."""
        every = rows == slice(0, len(self))
        names = ("actions", "addresses", "sizes", "streams", "times_us", "stacks", "pools")
        columns = {name: getattr(self, name) if every else getattr(self, name)[rows] for name in names}
        return DeviceHistory(device=device, **columns)


class _Reader:
    """Turns events and blocks into columns, and stacks into numbers, while the pickle is read."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.limit = name, size // BYTES_PER_EVENT + 16
        self.all, self.blocks = _Columns(), _BlockColumns()
        self.frames: dict[int, int] = {}  # id of a frame's dictionary -> number
        self.frame_texts: list[str] = []
        self.holders: list[Any] = []  # keeps the frames alive, so that no other object gets their ids
        self.stacks: dict[bytes, int] = {}
        self.lists: Sequence[Any] = ()  # of frames, as the last table had them
        self.of_lists = np.zeros(0, np.int32)  # the number of each list's stack

    def refuse(self, reason: str) -> FormatError:
        return FormatError(f"Cannot read {self.name} as a memory snapshot of PyTorch.", reason)

    def replace(self, item: dict[Any, Any]) -> Any:
        if "action" in item:
            return self.event(item)
        if "state" in item:
            return self.block(item)
        if "real_size" in item:
            return _Entry(item.get("addr", -1), item["real_size"], self.stack(item.get("frames")))
        return item

    def replace_many(self, table: Table) -> _Event | None:
        """Put many events into the columns at once. Return None if any of them may be damaged."""
        columns, count, of = self.all, table.count, table.columns
        numbers = [self.numbers(of, names, count) for names in (("addr", "device_free"), ("size",), ("time_us",))]
        actions, streams, pools = of.get("action"), self.numbers(of, ("stream",), count), of.get("pool_id")
        stacks = self.stack_numbers(of.get("frames"), count)
        if actions is None or actions.rows is not None or not _all_are(str, actions) or not _all_are(tuple, pools):
            return None
        if len(columns) + count > self.limit or "size" not in of or of["size"].rows is not None:
            return None
        if streams is None or stacks is None or any(column is None for column in numbers):
            return None
        addresses, sizes, times_us = (np.asarray(column) for column in numbers)
        if min(addresses.min(), sizes.min()) < 0:
            return None
        distinct, which = np.unique(streams, return_inverse=True)
        pool_ids = [self.pool(pool_id) for pool_id in pools.values or ()] if pools is not None else []
        try:
            columns.streams.extend(which, distinct.tolist())
            columns.actions.extend(actions.numbers, actions.values or ())
            columns.pools.extend(pools.numbers if pools is not None else (), pool_ids)
        except OverflowError as error:
            raise self.refuse(f"Its events have too many different streams, actions or pools: {error}.") from error
        for column, new in ((columns.addresses, addresses), (columns.sizes, sizes), (columns.times_us, times_us)):
            column.frombytes(np.ascontiguousarray(new, np.int64).tobytes())
        columns.stacks.frombytes(stacks.tobytes())
        return _EVENT

    def numbers(self, of: dict[Any, Column], names: Sequence[str], count: int) -> NDArray[np.int64] | None:
        """Return each row's number under the first of ``names`` that it has, else 0; None for other values."""
        numbers = np.zeros(count, np.int64)
        for name in reversed(names):
            column = of.get(name)
            if column is None:
                continue
            if column.values is not None:
                return None
            numbers[slice(None) if column.rows is None else column.rows] = column.numbers
        return numbers

    def stack_numbers(self, frames: Column | None, count: int) -> NDArray[np.int32] | None:
        """Return the number of each row's stack; None if a value is not a list."""
        stacks = np.full(count, -1, np.int32)
        if frames is None:
            return stacks
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
        stacks[slice(None) if frames.rows is None else frames.rows] = self.of_lists[frames.numbers]
        return stacks

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
        """Put a block into the columns. Before torch 2.0 its request and stack are in its history's first entry."""
        history, state, size = item.get("history"), item["state"], item.get("size", -1)
        entries = history if isinstance(history, list) else []
        first = next((entry for entry in entries[:1] if type(entry) is _Entry), _Entry(-1, size, -1))
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
        """Return the number of a stack, and put it into the list of frames, as events share lists."""
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
        stack = self.stacks.setdefault(numbers.tobytes(), len(self.stacks))
        frames[:] = [_StackNumber(stack)]
        return stack

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
            start += len(item["blocks"])
        if start != len(self.blocks):
            raise self.refuse("It has blocks outside its segments.")
        histories = []
        for device in sorted(devices.keys() | segments.keys()):
            history = devices.get(device) or DeviceHistory(device=device)
            history.segments = self.ordered(segments.get(device, []))
            history.settings = settings
            histories.append(history)
        stacks = (tuple(self.frame_texts[number] for number in array("I", key)) for key in self.stacks)
        return Snapshot(devices=tuple(histories), stacks=tuple(stacks))

    def traces(self, traces: Any) -> dict[int, DeviceHistory]:
        """Cut the columns into devices. Every event must be in one trace, in order."""
        if not isinstance(traces, list):
            raise self.refuse(f"Its device traces are {_short(traces)}.")
        every, histories, start = self.all, {}, 0
        if every.pools and len(every.pools) != len(every):
            raise self.refuse("Some of its events name a pool and others do not.")
        for device, trace in enumerate(traces):
            if not isinstance(trace, list) or trace.count(_EVENT) != len(trace):
                raise self.refuse(f"The trace of device {device} is not a list of events.")
            end = start + len(trace)
            if end > len(every):
                raise self.refuse(f"The trace of device {device} is not a list of its own events.")
            if trace:
                histories[device] = every.cut(device, slice(start, end))
            start = end
        if start != len(every):
            raise self.refuse("It has events outside its device traces.")
        if np.asarray(every.sizes, np.float64).sum() >= _MOST_SUMMED_BYTES:
            raise self.refuse("Its events take more bytes than 64-bit numbers hold.")
        return histories

    def segment(self, item: Any, start: int) -> tuple[int, SegmentRecord]:
        """Return a device's number and one of its segments, whose blocks begin at ``start``."""
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
        """Return the blocks of a segment, after adding the addresses that old snapshots lack."""
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


class _StackNumber(int):
    """The replacement of a stack's frames once they are numbered."""

    __slots__ = ()


def _all_are(kind: type, column: Column | None) -> bool:
    """True if all values of the column are of ``kind``, or there is no column."""
    return column is None or (column.values is not None and all(type(value) is kind for value in column.values))


def _short(value: Any) -> str:
    """Describe a value without descending into it."""
    if isinstance(value, dict):
        return f"a dictionary with {[key[:20] for key in list(value)[:8] if isinstance(key, str)]}"
    shown = f" ({str(value)[:80]})" if isinstance(value, (str, int, float)) else ""
    return f"a {type(value).__name__}{shown}"
