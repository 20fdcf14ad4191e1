"""What a Timeline held at its peak, broken down by category, site, stack and module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from brim.core.timeline import EventKind, Timeline

MOST_ROWS = 20  # of one breakdown


@dataclass(frozen=True, kw_only=True)
class Share:
    """What has one name in common: its bytes and how many blocks they are."""

    name: str
    bytes: int
    count: int


@dataclass(frozen=True, kw_only=True)
class PeakSummary:
    """The moment at which most was allocated in ``tier``. Each breakdown sums to ``allocated_bytes`` unless
    it is cut, or memory was freed of which no event says where it was allocated.

    ``reserved_bytes`` is what the allocator held then, ``reserved_peak_bytes`` the most that it ever held (both equal
    what was allocated where no segments were recorded). ``event`` is the index of the event, -1: nothing was held.
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
class Held:
    """What was in use at one moment: rows of a Timeline, by index."""

    event: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    rows: tuple[int, ...]


def summary(timeline: Timeline, *, most: int | None = MOST_ROWS) -> PeakSummary:
    """The peak of the tier that kernels work in. ``most`` limits each breakdown; None: everything."""
    held = held_at_peak(timeline)
    sizes = timeline.column("bytes")
    return PeakSummary(
        tier=timeline.peak_bytes.tier,
        event=held.event,
        time_s=timeline.column("time_s")[held.event] if held.event >= 0 else 0.0,
        allocated_bytes=held.allocated_bytes,
        reserved_bytes=held.reserved_bytes,
        reserved_peak_bytes=held.reserved_peak_bytes,
        by_category=_ranked(_by(timeline, "category", held.rows), sizes, most),
        by_label=_ranked(_by(timeline, "label", held.rows), sizes, most),
        by_stack=_ranked(_by(timeline, "stack", held.rows), sizes, most),
        by_module=_ranked(_by(timeline, "stack", held.rows, _module_of), sizes, most),
    )


def held_at_peak(timeline: Timeline) -> Held:
    """What was in use when most was, in the tier that kernels work in."""
    peak, event, reserved, most_reserved, segments = _peak(timeline)
    live: dict[int | tuple[str, int], int] = {}
    if event >= 0:
        for index, kind, key in _changes(timeline):
            if index > event:
                break
            if kind == EventKind.ALLOC:
                live[("loose", index) if key is None else key] = index
            elif kind == EventKind.FREE and key is not None:
                live.pop(key, None)
    return Held(
        event=event,
        allocated_bytes=peak,
        reserved_bytes=reserved if segments else peak,
        reserved_peak_bytes=most_reserved if segments else peak,
        rows=tuple(live.values()),
    )


def _peak(timeline: Timeline) -> tuple[int, int, int, int, bool]:
    """Bytes and index of the peak, reserved then and at most, and whether segments were recorded."""
    sizes = timeline.column("bytes")
    used = peak = reserved = reserved_then = most_reserved = 0
    event, segments = -1, False
    for index, kind, _ in _changes(timeline):
        size = sizes[index]
        if kind == EventKind.ALLOC:
            used += size
            if used > peak:
                peak, event, reserved_then = used, index, reserved
        elif kind == EventKind.FREE:
            used -= size
        else:
            segments = True
            reserved += size if kind == EventKind.SEGMENT_ALLOC else -size
            most_reserved = max(most_reserved, reserved)
    return peak, event, reserved_then, most_reserved, segments


def _changes(timeline: Timeline) -> Iterator[tuple[int, int, int | None]]:
    """Index, kind and key of the events that change what the compute tier holds.

    A key names a block; None: neither its storage nor its address is known, so no event belongs to another.
    """
    tiers, names = timeline.texts("tier")
    tier = timeline.peak_bytes.tier
    wanted = names.index(tier) if tier in names else -1
    kinds = (EventKind.ALLOC, EventKind.FREE, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)
    numbers = frozenset(int(kind) for kind in kinds)
    columns = (timeline.column(name) for name in ("kind", "storage", "address"))
    for index, (kind, storage, address, where) in enumerate(zip(*columns, tiers, strict=True)):
        if where == wanted and kind in numbers:
            yield index, kind, storage if storage >= 0 else ~address if address >= 0 else None


def _by(
    timeline: Timeline, column: str, rows: tuple[int, ...], rename: Callable[[str], str] | None = None
) -> dict[str, list[int]]:
    """The rows by the text that they have in a column."""
    indices, names = timeline.texts(column)
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(indices[row], []).append(row)
    made: dict[str, list[int]] = {}
    for number, own in found.items():
        made.setdefault(rename(names[number]) if rename else names[number], []).extend(own)
    return made


def _module_of(stack: str) -> str:
    """A prediction's stack is the module path; of recorded frames the innermost ``forward`` is the module."""
    if "\n" not in stack and " " not in stack:
        return stack
    return next((frame for frame in stack.split("\n") if frame.startswith("forward at ")), "")


def _ranked(rows: dict[str, list[int]], sizes: Any, most: int | None) -> tuple[Share, ...]:
    shares = (Share(name=name, bytes=sum(sizes[row] for row in own), count=len(own)) for name, own in rows.items())
    return tuple(sorted(shares, key=lambda share: (-share.bytes, share.name))[:most])
