"""Reads a run of like dictionaries in a pickle all at once, as columns.

A memory snapshot is millions of small dictionaries of numbers, texts and references, one behind the other in a list.
Following their instructions one at a time costs more than all that is done with them afterwards. Here each step is
taken in all of them together: the next key of every row, then its value. Where a row ends is first guessed (the next
row's first instructions are searched for) and then proved: from a row's beginning its instructions must lead exactly
to the next one's. Rows from the first on for which they do not are left to
``brim.recordings.plain_pickle``, which knows all instructions and tells what is wrong.
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
ROOM = 16  # bytes behind the last row that are looked at together with it
MOST_FIELDS = 32  # of a row
_ROW = b"}\x94("  # a remembered dictionary, whose items follow
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
    """What some rows hold under one key. ``rows`` are their numbers, ascending; None: all rows.

    ``numbers`` are the values themselves, or, where there are ``values``, say which of those. Lists alone are told as
    ``Known.numbered``: from one table to the next what is there has the number that it had.
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
    """Rows that were read. ``end`` is where the bytes behind the last of them begin.

    ``remembered`` is what they put into the memo, ``batches`` the rows behind which a batch of the list ends and the
    next begins.
    """

    table: Table
    end: int
    remembered: list[Any]
    batches: list[int]


@dataclass
class Known:
    """What is shared between rows: texts, pairs of numbers and lists of references, by the bytes that write them.

    ``numbered`` are the lists in the order of their first use, the empty one first, ``numbers`` says which is which.
    """

    texts: dict[bytes, str]
    lists: dict[bytes, list[Any]]
    pairs: dict[tuple[int, ...], tuple[int, ...]]
    numbers: dict[bytes, int] = field(default_factory=lambda: {b"": 0})
    numbered: list[list[Any]] = field(default_factory=lambda: [[]])


def read(data: bytes, begin: int, end: int, row: Any, memo: list[Any], known: Known) -> Rows | None:
    """The rows of which the first begins at ``begin``, and which are all written before ``end``. None: not one.

    ``row`` is what stands for each of them in what is remembered.
    """
    return _Reading(data, begin, end, row, memo, known).rows()


@dataclass
class _Field:
    """The values of one key that some rows have at one place. ``at``: where their instructions begin."""

    rows: Numbers
    key: int  # in the memo
    at: Numbers
    kinds: NDArray[np.int8]


