"""The differences between two runs: their peaks, and owners that grew, came or went; or between two profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from brim.core.timeline import EventKind, Timeline
from brim.report.explain import PeakSummary, Share, summary
from brim.units import MIB

MOST_CHANGES = 20  # of one breakdown
MOST_ENTRIES = 8  # of one list
_NAMES = ("name", "kind", "label")  # keys of an entry's name
_NOT_SUMMED = ("start_s", "causes")


@dataclass(frozen=True, kw_only=True)
class Change:
    """Memory of a name at the peaks of both runs. 0 bytes before: new; 0 after: gone."""

    name: str
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int

    @property
    def grown_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of both runs; None: the run lacks it. The name ends with the unit."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two runs at their peaks. Breakdowns are sorted by the size of the change and cut after 20.

    ``figures`` are peaks, counts and fragmentation of both. ``new_stacks`` and ``gone_stacks`` count stacks that the
    other run lacks.
    """

    before: str
    after: str
    figures: tuple[Figure, ...]
    by_category: tuple[Change, ...]
    by_label: tuple[Change, ...]
    by_module: tuple[Change, ...]
    by_stack: tuple[Change, ...]
    by_segment_size: tuple[Change, ...]
    new_stacks: int
    gone_stacks: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diff(
    before: Timeline,
    after: Timeline,
    *,
    before_facts: Mapping[str, float] | None = None,
    after_facts: Mapping[str, float] | None = None,
) -> Difference:
    """Compare two runs of a program. The facts are further numbers to compare, by name (``pinned_bytes``, ...)."""
    left, right = summary(before, most=None), summary(after, most=None)
    stacks = changes(left.by_stack, right.by_stack, most=None)
    facts = dict(before_facts or {}), dict(after_facts or {})
    return Difference(
        before=before.name,
        after=after.name,
        figures=figures(_figures(before, left) | facts[0], _figures(after, right) | facts[1]),
        by_category=changes(left.by_category, right.by_category),
        by_label=changes(left.by_label, right.by_label),
        by_module=changes(left.by_module, right.by_module),
        by_stack=stacks[:MOST_CHANGES],
        by_segment_size=changes(_segments(before), _segments(after)),
        new_stacks=sum(not stack.before_count for stack in stacks),
        gone_stacks=sum(not stack.after_count for stack in stacks),
    )


def changes(
    before: tuple[Share, ...], after: tuple[Share, ...], most: int | None = MOST_CHANGES
) -> tuple[Change, ...]:
    """Return the names whose bytes differ between two breakdowns, the largest change first."""
    left, right = ({share.name: share for share in shares} for shares in (before, after))
    nothing = Share(name="", bytes=0, count=0)
    rows = [(name, left.get(name, nothing), right.get(name, nothing)) for name in {**left, **right}]
    result = [
        Change(
            name=name, before_bytes=old.bytes, after_bytes=new.bytes, before_count=old.count, after_count=new.count
        )
        for name, old, new in rows
        if (old.bytes, old.count) != (new.bytes, new.count)
    ]
    return tuple(sorted(result, key=lambda change: (-abs(change.grown_bytes), change.name))[:most])


def figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Return the numbers of two trees of plain values, side by side.

    Of a list of named entries (kernels, copies, gaps, waits) only the 8 whose time changed most. Lists may have been
    cut, so None only says that an entry is not in the list.
    """
    pairs = _pairs(_flat(before), _flat(after))
    for key in {**before, **after}:
        old, new = _entries(before.get(key)), _entries(after.get(key))
        names = sorted({**old, **new}, key=lambda name: -abs(_time_s(new.get(name)) - _time_s(old.get(name))))
        for name in names[:MOST_ENTRIES]:
            prefix = f"{key}.{name}."
            pairs += _pairs(_flat(old.get(name, {}), prefix), _flat(new.get(name, {}), prefix))
    return tuple(pairs)


def _pairs(before: Iterator[tuple[str, float]], after: Iterator[tuple[str, float]]) -> list[Figure]:
    left, right = dict(before), dict(after)
    return [Figure(name=name, before=left.get(name), after=right.get(name)) for name in {**left, **right}]


def _entries(value: Any) -> dict[str, dict[str, float]]:
    """Return the numbers of a list's entries by name, summed for equal names (gaps)."""
    entries: dict[str, dict[str, float]] = {}
    for entry in value if isinstance(value, (list, tuple)) else ():
        names = [str(entry[key]) for key in _NAMES if key in entry] if isinstance(entry, Mapping) else []
        if not names:
            continue
        name = names[0] + (" unified" if entry.get("unified") else "")
        if "cause" in entry:
            name += f" ({entry['cause']})"
        sums = entries.setdefault(name, {})
        for key, number in _flat({key: value for key, value in entry.items() if key not in _NOT_SUMMED}):
            sums[key] = sums.get(key, 0) + number
    return entries


def _time_s(entry: Mapping[str, float] | None) -> float:
    return 0.0 if entry is None else entry.get("seconds", entry.get("duration_s", 0.0))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def _figures(timeline: Timeline, peak: PeakSummary) -> dict[str, float]:
    kinds = timeline.column("kind")
    unused = peak.reserved_peak_bytes - peak.allocated_bytes
    return {
        "allocated_peak_bytes": peak.allocated_bytes,
        "reserved_peak_bytes": peak.reserved_peak_bytes,
        "unused_at_the_peaks_bytes": unused,
        "unused_at_the_peaks_share": unused / peak.reserved_peak_bytes if peak.reserved_peak_bytes else 0.0,
        "allocations": kinds.count(EventKind.ALLOC),
        "segments_taken": kinds.count(EventKind.SEGMENT_ALLOC),
        "out_of_memory": kinds.count(EventKind.OOM),
    }


def _segments(timeline: Timeline) -> tuple[Share, ...]:
    """Return the segments of the run by size."""
    counts: dict[int, int] = {}
    rows = zip(timeline.column("kind"), timeline.column("bytes"), strict=True)
    for kind, size in rows:
        if kind == EventKind.SEGMENT_ALLOC:
            counts[size] = counts.get(size, 0) + 1
    return tuple(Share(name=f"{size / MIB:g} MiB", bytes=size * count, count=count) for size, count in counts.items())
