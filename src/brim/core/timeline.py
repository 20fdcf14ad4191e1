"""A timeline: the ordered memory events of a run, predicted or measured.

Events are stored in columns (``array``), 69 bytes each: five million of them are a third of a gigabyte, where five
million objects would be several.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

from brim.core import codec
from brim.core.hardware import RAM, VRAM
from brim.core.json_stream import JsonStream
from brim.errors import FormatError
from brim.printable import Readable

VERSION = 2
CONTEXT_BYTES = "context_bytes"  # the fact that PeakBytes.process adds: memory outside of the allocator
LONGEST_S = 1e15  # thirty million years: larger values are not times, and sums of smaller ones are finite


class EventKind(IntEnum):
    """The kind of an event. ``COPY``: bytes moved from the tier ``source`` into ``tier``. ``SEGMENT_ALLOC``,
    ``SEGMENT_FREE``: the allocator took memory from the device, or gave it back. ``IDLE``: nothing was computed in
    ``tier``; the label says what it waited for, the category why.
    """

    ALLOC = 0
    FREE = 1
    COPY = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    COMPUTE = 5
    OOM = 6
    IDLE = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event of a Timeline. -1 for a number, ``""`` for a text: not known.

    Attributes:
        kind: The kind of event.
        tier: The tier: ``"vram"``, ``"ram"`` or ``"disk"``.
        bytes: The number of bytes.
        time_s: The start, in seconds since the start of the run.
        duration_s: The duration in seconds.
        address: The address of the memory.
        storage: Number of the storage; the same for its allocation and its release.
        stream: Number of the CUDA stream.
        source: Of a copy: the tier that was read.
        label: A block, a module or an operation.
        category: The ``Category`` of an allocation.
        stack: The allocating frames, a line each, innermost first; in a prediction the module's path.
    """

    kind: EventKind
    tier: str
    bytes: int
    time_s: float = 0.0
    duration_s: float = 0.0
    address: int = -1
    storage: int = -1
    stream: int = 0
    source: str = ""
    label: str = ""
    category: str = ""
    stack: str = ""


_NUMBERS = {
    "kind": "b",
    "bytes": "q",
    "time_s": "d",
    "duration_s": "d",
    "address": "q",
    "storage": "q",
    "stream": "q",
}
_TEXTS = ("tier", "source", "label", "category", "stack")
_CODES = _NUMBERS | dict.fromkeys(_TEXTS, "i")