class _Reading:
    def __init__(self, data: bytes, begin: int, end: int, row: Any, memo: list[Any], known: Known) -> None:
        self.data, self.row, self.memo, self.known = data, row, memo, known
        self.bytes = np.frombuffer(data, np.uint8)
        # Eight bytes from each place on, as a number.
        self.words: NDArray[np.uint64] = np.ndarray((max(len(data) - 7, 0),), "<u8", data, strides=(1,))
        starts = self._starts(begin, min(end, len(data) - ROOM))
        self.starts, self.count = starts, max(len(starts) - 1, 0)
        self.fields: list[_Field] = []

    def _starts(self, begin: int, end: int) -> Numbers:
        """Where rows seem to begin: a dictionary behind another's end, or behind the beginning of a batch."""
        if self.data[begin : begin + len(_ROW)] != _ROW:
            return np.zeros(0, np.int64)
        part = self.bytes[begin:end]
        found = np.flatnonzero(part == _ROW[0])
        found = found[found < len(part) - len(_ROW)]
        found = found[(part[found + 1] == _ROW[1]) & (part[found + 2] == _ROW[2])]
        before = part[found - 1]  # of the first it is something else
        starts = found[(before == ord("u")) | (before == ord("("))] + begin
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
        return self._made()

    def _shorten(self, good: NDArray[np.bool_], rows: Numbers | None = None) -> None:
        """Keep the rows before the first that is not good."""
        bad = np.flatnonzero(~good)
        if len(bad):
            self.count = min(self.count, int(bad[0] if rows is None else rows[bad[0]]))

    def _targets(self, at: Numbers, code: NDArray[np.uint8]) -> Numbers:
        """The numbers in references, of which ``code`` are the instructions."""
        found = self.bytes[at + 1].astype(np.int64)
        long_ = np.flatnonzero(code == ord("j"))
        if len(long_):
            found[long_] = (self.words[at[long_] + 1] & _MASKS[4]).view(np.int64)
        return found

    def _follow(self) -> None:
        """Step by step through all rows: note where their values are."""
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
        """How many bytes each value's instructions take; 0 where they are not among those that are known here."""
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

    def _made(self) -> Rows | None:
        """The rows as columns."""
        numbers: list[tuple[_Field, Numbers, Sequence[Any] | None]] = []
        slots = np.ones(self.count, np.int64)  # in the memo, per row: the first is its own
        filled: list[tuple[Numbers, Numbers, NDArray[np.object_]]] = []  # rows, slots, values
        waiting: list[int] = []  # fields with references, which may lead to other rows' values
        for one in self.fields:
            kept = int(np.searchsorted(one.rows, self.count))
            one.rows, one.at, one.kinds = one.rows[:kept], one.at[:kept], one.kinds[:kept]
        for one in self.fields:
            if not len(one.rows):
                continue
            integer = one.kinds == _INTEGER
            if integer.all():
                numbers.append((one, self._integers(one.at), None))
                continue
            if integer.any():  # numbers in some rows and something else in others
                self._shorten(integer == integer[0], one.rows)
            found = np.zeros(len(one.rows), np.int64)
            values: list[Any] = []
            for kind, read_values in ((_TEXT, self._texts), (_LIST, self._lists), (_PAIR, self._pairs)):
                chosen = np.flatnonzero(one.kinds == kind)
                if not len(chosen):
                    continue
                own, known = read_values(one.at[chosen], one.rows[chosen])
                objects = np.fromiter(map(known.__getitem__, own.tolist()), object, len(own))
                filled.append((one.rows[chosen], slots[one.rows[chosen]], objects))
                slots[one.rows[chosen]] += 1
                if len(chosen) == len(found):
                    found, values = own, known
                    break
                distinct, which = _distinct(own)
                found[chosen] = which + len(values)
                values += [known[index] for index in distinct.tolist()]
            chosen = np.flatnonzero(one.kinds == _CONSTANT)
            if len(chosen):
                codes, own = _distinct(self.bytes[one.at[chosen]].astype(np.int64))
                found[chosen] = own + len(values)
                values += [_CONSTANTS[code] for code in codes.tolist()]
            if (one.kinds == _REFERRED).any():
                waiting.append(len(numbers))
            numbers.append((one, found, values))
        if self.count < 1:
            return None
        places = np.cumsum(slots) - slots
        remembered = np.full(int(places[-1] + slots[-1]), self.row, object)
        for rows, slot, objects in filled:
            remembered[places[rows] + slot] = objects
        for index in waiting:
            self._refer(*numbers[index], places, remembered)
        if self.count < 1:
            return None
        columns = self._columns(numbers)
        if columns is None:
            return None
        total = int(places[self.count - 1] + slots[self.count - 1])
        return Rows(
            table=Table(count=self.count, columns=columns),
            end=int(self.starts[self.count]),
            remembered=remembered[:total].tolist(),
            batches=np.flatnonzero(self.batched[: self.count]).tolist(),
        )

    def _columns(self, fields: list[tuple[_Field, Numbers, Sequence[Any] | None]]) -> dict[Any, Column] | None:
        """The fields by key. None if a key comes twice in a row."""
        parts: dict[Any, list[Column]] = {}
        for one, numbers, values in fields:
            kept = int(np.searchsorted(one.rows, self.count))
            if not kept:
                continue
            if one.key >= len(self.memo) or not isinstance(self.memo[one.key], str):
                return None
            column = Column(rows=one.rows[:kept], numbers=numbers[:kept], values=values)
            parts.setdefault(self.memo[one.key], []).append(column)
        columns: dict[Any, Column] = {}
        for name, found in parts.items():
            rows = np.concatenate([one.rows for one in found if one.rows is not None])
            if any((one.values is None) is not (found[0].values is None) for one in found):
                return None
            if all(one.values is found[0].values for one in found):
                numbers, values = np.concatenate([one.numbers for one in found]), found[0].values
            else:
                shifts = np.cumsum([0, *(len(one.values or ()) for one in found)]).tolist()
                numbers = np.concatenate([one.numbers + by for one, by in zip(found, shifts, strict=False)])
                values = [value for one in found for value in one.values or ()]
            if len(found) > 1:
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
        found: Numbers = np.where(long_ | (code == ord("J")), signed, unsigned.view(np.int64))
        return found

    def _texts(self, at: Numbers, rows: Numbers) -> tuple[Numbers, list[Any]]:
        lengths = self.bytes[at + 1].tolist()
        data, known = self.data, self.known.texts
        numbers: dict[bytes, int] = {}
        own = [
            numbers.setdefault(data[start : start + length], len(numbers))
            for start, length in zip((at + 2).tolist(), lengths, strict=True)
        ]
        values = []
        for raw in numbers:
            text = known.get(raw)
            if text is None:
                text = known[raw] = str(raw, "utf-8", "surrogatepass")
            values.append(text)
        return np.array(own, np.int64), values

    def _lists(self, at: Numbers, rows: Numbers) -> tuple[Numbers, list[Any]]:
        """Lists of references: one in a batch, a single one, or none."""
        ends = self.ends[rows]
        last = self.bytes[ends - 1]
        batch = (self.bytes[at + 2] == ord("(")) & (last == ord("e")) & (ends > at + 2)
        empty = ends == at + 2
        begins = at + 2 + batch
        ends = np.where(empty, begins, ends - 1)
        if not batch.all():
            single = (last == ord("a")) & np.isin(ends - begins, (2, 5))
            self._shorten(batch | empty | single, rows)
        data, numbers = self.data, self.known.numbers
        raws = [data[start:end] for start, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        try:
            own = [numbers[raw] for raw in raws]
        except KeyError:
            own = [self._list(raw, row) for raw, row in zip(raws, rows.tolist(), strict=True)]
        return np.array(own, np.int64), self.known.numbered

    def _list(self, raw: bytes, row: int) -> int:
        """The number of a list; 0 for what is none, and ends the rows."""
        known = self.known
        number = known.numbers.get(raw)
        if number is not None or row >= self.count:
            return number or 0
        found = known.lists.get(raw)
        if found is None or len(found) >= BATCH:
            places = [int.from_bytes(one[1:], "little") for one in _REFERENCE.findall(raw)]
            if not _REFERENCES.fullmatch(raw) or max(places) >= len(self.memo):
                self.count = min(self.count, row)
                return 0
            found = [self.memo[place] for place in places]
            if len(found) < BATCH:
                known.lists[raw] = found
        known.numbers[raw] = number = len(known.numbered)
        known.numbered.append(found)
        return number

    def _pairs(self, at: Numbers, rows: Numbers) -> tuple[Numbers, list[Any]]:
        both = self.bytes[at + 1].astype(np.int64) << 8 | self.bytes[at + 3]
        distinct, own = _distinct(both)
        made = [(code >> 8, code & 255) for code in distinct.tolist()]
        return own, [self.known.pairs.setdefault(pair, pair) for pair in made]

    def _refer(
        self, one: _Field, numbers: Numbers, values: Any, places: Numbers, remembered: NDArray[np.object_]
    ) -> None:
        """Fill in what the rows of a field refer to: remembered before, or by a row before theirs."""
        chosen = np.flatnonzero(one.kinds == _REFERRED)
        at = one.at[chosen]
        targets = self._targets(at, self.bytes[at])
        count = len(self.memo)
        self._shorten(targets < count + places[one.rows[chosen]], one.rows[chosen])
        distinct, own = _distinct(targets)
        numbers[chosen] = own + len(values)
        for target in distinct.tolist():
            inside = target - count
            values.append(
                self.memo[target] if inside < 0 else remembered[inside] if inside < len(remembered) else None
            )


_WIDTHS = np.zeros(256, np.int64)
for _code, _width in {"K": 2, "M": 3, "J": 5, "h": 2, "j": 5, "N": 1, "\x88": 1, "\x89": 1}.items():
    _WIDTHS[ord(_code)] = _width


def _distinct(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """The different ones among ``numbers``, ascending, and which of them each is."""
    if not len(numbers):
        return numbers, numbers
    least, most = int(numbers.min()), int(numbers.max())
    if least == most:  # mostly: all rows have the same keys
        return numbers[:1], np.zeros(len(numbers), np.int64)
    if most - least > 4 * len(numbers) + 1_000:
        found, which = np.unique(numbers, return_inverse=True)
        return found, which
    there = np.zeros(most - least + 1, bool)
    there[numbers - least] = True
    return np.flatnonzero(there) + least, (np.cumsum(there) - 1)[numbers - least]
