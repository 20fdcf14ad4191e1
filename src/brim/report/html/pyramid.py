"""A long run at several resolutions: which of its events a picture needs.

Each level cuts the run into buckets, even in events and in time, and keeps of each the moments of least and most
allocated bytes, of most reserved bytes, and its last event. So no peak is lost at any zoom, and a picture is true
between bursts of events too. (After M4: Jugel et al., "M4: a visualization-oriented time series data aggregation",
VLDB 2014.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brim.report.held import Numbers


def levels(time_ns: Numbers, allocated: Numbers, reserved: Numbers, buckets: Sequence[int]) -> list[Numbers]:
    """Positions of events, a level for each of ``buckets`` (ascending) that is coarser than the run itself.

    ``allocated`` and ``reserved`` are bytes after each event. A level has at most eight positions per bucket, in
    order; the first moment of the peak is in each.
    """
    chosen: list[Numbers] = []
    positions = np.arange(len(allocated))
    for count in sorted(buckets, reverse=True):
        if 8 * count >= len(positions):
            continue
        inner = _level(time_ns[positions], allocated[positions], reserved[positions], count)
        positions = positions[inner]
        chosen.insert(0, positions)
    return chosen


def _level(time_ns: Numbers, allocated: Numbers, reserved: Numbers, count: int) -> Numbers:
    starts = _bucket_starts(time_ns, count)
    ends = np.append(starts[1:], len(allocated)) - 1
    kept = (_first_of_most(allocated, starts), _first_of_most(-allocated, starts), _first_of_most(reserved, starts))
    return np.unique(np.concatenate([*kept, ends]))


def _bucket_starts(time_ns: Numbers, count: int) -> Numbers:
    """Borders of ``count`` buckets with as many events each, and of ``count`` that take as long each."""
    even = np.linspace(0, len(time_ns), count, endpoint=False).astype(np.int64)
    moments = np.linspace(time_ns[0], time_ns[-1], count, endpoint=False)
    timed = np.searchsorted(time_ns, moments)
    return np.unique(np.concatenate([even, timed]))


def _first_of_most(values: Numbers, starts: Numbers) -> Numbers:
    """In each bucket, the first position of its largest value."""
    lengths = np.diff(np.append(starts, len(values)))
    hits = np.flatnonzero(values == np.repeat(np.maximum.reduceat(values, starts), lengths))
    _, first = np.unique(np.searchsorted(starts, hits, side="right"), return_index=True)
    return hits[first]