class Timeline(Readable):
    """The ordered events of a run, predicted or measured. Iterates over ``Event``.

    Attributes:
        name: The name of the run.
        measured: True for a measurement, False for a prediction.
        facts: Numbers of the whole run: ``budget_bytes.ram``, ``peak_rss_bytes``, ...
    """

    _PRINTER, _TITLE = "brim.cli.explain.answers:print_run", "name"

    def __init__(self, name: str, *, measured: bool, facts: dict[str, float] | None = None) -> None:
        self.name, self.measured = name, measured
        self.facts: dict[str, float] = dict(facts or {})
        self._columns: dict[str, array[Any]] = {key: array(code) for key, code in _NUMBERS.items()}
        self._text_columns: dict[str, array[int]] = {key: array("i") for key in _TEXTS}
        self._texts: dict[str, int] = {}  # every distinct text, in order of first use

    def add(
        self,
        kind: EventKind,
        tier: str,
        bytes: int,
        *,
        time_s: float = 0.0,
        duration_s: float = 0.0,
        address: int = -1,
        storage: int = -1,
        stream: int = 0,
        source: str = "",
        label: str = "",
        category: str = "",
        stack: str = "",
    ) -> None:
        """Append an event. Not thread-safe."""
        columns, texts = self._columns, self._texts
        columns["kind"].append(kind)
        columns["bytes"].append(bytes)
        columns["time_s"].append(time_s)
        columns["duration_s"].append(duration_s)
        columns["address"].append(address)
        columns["storage"].append(storage)
        columns["stream"].append(stream)
        for column, text in zip(self._text_columns.values(), (tier, source, label, category, stack), strict=True):
            column.append(texts.setdefault(text, len(texts)))

    def extend(
        self,
        kinds: Sequence[int],
        numbers: Mapping[str, Iterable[Any]],
        texts: Mapping[str, tuple[Sequence[int], Sequence[str]] | memoryview],
    ) -> None:
        """Append many events at once, given as columns of equal length.

        ``texts`` maps a column to indices and the texts that they point to, or to a memoryview of numbers from
        ``numbered``. Missing columns have the defaults of ``add``; memoryviews of the column's type are copied
        directly. Each column is read once, one after the other. Raises ValueError for unequal lengths.
        """
        end = len(self) + len(kinds)
        for key, column in self._columns.items():
            default = -1 if key in ("address", "storage") else 0
            values = kinds if key == "kind" else numbers.get(key)
            if isinstance(values, memoryview):
                column.frombytes(values.cast("B") if len(values) else b"")
            else:
                column.extend(values if values is not None else array(column.typecode, [default]) * len(kinds))
        for key, column in self._text_columns.items():
            column_values = texts.get(key)
            if isinstance(column_values, memoryview):
                column.frombytes(column_values.cast("B") if len(column_values) else b"")
                continue
            indices, names = column_values or (array("i", [0]) * len(kinds), ("",))
            text_numbers = self.numbered(names)
            column.extend(map(text_numbers.__getitem__, indices))
        if any(len(column) != end for column in self._all_columns().values()):
            raise ValueError("Columns of events are of different lengths.")

    def numbered(self, texts: Iterable[str]) -> list[int]:
        """Return the number of each text in this Timeline's columns, and number new texts."""
        return [self._texts.setdefault(text, len(self._texts)) for text in texts]

    def __len__(self) -> int:
        return len(self._columns["kind"])

    def __iter__(self) -> Iterator[Event]:
        names = list(self._texts)
        numbers = zip(*(self._columns[key] for key in _NUMBERS), strict=True)
        texts = zip(*(self._text_columns[key] for key in _TEXTS), strict=True)
        for number, text in zip(numbers, texts, strict=True):
            values = dict(zip(_NUMBERS, number, strict=True)) | {
                key: names[index] for key, index in zip(_TEXTS, text, strict=True)
            }
            yield Event(**values | {"kind": EventKind(values["kind"])})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # mutable while it is being written

    def column(self, name: str) -> array[Any]:
        """Return a numeric column (``bytes``, ``time_s``, ...); do not change it."""
        return self._columns[name]

    def texts(self, name: str) -> tuple[array[int], list[str]]:
        """Return a text column (``tier``, ``source``, ``label``) as indices and the texts that they point to."""
        return self._text_columns[name], list(self._texts)

    @property
    def peak_bytes(self) -> PeakBytes:
        """The peaks ``.allocated``, ``.reserved``, ``.process`` of the compute tier; called with a tier, its peak."""
        return PeakBytes(self)

    @property
    def out_of_memory(self) -> Event | None:
        """The first request that did not fit, else None; its ``label`` names the operation."""
        if EventKind.OOM not in self._columns["kind"]:
            return None
        return next(event for event in self if event.kind is EventKind.OOM)

    def copied_bytes(self, source: str, tier: str) -> int:
        """Return the bytes copied from ``source`` into ``tier``."""
        return sum(e.bytes for e in self if e.kind is EventKind.COPY and e.source == source and e.tier == tier)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with kind and format version."""
        return {
            "kind": "Timeline",
            "version": VERSION,
            "name": self.name,
            "measured": self.measured,
            "facts": dict(self.facts),
            "texts": list(self._texts),
            "columns": {key: column.tolist() for key, column in self._all_columns().items()},
        }

    def _all_columns(self) -> dict[str, array[Any]]:
        return {**self._columns, **self._text_columns}

    @classmethod
    def from_json(cls, document: Any) -> Timeline:
        """Read what ``to_json`` returned. Raises FormatError if kind, version or any key differs."""
        body = codec.from_json(_Document, document, VERSION)
        timeline = cls(body.name, measured=body.measured, facts=dict(body.facts))
        timeline._texts = {text: index for index, text in enumerate(body.texts)}
        columns = _checked_columns(body)
        timeline._columns = {key: columns[key] for key in _NUMBERS}
        timeline._text_columns = {key: columns[key] for key in _TEXTS}
        _check_numbers(timeline)
        return timeline

    @classmethod
    def read(cls, source: str | Path | BinaryIO, name: str = "") -> Timeline:
        """Read a Timeline from a file or a seekable stream; ``name`` is its name in errors.

        Takes the memory of the columns, without that of the text. Raises FormatError for anything else.
        """
        request = f"Cannot read {name or source} as a Timeline."
        stream = JsonStream(Path(source) if isinstance(source, str) else source, request)
        try:
            return cls.from_json(_read_document(stream))
        finally:
            stream.close()


@dataclass(frozen=True)
class PeakBytes:
    """The peaks of a Timeline. Called with a tier (and ``segments=True`` for reserved bytes), the peak there.

    The properties refer to the tier that kernels work in: VRAM if anything was there, else RAM.

    Attributes:
        timeline: The Timeline.
    """

    timeline: Timeline

    @property
    def tier(self) -> str:
        """The tier that the other properties refer to."""
        indices, names = self.timeline.texts("tier")
        return VRAM if VRAM in names and names.index(VRAM) in indices else RAM

    @property
    def allocated(self) -> int:
        """The peak of allocated bytes: ``torch.cuda.max_memory_allocated``."""
        return self(self.tier)

    @property
    def reserved(self) -> int:
        """The peak of reserved bytes: ``torch.cuda.max_memory_reserved``.

        Without recorded segments (a CPU run, a streaming run) it equals ``allocated``.
        """
        return self(self.tier, segments=True) or self.allocated

    @property
    def process(self) -> int:
        """The peak as ``nvidia-smi`` shows it: reserved bytes and the CUDA context (the fact ``context_bytes``)."""
        return self.reserved + int(self.timeline.facts.get(CONTEXT_BYTES, 0))

    def __call__(self, tier: str, *, segments: bool = False) -> int:
        """Return the peak of ``tier``: allocated bytes, or with ``segments`` reserved bytes."""
        up, down = (
            (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE) if segments else (EventKind.ALLOC, EventKind.FREE)
        )
        indices, names = self.timeline.texts("tier")
        tier_index = names.index(tier) if tier in names else -1
        live_bytes = peak = 0
        for kind, count, where in zip(
            self.timeline.column("kind"), self.timeline.column("bytes"), indices, strict=True
        ):
            if where != tier_index:
                continue
            if kind == up:
                live_bytes += count
                peak = max(peak, live_bytes)
            elif kind == down:
                live_bytes -= count
        return peak


@dataclass(frozen=True, kw_only=True)
class _Document:
    """The JSON form of a Timeline, which the codec checks."""

    name: str
    measured: bool
    facts: dict[str, float]
    texts: tuple[str, ...]
    columns: dict[str, Any]


_Document.__name__ = "Timeline"  # what the codec compares with the document's kind


def _read_document(stream: JsonStream) -> dict[str, Any]:
    """Read a Timeline's JSON, its columns into arrays."""
    document: dict[str, Any] = {}
    for key in stream.fields():
        if key == "columns":
            document[key] = {name: _column(name, stream.numbers()) for name in stream.fields()}
        elif key == "texts" and stream.peek() == "[":
            document[key] = list(stream.elements())
        else:
            document[key] = stream.value()
    if stream.peek():
        raise stream.refuse("There is more text after its end.")
    return document


