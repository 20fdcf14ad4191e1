"""The memory in use at a Timeline's peak, by category, label, stack and module.

Events are handled as columns of numbers, not as objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core.timeline import EventKind, Timeline

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
    events, kinds = _changes(timeline)
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
    events, kinds = _changes(timeline)
    until = int(np.searchsorted(events, event, side="right"))
    return _live(timeline, events[:until], kinds[:until])


def _changes(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[Any]]:
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
