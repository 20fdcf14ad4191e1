"""Reads pickles of plain data without trusting them.

PyTorch dumps memory snapshots as pickles. A pickle is a program: it may import and call anything, claim sizes that it
does not have, or unfold into far more memory than it takes. This reader knows only the instructions that build
dictionaries, lists, tuples, texts and numbers (pickle protocol 2 and later, CPython ``Lib/pickletools.py``), refuses
all others, and keeps what it builds in proportion to the size of the file. Of the file itself it holds a window.
"""

from __future__ import annotations

import io
import math
import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO, NoReturn, Protocol

from brim.errors import FormatError
from brim.recordings import pickled_rows
from brim.recordings.pickled_rows import BATCH, Known, Rows, Table
from brim.units import MIB

MAX_MARKS = 64  # nesting
MAX_STACK = 200_000  # values that wait for their container; CPython writes batches of 1,000
BYTES_PER_OBJECT = 24  # a file may keep one object for so many bytes, ...
SPARE_OBJECTS = 20_000  # ... and these
BYTES_PER_MEMO = 8  # a file may remember one value for so many bytes, and the spare objects
MOST_SHARED = 3  # numbers in a tuple at most, for equal tuples to be kept once
_GETS = re.compile(rb"(?:j.{4}){1,64}|(?:h.)+", re.DOTALL)  # references into the memo
_REFERENCES = re.compile(rb"\]\x94\(((?:j.{4}|h.){1,1000})e", re.DOTALL)  # a remembered list, one batch, of them
CHECK_EVERY = 5_000  # instructions between two looks at the limits
WINDOW_BYTES = 8 * MIB  # of the file that are held at once, ...
AHEAD_BYTES = 64 << 10  # of these at least behind the next instruction: what it is written in, a text apart
# Rows that are read at once, of a long file more: what is worked out for them takes some five times as much memory.
MOST_ROWS_BYTES = (MIB, 2 * MIB)
ROWS_SHARE = 16  # of a file that is read as rows at once at most
LEAST_ROWS_BYTES = 64 << 10  # in which rows are looked for at first, and after a run of them was short
FEW_ROWS = 16  # are read one by one, and so many before rows are looked for again, ...
MOST_SINGLE = 1_024  # doubled as often as there were few, up to this
STOP = ord(".")
FRAME = 0x95
HEADER_BYTES = 9  # of a frame: the instruction and its length
_NAMES = {"c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "\x81": "NEWOBJ", "i": "INST"}
_INDEX = struct.Struct("<I")


class Reduce(Protocol):
    """What is to become of dictionaries that are filled at once."""

    def one(self, item: dict[Any, Any]) -> Any:
        """What takes the place of ``item`` in what holds it and in what is remembered: itself, or something else, and
        then what was inside no longer counts as kept."""

    def many(self, table: Table) -> Any:
        """What takes the place of each of the dictionaries, as ``one`` would say of every one; None: ask that."""


def load(source: bytes | BinaryIO, size: int, name: str, reduce: Reduce | None = None) -> Any:
    """The plain value in ``source``, of ``size`` bytes; ``name`` is what errors call it.

    Raises FormatError for anything that is not plain data, damaged, or out of proportion; OSError where ``source``
    cannot be read.
    """
    reader = _Reader(io.BytesIO(source) if isinstance(source, bytes) else source, size, name, reduce)
    try:
        return reader.run()
    except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise FormatError(
            f"Cannot read {name} as a pickle of plain data.",
            f"It is damaged or cut off at byte {reader.position()} of {size} ({type(error).__name__}).",
            "Dump it again.",
        ) from error


class _Unframed:
    """The instructions of a pickle without the headers of its frames: each says only where the next one is."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._ahead: int | None = 2  # bytes to the next header: the first is behind the protocol. None: no frames
        self._given = 0
        self._cut = array("q")  # where headers were, in what was given

    def read(self, count: int) -> bytes:
        """About so many bytes; none at the end."""
        raw = self._source.read(count)
        start, pieces = 0, []
        while raw and self._ahead is not None:
            header = start + self._ahead
            if header >= len(raw):
                self._ahead = header - len(raw)
                break
            if len(raw) < header + HEADER_BYTES:
                raw += self._source.read(header + HEADER_BYTES - len(raw))
            if raw[header] != FRAME or len(raw) < header + HEADER_BYTES:
                self._ahead = None
                break
            pieces.append(raw[start:header])
            self._given += header - start
            self._cut.append(self._given)
            start = header + HEADER_BYTES
            self._ahead = int.from_bytes(raw[header + 1 : start], "little")
        pieces.append(raw[start:])
        self._given += len(raw) - start
        return b"".join(pieces)

    def position(self, given: int) -> int:
        """The position in the file of a byte, by its number in the data at hand."""
        return given + HEADER_BYTES * bisect_left(self._cut, given + 1)


@cache
def _get_run(count: int) -> struct.Struct:
    return struct.Struct("<" + "xI" * count)


class _Reader:
    """One pass over one file. ``kept`` counts the objects that are held.

    ``data`` is a window of it, ``at`` the next instruction in that. Rows are dictionaries of a list that ``reduce``
    takes many at a time.
    """

    def __init__(self, source: BinaryIO, size: int, name: str, reduce: Reduce | None) -> None:
        self.source, self.size, self.name, self.reduce = _Unframed(source), size, name, reduce
        self.data = b""
        self.before = 0  # bytes of the pickle that are no longer held
        self.at = 0
        self.ended = False
        self.kept = 0
        self.limit = size // BYTES_PER_OBJECT + SPARE_OBJECTS
        self.memo_limit = size // BYTES_PER_MEMO + SPARE_OBJECTS
        self.stack: list[Any] = []
        # Stack length and `kept` when each was set, and where the value before it is in the memo (-1: nowhere).
        self.marks: list[tuple[int, int, int]] = []
        self.memo: list[Any] = []
        self.tuples: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.texts: dict[bytes, str] = {}
        self.lists: dict[bytes, list[Any]] = {}
        self.known = Known(self.texts, self.lists, self.tuples)
        self.row: Any = None  # what took the place of the last dictionary
        self.rows_bytes = LEAST_ROWS_BYTES
        self.most_rows_bytes = min(max(size // ROWS_SHARE, MOST_ROWS_BYTES[0]), MOST_ROWS_BYTES[1])
        self.single = self.singles = (
            0  # dictionaries to be read one by one before rows are looked for; when not found
        )

    def hold(self, wanted: int) -> None:
        """Have ``wanted`` bytes from the next instruction on in the window, if the file has so many."""
        if self.ended or len(self.data) - self.at >= wanted:
            return
        self.data = self.data[self.at :]
        self.before += self.at
        self.at = 0
        while len(self.data) < wanted and not self.ended:
            read = self.source.read(max(WINDOW_BYTES, wanted - len(self.data)))
            self.data = self.data + read if self.data else read
            self.ended = not read

    def position(self) -> int:
        """Where in the file the next instruction is."""
        return self.source.position(self.before + self.at)

    def run(self) -> Any:
        self.hold(AHEAD_BYTES)
        while self.some():
            self.hold(AHEAD_BYTES)
            if self.kept > self.limit or len(self.memo) > self.memo_limit:
                self.refuse("it unfolds into far more than its size")
            if len(self.stack) > MAX_STACK:
                self.refuse("it leaves too many values without a container")
        return self.finish()

    def some(self) -> bool:
        """Follow some instructions, the common ones here, for speed. False: the last was reached."""
        data, stack, memo, steps, at = self.data, self.stack, self.memo, _STEPS, self.at
        push, remember, number, index = stack.append, memo.append, int.from_bytes, _INDEX.unpack_from
        enough = math.inf if self.ended else len(data) - AHEAD_BYTES
        for _ in range(CHECK_EVERY):
            if at > enough:
                break
            code = data[at]
            if code == 104:  # BINGET
                push(memo[data[at + 1]])
                at += 2
            elif code == 106:  # LONG_BINGET
                push(memo[index(data, at + 1)[0]])
                at += 5
            elif code == 75:  # BININT1
                push(data[at + 1])
                at += 2
            elif code == 148:  # MEMOIZE
                remember(stack[-1])
                at += 1
            elif code in (138, 74) and (length := 4 if code == 74 else data[at + 1]) <= 16:  # BININT, LONG1
                start = at + 1 + (code == 138)
                push(number(data[start : start + length], "little", signed=True))
                self.kept += 1
                at = start + length
            elif code == 93 and (match := _REFERENCES.match(data, at)):  # a list of what is known already
                push(references := self.references(*match.span(1)))
                remember(references)
                at = match.end()
            else:
                self.at = at
                if code == STOP:
                    return False
                if code == 125 and self.row is not None and stack and stack[-1] is self.row and self.rows():
                    return True
                (steps[code] or _Reader.unknown)(self)
                if self.data is not data:
                    return True  # a long text
                at = self.at
        self.at = at
        return True

    def rows(self) -> bool:
        """Read rows from the next instruction on, which begins a dictionary behind a row. False: there were none."""
        assert self.reduce is not None, "there are rows only where something takes them"
        if self.single > 0:
            self.single -= 1
            return False
        self.hold(self.rows_bytes)
        holder = self.stack[self.marks[-1][0] - 1] if self.marks else None
        if type(holder) is not list:
            return False
        end = min(self.at + self.rows_bytes, len(self.data))
        rows_read = pickled_rows.read(self.data, self.at, end, self.row, self.memo, self.known)
        if rows_read is None or rows_read.table.count < FEW_ROWS or self.reduce.many(rows_read.table) is not self.row:
            self.singles = self.single = min(max(2 * self.singles, FEW_ROWS), MOST_SINGLE)
            self.rows_bytes = LEAST_ROWS_BYTES
            return False
        self.singles = 0
        used = rows_read.end - self.at
        self.rows_bytes = min(max(2 * used, LEAST_ROWS_BYTES), self.most_rows_bytes)
        self.take(rows_read, holder)
        return True

    def take(self, found: Rows, holder: list[Any]) -> None:
        """Go on behind rows, as if they had been read one by one."""
        row = self.row
        self.memo += found.remembered
        self.kept += found.table.count
        self.at = found.end
        if found.batches:
            start = self.marks[-1][0]
            holder += self.stack[start:]
            holder += [row] * (found.batches[-1] + 1)
            self.kept += (len(self.stack) - start + found.batches[-1] + 1) >> 3
            del self.stack[start:]
            self.marks[-1] = (start, self.kept, -1)
        self.stack += [row] * (found.table.count - 1 - (found.batches[-1] if found.batches else -1))

    def finish(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            self.refuse("it ends with values left over")
        return self.stack[0]

    def references(self, start: int, end: int) -> list[Any]:
        """The list whose items are the references between two bytes: most of a snapshot is such lists.

        Lists of the same references are one list. (Longer ones are written in batches: what follows may differ.)
        """
        raw = self.data[start:end]
        referred = self.lists.get(raw)
        if referred is None or len(referred) >= BATCH:
            referred = self.lists[raw] = self.resolved(raw)
            self.kept += 2 + (len(referred) >> 3)  # a slot is an eighth of a small object
        return referred

    def resolved(self, raw: bytes) -> list[Any]:
        objects: list[Any] = []
        start = 0
        while start < len(raw):
            match = _GETS.match(raw, start)
            assert match is not None, "the outer pattern consists of the inner one"
            stop = match.end()
            if raw[start] == 106:
                objects += map(self.memo.__getitem__, _get_run((stop - start) // 5).unpack_from(raw, start))
            else:
                objects += map(self.memo.__getitem__, raw[start + 1 : stop : 2])
            start = stop
        return objects

    def refuse(self, why: str) -> NoReturn:
        raise FormatError(f"Cannot read {self.name} as a pickle of plain data.", f"Refused: {why}.")

    def unknown(self) -> NoReturn:
        code = self.data[self.at]
        character = chr(code)
        if character in _NAMES:
            self.refuse(f"at byte {self.position()} it would run code ({_NAMES[character]})")
        self.refuse(f"instruction {bytes([code])!r} at byte {self.position()} does not build plain data")

    def keep(self, value: Any, length: int) -> None:
        """Push a new object that was written in ``length`` bytes."""
        self.stack.append(value)
        self.at += length
        self.kept += 1

    def push(self, value: Any, length: int) -> None:
        """Push a value that takes no memory of its own."""
        self.stack.append(value)
        self.at += length

    def skip(self, length: int) -> None:
        self.at += length

    def count(self, start: int, width: int) -> int:
        raw = self.data[start : start + width]
        if len(raw) != width:
            raise IndexError
        return int.from_bytes(raw, "little")

    def get(self, width: int) -> None:
        self.push(self.memo[self.count(self.at + 1, width)], 1 + width)

    def mark(self) -> None:
        last = len(self.memo) - 1
        remembered = last >= 0 and bool(self.stack) and self.memo[last] is self.stack[-1]
        self.marks.append((len(self.stack), self.kept, last if remembered else -1))
        self.at += 1
        if len(self.marks) > MAX_MARKS:
            self.refuse("it is nested too deeply")

    def text(self, width: int) -> None:
        start = self.at + 1 + width
        length = self.count(self.at + 1, width)
        if AHEAD_BYTES // 2 < length <= self.size:
            self.hold(1 + width + length + AHEAD_BYTES)
            start = self.at + 1 + width
        raw = self.data[start : start + length]
        if len(raw) != length:
            self.refuse(f"at byte {self.position()} it claims a text of {length} bytes that it does not have")
        text = self.texts.get(raw)
        if text is None:
            self.texts[raw] = text = str(raw, "utf-8", "surrogatepass")
            self.keep(text, 1 + width + length)
        else:
            self.push(text, 1 + width + length)

    def integer(self, start: int, width: int, *, signed: bool) -> None:
        raw = self.data[start : start + width]
        if len(raw) != width:
            raise IndexError
        self.keep(int.from_bytes(raw, "little", signed=signed), start + width - self.at)

    def long(self, width: int) -> None:
        length = self.count(self.at + 1, width)
        if length > 16:
            self.refuse(f"at byte {self.position()} it holds a number of {length} bytes")
        self.integer(self.at + 1 + width, length, signed=True)

    def real(self) -> None:
        self.keep(struct.unpack_from(">d", self.data, self.at + 1)[0], 9)

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])
        self.at += 1

    def put(self, width: int) -> None:
        index = self.count(self.at + 1, width)
        if index > len(self.memo):
            self.refuse(f"at byte {self.position()} it remembers a value at {index}, far beyond the last")
        self.memo[index : index + 1] = [self.stack[-1]]
        self.at += 1 + width

    def tuple(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError
        start = len(self.stack) - count
        parts = tuple(self.stack[start:])
        del self.stack[start:]
        plain = count <= MOST_SHARED and all(type(part) is int for part in parts)
        # Ids of pools: many events share a few.
        shared = self.tuples.setdefault(parts, parts) if plain else parts
        if shared is parts:
            self.keep(parts, 1)
        else:
            self.push(shared, 1)

    def marked_tuple(self) -> None:
        start, _, _ = self.marks.pop()
        self.tuple(len(self.stack) - start)

    def append(self) -> None:
        value = self.stack.pop()
        holder = self.stack[-1]
        if type(holder) is not list:
            self.refuse(f"at byte {self.position()} it appends to something other than a list")
        holder.append(value)
        self.at += 1

    def appends(self) -> None:
        start, _, _ = self.marks.pop()
        holder = self.stack[start - 1]
        if type(holder) is not list or start < 1:
            self.refuse(f"at byte {self.position()} it appends to something other than a list")
        holder += self.stack[start:]
        self.kept += (len(self.stack) - start) >> 3  # a slot is an eighth of a small object
        del self.stack[start:]
        self.at += 1

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.fill([key, value], self.kept, -1)

    def set_items(self) -> None:
        start, kept, place = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        self.fill(values, kept, place)

    def fill(self, values: list[Any], kept: int, place: int) -> None:
        """Fill the last dictionary, which is at ``place`` in the memo (-1: nowhere, or it is not known)."""
        holder = self.stack[-1]
        if type(holder) is not dict or len(values) % 2:
            self.refuse(f"at byte {self.position()} it sets items of something other than a dictionary")
        holder.update(zip(values[::2], values[1::2], strict=True))
        self.kept += len(values) >> 2
        self.at += 1
        if self.reduce is not None:
            reduced = self.reduce.one(holder)
            if reduced is not holder:
                self.stack[-1] = self.row = reduced
                self.kept = kept  # what was counted for the dictionary stands for what took its place
                if place >= 0:
                    self.memo[place] = reduced  # the memo would keep the dictionary as long as the file is read

    def frame(self) -> None:
        self.count(self.at + 1, 8)
        self.at += 9


def _steps() -> list[Callable[[_Reader], None] | None]:
    table: list[Callable[[_Reader], None] | None] = [None] * 256
    named: dict[str, Callable[[_Reader], None]] = {
        "\x80": lambda r: r.skip(2),  # PROTO
        "\x95": _Reader.frame,
        "}": lambda r: r.keep({}, 1),
        "]": lambda r: r.keep([], 1),
        ")": lambda r: r.push((), 1),
        "(": _Reader.mark,
        "N": lambda r: r.push(None, 1),
        "\x88": lambda r: r.push(True, 1),
        "\x89": lambda r: r.push(False, 1),
        "K": lambda r: r.push(r.data[r.at + 1], 2),
        "M": lambda r: r.integer(r.at + 1, 2, signed=False),
        "J": lambda r: r.integer(r.at + 1, 4, signed=True),
        "\x8a": lambda r: r.long(1),
        "\x8b": lambda r: r.long(4),
        "G": _Reader.real,
        "\x8c": lambda r: r.text(1),
        "X": lambda r: r.text(4),
        "\x8d": lambda r: r.text(8),
        "h": lambda r: r.get(1),
        "j": lambda r: r.get(4),
        "\x94": _Reader.memoize,
        "q": lambda r: r.put(1),
        "r": lambda r: r.put(4),
        "\x85": lambda r: r.tuple(1),
        "\x86": lambda r: r.tuple(2),
        "\x87": lambda r: r.tuple(3),
        "t": _Reader.marked_tuple,
        "a": _Reader.append,
        "e": _Reader.appends,
        "s": _Reader.set_item,
        "u": _Reader.set_items,
    }
    for code, step in named.items():
        table[ord(code)] = step
    return table


_STEPS = _steps()
