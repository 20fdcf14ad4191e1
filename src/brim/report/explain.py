"""The memory in use at a Timeline's peak, by category, label, stack and module, and the differences of two runs.

Events are handled as columns of numbers, not as objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core.timeline import EventKind, Timeline
from brim.units import MIB

MOST_ROWS = 20  # of one breakdown
_MEMORY = (EventKind.ALLOC, EventKind.FREE, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Bytes and number of the blocks with a common name."""

    name: str
    bytes: int
    count: int


@dataclass(frozen=True, kw_only=True)
class PeakSummary:
    """The peak of allocated memory in ``tier``.

    Each breakdown sums to ``allocated_bytes`` unless it is cut, or memory without a recorded allocation was freed.
    ``reserved_bytes`` is the allocator's memory at that event, ``reserved_peak_bytes`` its maximum (both equal
    ``allocated_bytes`` without recorded segments). ``event`` is the index of the event, -1: nothing was allocated.
    """

    tier: str
    event: int
    time_s: float
    allocated_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    by_category: tuple[Share, ...]
    by_label: tuple[Share, ...]
    by_stack: tuple[Share, ...]
    by_module: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class LiveBlocks:
    """The allocations in use at an event, as ``rows`` of a Timeline."""

    event: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    rows: NDArray[np.int64]


def summary(timeline: Timeline, *, most: int | None = MOST_ROWS) -> PeakSummary:
    """Return the peak of the compute tier. ``most`` limits each breakdown; None: everything."""
    at_peak = live_at_peak(timeline)
    return PeakSummary(
        tier=timeline.peak_bytes.tier,
        event=at_peak.event,
        time_s=timeline.column("time_s")[at_peak.event] if at_peak.event >= 0 else 0.0,
        allocated_bytes=at_peak.allocated_bytes,
        reserved_bytes=at_peak.reserved_bytes,
        reserved_peak_bytes=at_peak.reserved_peak_bytes,
        by_category=_shares(timeline, "category", at_peak.rows, most),
        by_label=_shares(timeline, "label", at_peak.rows, most),
        by_stack=_shares(timeline, "stack", at_peak.rows, most),
        by_module=_shares(timeline, "stack", at_peak.rows, most, _module_of),
    )


def live_at_peak(timeline: Timeline) -> LiveBlocks:
    """Return the allocations in use at the peak of the compute tier."""
    events, kinds = _memory_events(timeline)
    sizes = np.asarray(timeline.column("bytes"))[events]
    # Floating-point sums are exact up to 9 PB, and do not overflow beyond.
    used = _running(sizes, kinds, EventKind.ALLOC, EventKind.FREE)
    reserved = _running(sizes, kinds, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)
    allocations = np.flatnonzero(kinds == EventKind.ALLOC)
    at = int(allocations[np.argmax(used[allocations])]) if len(allocations) else -1
    if at < 0 or used[at] <= 0:
        at = -1
    peak = int(used[at]) if at >= 0 else 0
    segments = bool((kinds >= EventKind.SEGMENT_ALLOC).any())
    return LiveBlocks(
        event=int(events[at]) if at >= 0 else -1,
        allocated_bytes=peak,
        reserved_bytes=int(reserved[at] if at >= 0 else 0) if segments else peak,
        reserved_peak_bytes=int(reserved.max(initial=0)) if segments else peak,
        rows=_live(timeline, events[: at + 1], kinds[: at + 1]),
    )


def live_rows(timeline: Timeline, event: int) -> NDArray[np.int64]:
    """Return the allocations in use in the compute tier at ``event``, as rows of ``timeline``."""
    events, kinds = _memory_events(timeline)
    until = int(np.searchsorted(events, event, side="right"))
    return _live(timeline, events[:until], kinds[:until])


def _memory_events(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return index and kind of the memory events of the compute tier."""
    tiers, names = timeline.texts("tier")
    tier = timeline.peak_bytes.tier
    tier_index = names.index(tier) if tier in names else -1
    kinds = np.asarray(timeline.column("kind"))
    events = np.flatnonzero((np.asarray(tiers) == tier_index) & np.isin(kinds, _MEMORY))
    return events, kinds[events]


def _running(sizes: NDArray[Any], kinds: NDArray[Any], up: EventKind, down: EventKind) -> NDArray[np.float64]:
    """Return the bytes after each event."""
    signs = (kinds == up).astype(np.int8) - (kinds == down).astype(np.int8)
    return np.cumsum(sizes * signs.astype(np.float64))


def _live(timeline: Timeline, events: NDArray[np.int64], kinds: NDArray[Any]) -> NDArray[np.int64]:
    """Return the allocations among ``events`` that none of them frees.

    A block is identified by its storage, else by its address. An event without both belongs to no other.
    """
    block = kinds <= EventKind.FREE
    events, kinds = events[block], kinds[block]
    storages = np.asarray(timeline.column("storage"))[events]
    addresses = np.asarray(timeline.column("address"))[events]
    identified = (storages >= 0) | (addresses >= 0)
    loose = events[~identified & (kinds == EventKind.ALLOC)]
    keys = np.where(storages >= 0, storages, ~addresses)[identified][::-1]
    _, last = np.unique(keys, return_index=True)  # the first from behind: each block's last event
    latest = np.flatnonzero(identified)[::-1][last]
    return np.sort(np.concatenate([loose, events[latest][kinds[latest] == EventKind.ALLOC]]))


def _shares(
    timeline: Timeline,
    column: str,
    rows: NDArray[np.int64],
    most: int | None,
    rename: Callable[[str], str] | None = None,
) -> tuple[Share, ...]:
    """Return the rows' bytes by their text in a column, the largest first."""
    indices, names = timeline.texts(column)
    labels, number = np.unique(np.asarray(indices)[rows], return_inverse=True)
    sums = np.bincount(number, weights=np.asarray(timeline.column("bytes"))[rows], minlength=len(labels))
    counts = np.bincount(number, minlength=len(labels))
    totals: dict[str, tuple[int, int]] = {}
    for index, size, count in zip(labels.tolist(), sums.tolist(), counts.tolist(), strict=True):
        name = rename(names[index]) if rename else names[index]
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + int(size), before[1] + count
    shares = (Share(name=name, bytes=size, count=count) for name, (size, count) in totals.items())
    return tuple(sorted(shares, key=lambda share: (-share.bytes, share.name))[:most])


def _module_of(stack: str) -> str:
    """Return the module path of a prediction's stack; of recorded frames the innermost ``forward``."""
    if "\n" not in stack and " " not in stack:
        return stack
    return next((frame for frame in stack.split("\n") if frame.startswith("forward at ")), "")


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
