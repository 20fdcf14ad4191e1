"""A reader of untrusted pickles of plain data, within bounded memory.

PyTorch dumps memory snapshots as pickles. A pickle is a program: it may import and call anything, claim sizes that it
does not have, or unfold into far more memory than its own size. This reader knows only the instructions that build
dictionaries, lists, tuples, texts and numbers (pickle protocol 2 and later, CPython ``Lib/pickletools.py``), refuses
all others, and bounds its objects by the size of the file, of which it holds a window.

``pickle.Unpickler`` would refuse imports too, but takes 3.2 GiB for a snapshot of 5 million events; this takes 0.4.
"""

from __future__ import annotations

import io
import math
import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn, Protocol

from brim.errors import FormatError
from brim.recordings import pickled_rows
from brim.recordings.pickled_rows import BATCH, Rows, Shared, Table, memo_indices
from brim.units import MIB

MAX_MARKS = 64  # nesting
MAX_STACK = 200_000  # values without a container yet; CPython writes batches of 1,000
BYTES_PER_OBJECT = 24  # of the file, at least, for each object that it builds, ...
SPARE_OBJECTS = 20_000  # ... beyond these
BYTES_PER_MEMO = 8  # of the file, at least, for each value in the memo, beyond the spare ones
MOST_SHARED = 3  # longest tuple of numbers that is shared between its equals
_REFERENCES = re.compile(rb"\]\x94\(((?:j.{4}|h.){1,1000})e", re.DOTALL)  # a memoized list of one batch of them
CHECK_EVERY = 5_000  # instructions between two checks of the limits
WINDOW_BYTES = 8 * MIB  # of the file in memory, ...
AHEAD_BYTES = 64 << 10  # of them at least behind the next instruction: longer than any but a text's
# Bytes read as rows at once, more for a long file: their columns take some five times as much memory.
MOST_ROWS_BYTES = (512 << 10, 2 * MIB)
ROWS_SHARE = 16  # largest part of a file (1 / 16) read as rows at once
LEAST_ROWS_BYTES = 64 << 10  # searched for rows at first, and after a short run
FEW_ROWS = 16  # fewer are read one by one; so many dictionaries precede the next search for rows, ...
MOST_SINGLE = 1_024  # doubled after each vain search, up to this
STOP = ord(".")
FRAME = 0x95
HEADER_BYTES = 9  # a frame's instruction and length
_NAMES = {"c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "\x81": "NEWOBJ", "i": "INST"}
_INDEX = struct.Struct("<I")


class Handler(Protocol):
    """Replaces dictionaries as soon as they are filled, so that they need not be kept."""

    def replace(self, item: dict[Any, Any]) -> Any:
        """Return ``item`` or another value in its place, whose contents then do not count."""

    def replace_many(self, table: Table) -> Any:
        """Return the common replacement of all dictionaries of ``table``, None: call ``replace`` for each."""


def load(source: bytes | BinaryIO, size: int, name: str, handler: Handler | None = None) -> Any:
    """Return the plain value in ``source``, of ``size`` bytes; errors call it ``name``.

    Raises FormatError for anything that is not plain data, damaged, or out of proportion; OSError where ``source``
    cannot be read.
    """
    reader = _Reader(io.BytesIO(source) if isinstance(source, bytes) else source, size, name, handler)
    try:
        return reader.run()
    except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise FormatError(
            f"Cannot read {name} as a pickle of plain data.",
            f"It is damaged or cut off at byte {reader.position()} of {size} ({type(error).__name__}).",
            "Dump it again.",
        ) from error


class _Unframed:
    """The instructions of a pickle without the headers of its frames."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._ahead: int | None = 2  # bytes to the next header: the first follows the protocol. None: no frames
        self._returned = 0  # bytes
        self._headers = array("q")  # positions of the removed headers in the returned bytes

    def read(self, count: int) -> bytes:
        """Return about ``count`` bytes; none at the end."""
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
            self._returned += header - start
            self._headers.append(self._returned)
            start = header + HEADER_BYTES
            self._ahead = int.from_bytes(raw[header + 1 : start], "little")
        pieces.append(raw[start:])
        self._returned += len(raw) - start
        return b"".join(pieces)

    def position(self, index: int) -> int:
        """Return the position in the file of the byte with this index in the returned bytes."""
        return index + HEADER_BYTES * bisect_left(self._headers, index + 1)


class _Reader:
    """A single pass over a file.

    ``data`` is a window of the file, ``at`` the next instruction in it, ``objects`` the number of objects in memory.
    Rows are like dictionaries of one list, which the handler replaces many at a time.
    """

    def __init__(self, source: BinaryIO, size: int, name: str, handler: Handler | None) -> None:
        self.source, self.size, self.name, self.handler = _Unframed(source), size, name, handler
        self.data = b""
        self.window_start = 0  # in the pickle
        self.at = 0
        self.ended = False
        self.objects = 0
        self.limit = size // BYTES_PER_OBJECT + SPARE_OBJECTS
        self.memo_limit = size // BYTES_PER_MEMO + SPARE_OBJECTS
        self.stack: list[Any] = []
        # Stack length and `objects` at each mark, and the memo's index of the value before it (-1: none).
        self.marks: list[tuple[int, int, int]] = []
        self.memo: list[Any] = []
        self.shared = Shared()
        self.row: Any = None  # replacement of the last dictionary
        self.rows_bytes = LEAST_ROWS_BYTES
        self.most_rows_bytes = min(max(size // ROWS_SHARE, MOST_ROWS_BYTES[0]), MOST_ROWS_BYTES[1])
        self.single = 0  # dictionaries to read one by one before the next search for rows
        self.singles = 0  # `single` after the last vain search

    def fill_window(self, wanted: int) -> None:
        """Have ``wanted`` bytes from the next instruction on in the window, if the file has so many."""
        if self.ended or len(self.data) - self.at >= wanted:
            return
        self.data = self.data[self.at :]
        self.window_start += self.at
        self.at = 0
        while len(self.data) < wanted and not self.ended:
            read = self.source.read(max(WINDOW_BYTES, wanted - len(self.data)))
            self.data = self.data + read if self.data else read
            self.ended = not read

    def position(self) -> int:
        """Return the position in the file of the next instruction."""
        return self.source.position(self.window_start + self.at)

    def run(self) -> Any:
        self.fill_window(AHEAD_BYTES)
        while self.follow():
            self.fill_window(AHEAD_BYTES)
            if self.objects > self.limit or len(self.memo) > self.memo_limit:
                self.refuse("its content is far larger than the file")
            if len(self.stack) > MAX_STACK:
                self.refuse("too many of its values are in no container")
        return self.finish()

    def follow(self) -> bool:
        """Follow some instructions, the common ones inline for speed. Return False at the last."""
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
                self.objects += 1
                at = start + length
            elif code == 93 and (match := _REFERENCES.match(data, at)):  # a list of references
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
        """Read rows from the next instruction on, which begins a dictionary. Return False without any."""
        assert self.handler is not None, "only a handler makes rows"
        if self.single > 0:
            self.single -= 1
            return False
        self.fill_window(self.rows_bytes)
        holder = self.stack[self.marks[-1][0] - 1] if self.marks else None
        if type(holder) is not list:
            return False
        end = min(self.at + self.rows_bytes, len(self.data))
        rows_read = pickled_rows.read(self.data, self.at, end, self.row, self.memo, self.shared)
        if (
            rows_read is None
            or rows_read.table.count < FEW_ROWS
            or self.handler.replace_many(rows_read.table) is not self.row
        ):
            self.singles = self.single = min(max(2 * self.singles, FEW_ROWS), MOST_SINGLE)
            self.rows_bytes = LEAST_ROWS_BYTES
            return False
        self.singles = 0
        used = rows_read.end - self.at
        self.rows_bytes = min(max(2 * used, LEAST_ROWS_BYTES), self.most_rows_bytes)
        self.add_rows(rows_read, holder)
        return True

    def add_rows(self, rows: Rows, holder: list[Any]) -> None:
        """Continue behind rows, as if they had been read one by one."""
        row = self.row
        self.memo += rows.memo
        self.objects += rows.table.count
        self.at = rows.end
        if rows.batches:
            start = self.marks[-1][0]
            holder += self.stack[start:]
            holder += [row] * (rows.batches[-1] + 1)
            self.objects += (len(self.stack) - start + rows.batches[-1] + 1) >> 3
            del self.stack[start:]
            self.marks[-1] = (start, self.objects, -1)
        self.stack += [row] * (rows.table.count - 1 - (rows.batches[-1] if rows.batches else -1))

    def finish(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            self.refuse("it ends with values left over")
        return self.stack[0]

    def references(self, start: int, end: int) -> list[Any]:
        """Return the list of the references between two bytes: most of a snapshot is such lists.

        Equal lists are shared, unless they are as long as a batch: their next batches may differ.
        """
        raw = self.data[start:end]
        referred = self.shared.lists.get(raw)
        if referred is None or len(referred) >= BATCH:
            referred = self.shared.lists[raw] = [self.memo[index] for index in memo_indices(raw)]
            self.objects += 2 + (len(referred) >> 3)  # a slot is an eighth of a small object
        return referred

    def refuse(self, why: str) -> NoReturn:
        raise FormatError(f"Cannot read {self.name} as a pickle of plain data.", f"Refused: {why}.")

    def unknown(self) -> NoReturn:
        code = self.data[self.at]
        character = chr(code)
        if character in _NAMES:
            self.refuse(f"at byte {self.position()} it would run code ({_NAMES[character]})")
        self.refuse(f"instruction {bytes([code])!r} at byte {self.position()} does not build plain data")

    def push_new(self, value: Any, length: int) -> None:
        """Push a new object, written in ``length`` bytes."""
        self.stack.append(value)
        self.at += length
        self.objects += 1

    def push(self, value: Any, length: int) -> None:
        """Push a value without memory of its own, written in ``length`` bytes."""
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
        self.marks.append((len(self.stack), self.objects, last if remembered else -1))
        self.at += 1
        if len(self.marks) > MAX_MARKS:
            self.refuse("it is nested too deeply")

    def text(self, width: int) -> None:
        start = self.at + 1 + width
        length = self.count(self.at + 1, width)
        if AHEAD_BYTES // 2 < length <= self.size:
            self.fill_window(1 + width + length + AHEAD_BYTES)
            start = self.at + 1 + width
        raw = self.data[start : start + length]
        if len(raw) != length:
            self.refuse(f"at byte {self.position()} it announces a text of {length} bytes, more than there are")
        text = self.shared.texts.get(raw)
        if text is None:
            self.shared.texts[raw] = text = str(raw, "utf-8", "surrogatepass")
            self.push_new(text, 1 + width + length)
        else:
            self.push(text, 1 + width + length)

    def integer(self, start: int, width: int, *, signed: bool) -> None:
        raw = self.data[start : start + width]
        if len(raw) != width:
            raise IndexError
        self.push_new(int.from_bytes(raw, "little", signed=signed), start + width - self.at)

    def long(self, width: int) -> None:
        length = self.count(self.at + 1, width)
        if length > 16:
            self.refuse(f"at byte {self.position()} it holds a number of {length} bytes")
        self.integer(self.at + 1 + width, length, signed=True)

    def real(self) -> None:
        self.push_new(struct.unpack_from(">d", self.data, self.at + 1)[0], 9)

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])
        self.at += 1

    def put(self, width: int) -> None:
        index = self.count(self.at + 1, width)
        if index > len(self.memo):
            self.refuse(f"at byte {self.position()} it stores a value at {index}, far beyond the last")
        self.memo[index : index + 1] = [self.stack[-1]]
        self.at += 1 + width

    def tuple(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError
        start = len(self.stack) - count
        parts = tuple(self.stack[start:])
        del self.stack[start:]
        plain = count <= MOST_SHARED and all(type(part) is int for part in parts)
        # Events share a few ids of pools.
        shared = self.shared.tuples.setdefault(parts, parts) if plain else parts
        if shared is parts:
            self.push_new(parts, 1)
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
        self.objects += (len(self.stack) - start) >> 3  # a slot is an eighth of a small object
        del self.stack[start:]
        self.at += 1

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.fill([key, value], self.objects, -1)

    def set_items(self) -> None:
        start, objects, place = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        self.fill(values, objects, place)

    def fill(self, values: list[Any], objects: int, place: int) -> None:
        """Fill the last dictionary, which is at ``place`` in the memo (-1: not known)."""
        holder = self.stack[-1]
        if type(holder) is not dict or len(values) % 2:
            self.refuse(f"at byte {self.position()} it sets items of something other than a dictionary")
        holder.update(zip(values[::2], values[1::2], strict=True))
        self.objects += len(values) >> 2
        self.at += 1
        if self.handler is not None:
            replacement = self.handler.replace(holder)
            if replacement is not holder:
                self.stack[-1] = self.row = replacement
                self.objects = objects  # the dictionary's own count stands for its replacement
                if place >= 0:
                    self.memo[place] = replacement  # the memo would keep the dictionary alive

    def frame(self) -> None:
        self.count(self.at + 1, 8)
        self.at += 9


def _steps() -> list[Callable[[_Reader], None] | None]:
    table: list[Callable[[_Reader], None] | None] = [None] * 256
    named: dict[str, Callable[[_Reader], None]] = {
        "\x80": lambda r: r.skip(2),  # PROTO
        "\x95": _Reader.frame,
        "}": lambda r: r.push_new({}, 1),
        "]": lambda r: r.push_new([], 1),
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
