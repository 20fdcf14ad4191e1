"""A reader of many like dictionaries of a pickle at once, as columns.

A memory snapshot is a list of millions of small dictionaries of numbers, texts and references. Following their
instructions one at a time costs more than everything done with them afterwards. Here each step is taken in all of
them together: the next key of every row, then its value. The ends of rows are first guessed (by the next row's first
instructions) and then proved: a row's instructions must lead exactly to the next row's. Rows from the first failure
on are left to ``brim.recordings.plain_pickle``, which knows all instructions and says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

BATCH = 1_000  # CPython writes longer lists in parts of so many items
ROOM = 16  # bytes behind the last row that are read with it
MOST_FIELDS = 32  # of a row
_ROW = b"}\x94("  # a memoized dictionary, its items next
_REFERENCES = re.compile(rb"(?:j.{4}|h.){1,1000}", re.DOTALL)
_REFERENCE = re.compile(rb"j.{4}|h.", re.DOTALL)
_MASKS = np.array([(1 << 8 * width) - 1 for width in range(8)] + [(1 << 64) - 1], np.uint64)
_INTEGER, _REFERRED, _TEXT, _LIST, _CONSTANT, _PAIR = range(1, 7)
_KINDS = np.zeros(256, np.int8)
for _codes, _kind in (
    (b"KMJ\x8a", _INTEGER),
    (b"hj", _REFERRED),
    (b"\x8c", _TEXT),
    (b"]", _LIST),
    (b"N\x88\x89", _CONSTANT),
):
    _KINDS[list(_codes)] = _kind
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}


@dataclass(frozen=True, kw_only=True)
class Column:
    """The values of one key. ``rows`` are the rows that have it, ascending; None: all.

    ``numbers`` are the values, or indices of ``values``. If all of these are lists, they are ``Shared.numbered``,
    whose indices stay the same from one table to the next.
    """

    rows: Numbers | None
    numbers: Numbers
    values: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """``count`` dictionaries as columns, by key."""

    count: int
    columns: dict[Any, Column]


@dataclass(kw_only=True)
class Rows:
    """Rows read, up to the byte ``end``.

    ``memo`` are their values for the memo, ``batches`` the rows behind which a batch of the list ends.
    """

    table: Table
    end: int
    memo: list[Any]
    batches: list[int]


@dataclass
class Shared:
    """Values shared between rows: texts, pairs of numbers and lists of references, by their bytes in the pickle.

    ``numbered`` are the lists in the order of their first use, the empty one first, ``numbers`` their indices.
    """

    texts: dict[bytes, str] = field(default_factory=dict)
    lists: dict[bytes, list[Any]] = field(default_factory=dict)
    tuples: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[bytes, int] = field(default_factory=lambda: {b"": 0})
    numbered: list[list[Any]] = field(default_factory=lambda: [[]])


def memo_indices(raw: bytes) -> list[int]:
    """Return the memo indices of references, one behind the other."""
    return [int.from_bytes(reference[1:], "little") for reference in _REFERENCE.findall(raw)]


def read(data: bytes, begin: int, end: int, row: Any, memo: list[Any], shared: Shared) -> Rows | None:
    """Return the rows from ``begin`` on that end before ``end``; None without any.

    ``row`` is their replacement in the memo.
    """
    return _Reading(data, begin, end, row, memo, shared).rows()


@dataclass
class _Field:
    """The values of one key at one place in some rows. ``at``: the positions of their instructions."""

    rows: Numbers
    key: int  # in the memo
    at: Numbers
    kinds: NDArray[np.int8]


class _Reading:
    def __init__(self, data: bytes, begin: int, end: int, row: Any, memo: list[Any], shared: Shared) -> None:
        self.data, self.row, self.memo, self.shared = data, row, memo, shared
        self.bytes = np.frombuffer(data, np.uint8)
        # The eight bytes from each position on as a number.
        self.words: NDArray[np.uint64] = np.ndarray((max(len(data) - 7, 0),), "<u8", data, strides=(1,))
        starts = self._starts(begin, min(end, len(data) - ROOM))
        self.starts, self.count = starts, max(len(starts) - 1, 0)
        self.fields: list[_Field] = []

    def _starts(self, begin: int, end: int) -> Numbers:
        """Return the likely beginnings of rows: a dictionary behind another's end or a batch's beginning."""
        if self.data[begin : begin + len(_ROW)] != _ROW:
            return np.zeros(0, np.int64)
        part = self.bytes[begin:end]
        starts = np.flatnonzero(part == _ROW[0])
        starts = starts[starts < len(part) - len(_ROW)]
        starts = starts[(part[starts + 1] == _ROW[1]) & (part[starts + 2] == _ROW[2])]
        before = part[starts - 1]  # for the first, another byte
        starts = starts[(before == ord("u")) | (before == ord("("))] + begin
        return starts if len(starts) and starts[0] == begin else np.concatenate([np.array([begin]), starts])

    def rows(self) -> Rows | None:
        if self.count < 1:
            return None
        after = self.starts[1:]
        self.batched = self.bytes[after - 1] == ord("(")
        self.ends = after - np.where(self.batched, 3, 1)  # the instruction that fills the dictionary
        self._shorten(~self.batched | (self.bytes[after - 2] == ord("e")))
        self._shorten(self.bytes[self.ends[: self.count]] == ord("u"))
        self._follow()
        if self.count < 1:
            return None
        return self._to_rows()

    def _shorten(self, good: NDArray[np.bool_], rows: Numbers | None = None) -> None:
        """Keep the rows before the first that is not good."""
        bad = np.flatnonzero(~good)
        if len(bad):
            self.count = min(self.count, int(bad[0] if rows is None else rows[bad[0]]))

    def _targets(self, at: Numbers, code: NDArray[np.uint8]) -> Numbers:
        """Return the memo indices of references with the instructions ``code``."""
        targets = self.bytes[at + 1].astype(np.int64)
        long_ = np.flatnonzero(code == ord("j"))
        if len(long_):
            targets[long_] = (self.words[at[long_] + 1] & _MASKS[4]).view(np.int64)
        return targets

    def _follow(self) -> None:
        """Go through all rows together, key by key, and note the positions of their values."""
        rows = np.arange(self.count)
        at = self.starts[: self.count] + len(_ROW)
        for _ in range(MOST_FIELDS):
            rows, at = rows[: np.searchsorted(rows, self.count)], at[: np.searchsorted(rows, self.count)]
            open_ = at < self.ends[rows]
            if not open_.all():
                self._shorten(at <= self.ends[rows], rows)
                rows, at = rows[open_], at[open_]
            if not len(rows):
                return
            code = self.bytes[at]
            self._shorten(_KINDS[code] == _REFERRED, rows)
            keys = self._targets(at, code)
            at = at + _WIDTHS[code]
            code = self.bytes[at]
            kinds = _KINDS[code]
            pair = (code == ord("K")) & (self.bytes[at + 2] == ord("K"))
            if pair.any():
                kinds[pair] = np.where((self.bytes[at + 4] == 0x86) & (self.bytes[at + 5] == 0x94), _PAIR, 0)[pair]
            distinct, which = _distinct(keys)
            for index, key in enumerate(distinct.tolist()):
                own = slice(None) if len(distinct) == 1 else np.flatnonzero(which == index)
                self.fields.append(_Field(rows[own], key, at[own], kinds[own]))
            width = self._widths(code, at, kinds, rows)
            self._shorten((kinds > 0) & (width > 0), rows)
            at = at + width
        self._shorten(np.zeros(len(rows), bool), rows)

    def _widths(self, code: NDArray[np.uint8], at: Numbers, kinds: NDArray[np.int8], rows: Numbers) -> Numbers:
        """Return the bytes of each value's instructions; 0 if they are not known here."""
        length = self.bytes[at + 1].astype(np.int64)
        width = _WIDTHS[code]
        number = code == 0x8A
        if number.any():
            width = np.where(number, np.where((length > 0) & (length <= 8), 2 + length, 0), width)
        if (kinds == _PAIR).any():
            width = np.where(kinds == _PAIR, 6, width)
        if (text := kinds == _TEXT).any():
            end = np.minimum(at + 2 + length, self.ends[rows])
            width = np.where(text, np.where(self.bytes[end] == 0x94, 3 + length, 0), width)
        if (list_ := kinds == _LIST).any():  # it is the row's last value
            width = np.where(list_, np.where(self.bytes[at + 1] == 0x94, self.ends[rows] - at, 0), width)
        return width

    def _to_rows(self) -> Rows | None:
        """Return the rows as columns."""
        numbers: list[tuple[_Field, Numbers, Sequence[Any] | None]] = []
        slots = np.ones(self.count, np.int64)  # of each row in the memo; the first is its own
        filled: list[tuple[Numbers, Numbers, NDArray[np.object_]]] = []  # rows, slots, values
        waiting: list[int] = []  # fields with references, perhaps to values of other rows
        for part in self.fields:
            count = int(np.searchsorted(part.rows, self.count))
            part.rows, part.at, part.kinds = part.rows[:count], part.at[:count], part.kinds[:count]
        for part in self.fields:
            if not len(part.rows):
                continue
            integer = part.kinds == _INTEGER
            if integer.all():
                numbers.append((part, self._integers(part.at), None))
                continue
            if integer.any():  # numbers in some rows and something else in others
                self._shorten(integer == integer[0], part.rows)
            indices = np.zeros(len(part.rows), np.int64)
            values: list[Any] = []
            for kind, read_values in ((_TEXT, self._texts), (_LIST, self._lists), (_PAIR, self._pairs)):
                chosen = np.flatnonzero(part.kinds == kind)
                if not len(chosen):
                    continue
                own, known = read_values(part.at[chosen], part.rows[chosen])
                objects = np.fromiter(map(known.__getitem__, own.tolist()), object, len(own))
                filled.append((part.rows[chosen], slots[part.rows[chosen]], objects))
                slots[part.rows[chosen]] += 1
                if len(chosen) == len(indices):
                    indices, values = own, known
                    break
                distinct, which = _distinct(own)
                indices[chosen] = which + len(values)
                values += [known[index] for index in distinct.tolist()]
            chosen = np.flatnonzero(part.kinds == _CONSTANT)
            if len(chosen):
                codes, own = _distinct(self.bytes[part.at[chosen]].astype(np.int64))
                indices[chosen] = own + len(values)
                values += [_CONSTANTS[code] for code in codes.tolist()]
            if (part.kinds == _REFERRED).any():
                waiting.append(len(numbers))
            numbers.append((part, indices, values))
        if self.count < 1:
            return None
        places = np.cumsum(slots) - slots
        memo = np.full(int(places[-1] + slots[-1]), self.row, object)
        for rows, slot, objects in filled:
            memo[places[rows] + slot] = objects
        for index in waiting:
            self._resolve(*numbers[index], places, memo)
        if self.count < 1:
            return None
        columns = self._columns(numbers)
        if columns is None:
            return None
        total = int(places[self.count - 1] + slots[self.count - 1])
        return Rows(
            table=Table(count=self.count, columns=columns),
            end=int(self.starts[self.count]),
            memo=memo[:total].tolist(),
            batches=np.flatnonzero(self.batched[: self.count]).tolist(),
        )

    def _columns(self, fields: list[tuple[_Field, Numbers, Sequence[Any] | None]]) -> dict[Any, Column] | None:
        """Return the fields by key; None if a row has a key twice."""
        parts: dict[Any, list[Column]] = {}
        for part, numbers, values in fields:
            count = int(np.searchsorted(part.rows, self.count))
            if not count:
                continue
            if part.key >= len(self.memo) or not isinstance(self.memo[part.key], str):
                return None
            column = Column(rows=part.rows[:count], numbers=numbers[:count], values=values)
            parts.setdefault(self.memo[part.key], []).append(column)
        columns: dict[Any, Column] = {}
        for name, same_key in parts.items():
            rows = np.concatenate([column.rows for column in same_key if column.rows is not None])
            if any((column.values is None) is not (same_key[0].values is None) for column in same_key):
                return None
            if all(column.values is same_key[0].values for column in same_key):
                numbers, values = np.concatenate([column.numbers for column in same_key]), same_key[0].values
            else:
                shifts = np.cumsum([0, *(len(column.values or ()) for column in same_key)]).tolist()
                numbers = np.concatenate([column.numbers + by for column, by in zip(same_key, shifts, strict=False)])
                values = [value for column in same_key for value in column.values or ()]
            if len(same_key) > 1:
                order = np.argsort(rows, kind="stable")
                rows, numbers = rows[order], numbers[order]
                if (np.diff(rows) == 0).any():
                    return None
            columns[name] = Column(rows=None if len(rows) == self.count else rows, numbers=numbers, values=values)
        return columns

    def _integers(self, at: Numbers) -> Numbers:
        code = self.bytes[at]
        long_ = code == 0x8A
        width = np.where(long_, self.bytes[at + 1], _WIDTHS[code] - 1).astype(np.int64)
        unsigned = self.words[at + 1 + long_] & _MASKS[width]
        shift = (64 - 8 * width).astype(np.int64)
        signed = (unsigned.view(np.int64) << shift) >> shift
        integers: Numbers = np.where(long_ | (code == ord("J")), signed, unsigned.view(np.int64))
        return integers

    def _texts(self, at: Numbers, rows: Numbers) -> tuple[Numbers, list[Any]]:
        lengths = self.bytes[at + 1].tolist()
        data, texts = self.data, self.shared.texts
        numbers: dict[bytes, int] = {}
        own = [
            numbers.setdefault(data[start : start + length], len(numbers))
            for start, length in zip((at + 2).tolist(), lengths, strict=True)
        ]
        values = []
        for raw in numbers:
            text = texts.get(raw)
            if text is None:
                text = texts[raw] = str(raw, "utf-8", "surrogatepass")
            values.append(text)
        return np.array(own, np.int64), values

    def _lists(self, at: Numbers, rows: Numbers) -> tuple[Numbers, list[Any]]:
        """Return lists of references: a batch, a single one, or an empty list."""
        ends = self.ends[rows]
        last = self.bytes[ends - 1]
        batch = (self.bytes[at + 2] == ord("(")) & (last == ord("e")) & (ends > at + 2)
        empty = ends == at + 2
        begins = at + 2 + batch
        ends = np.where(empty, begins, ends - 1)
        if not batch.all():
            single = (last == ord("a")) & np.isin(ends - begins, (2, 5))
            self._shorten(batch | empty | single, rows)
        data, numbers = self.data, self.shared.numbers
        raws = [data[start:end] for start, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        try:
            own = [numbers[raw] for raw in raws]
        except KeyError:
            own = [self._list(raw, row) for raw, row in zip(raws, rows.tolist(), strict=True)]
        return np.array(own, np.int64), self.shared.numbered

    def _list(self, raw: bytes, row: int) -> int:
        """Return a list's number; 0 for bytes that are no list, which end the rows."""
        shared = self.shared
        number = shared.numbers.get(raw)
        if number is not None or row >= self.count:
            return number or 0
        items = shared.lists.get(raw)
        if items is None or len(items) >= BATCH:
            places = memo_indices(raw)
            if not _REFERENCES.fullmatch(raw) or max(places) >= len(self.memo):
                self.count = min(self.count, row)
                return 0
            items = [self.memo[place] for place in places]
            if len(items) < BATCH:
                shared.lists[raw] = items
        shared.numbers[raw] = number = len(shared.numbered)
        shared.numbered.append(items)
        return number

    def _pairs(self, at: Numbers, rows: Numbers) -> tuple[Numbers, list[Any]]:
        both = self.bytes[at + 1].astype(np.int64) << 8 | self.bytes[at + 3]
        distinct, own = _distinct(both)
        pairs = [(code >> 8, code & 255) for code in distinct.tolist()]
        return own, [self.shared.tuples.setdefault(pair, pair) for pair in pairs]

    def _resolve(
        self, part: _Field, numbers: Numbers, values: Any, places: Numbers, memo: NDArray[np.object_]
    ) -> None:
        """Fill in the references of a field, to values of the memo or of earlier rows."""
        chosen = np.flatnonzero(part.kinds == _REFERRED)
        at = part.at[chosen]
        targets = self._targets(at, self.bytes[at])
        count = len(self.memo)
        self._shorten(targets < count + places[part.rows[chosen]], part.rows[chosen])
        distinct, own = _distinct(targets)
        numbers[chosen] = own + len(values)
        for target in distinct.tolist():
            inside = target - count
            values.append(self.memo[target] if inside < 0 else memo[inside] if inside < len(memo) else None)


_WIDTHS = np.zeros(256, np.int64)
for _code, _width in {"K": 2, "M": 3, "J": 5, "h": 2, "j": 5, "N": 1, "\x88": 1, "\x89": 1}.items():
    _WIDTHS[ord(_code)] = _width


def _distinct(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the distinct ``numbers``, ascending, and each number's index among them."""
    if not len(numbers):
        return numbers, numbers
    least, most = int(numbers.min()), int(numbers.max())
    if least == most:  # mostly: all rows have the same keys
        return numbers[:1], np.zeros(len(numbers), np.int64)
    if most - least > 4 * len(numbers) + 1_000:
        distinct, which = np.unique(numbers, return_inverse=True)
        return distinct, which
    there = np.zeros(most - least + 1, bool)
    there[numbers - least] = True
    return np.flatnonzero(there) + least, (np.cumsum(there) - 1)[numbers - least]