def _column(name: str, batches: Iterable[list[Any]]) -> array[Any]:
    """Join batches of numbers to an array, which stays empty for an unknown column."""
    values: array[Any] = array(_CODES.get(name, "b"))
    allowed_types = {int, float} if values.typecode == "d" else {int}
    for batch in batches:
        if name not in _CODES:
            continue
        if not allowed_types.issuperset(map(type, batch)):
            odd = next(value for value in batch if type(value) not in allowed_types)
            raise FormatError(f"Cannot read the Timeline column {name!r}.", f"Found {str(odd)[:80]!r}.")
        try:
            values.extend(batch)
        except OverflowError as error:
            raise FormatError(f"Cannot read the Timeline column {name!r}.", f"{error}.") from error
    return values


def _checked_columns(body: _Document) -> dict[str, array[Any]]:
    """Return the columns as arrays; ``to_json`` has them as lists."""
    if set(body.columns) != set(_CODES):
        raise FormatError("Cannot read the columns of a Timeline.", f"Found {sorted(body.columns)}.")
    if not all(isinstance(column, list | array) for column in body.columns.values()):
        raise FormatError("Cannot read the columns of a Timeline.", "They are not lists of the same length.")
    columns = {
        key: column if isinstance(column, array) else _column(key, [column]) for key, column in body.columns.items()
    }
    if len({len(column) for column in columns.values()}) != 1:
        raise FormatError("Cannot read the columns of a Timeline.", "They are not lists of the same length.")
    if len(set(body.texts)) != len(body.texts):
        raise FormatError("Cannot read the texts of a Timeline.", "They are not distinct.")
    for key, limit in [*((key, len(body.texts)) for key in _TEXTS), ("kind", len(EventKind))]:
        values = columns[key]
        if values and not (min(values) >= 0 and max(values) < limit):
            odd = next(value for value in values if not 0 <= value < limit)
            raise FormatError(f"Cannot read the Timeline column {key!r}.", f"Found {str(odd)!r}.")
    return columns


def _check_numbers(timeline: Timeline) -> None:
    """Refuse NaN and infinities, which Python's JSON reader accepts."""
    for key in ("time_s", "duration_s"):
        for value in timeline.column(key):
            if not abs(value) <= LONGEST_S:  # so that NaN is refused too
                raise FormatError(f"Cannot read the Timeline column {key!r}.", f"{value} is not a time in seconds.")
    for name, value in timeline.facts.items():
        if not math.isfinite(value):
            raise FormatError(
                f"Cannot read the fact {name[:80]!r} of a Timeline.", f"{value} is not a finite number."
            )
