"""The waits of compute, by cause: the same table for profiled devices and for brim's own runs.

A profile and brim's own runs record why compute waited (IDLE events), in gaps or during a COMPUTE event. Other gaps
between COMPUTE events are attributed to a copy in them, else to an allocation, else to an unknown cause.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core import EventKind, Timeline

COPY, ALLOCATION, UNKNOWN, COLLECTIVE = "copy", "allocation", "unknown", "collective"
SHORTEST_S = 1e-6  # of a gap that counts: a shorter one is within the resolution of the clocks
_Numbers = NDArray[Any]
_Part = tuple[str, str, float]  # label, cause, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Compute's waits of the same cause and ``label``: a block, tensor, operation or kernel."""

    label: str
    cause: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True)
class IdleReport:
    """Seconds of computing and waiting. ``waits`` sum to ``idle_s``, the longest first.

    ``computed`` False: the Timeline has neither computing nor waiting, and all figures are 0. ``compute_recorded``
    False: only waiting was recorded, and ``busy_s`` is all other time, whatever was done in it.
    """

    computed: bool
    compute_recorded: bool
    wall_s: float
    busy_s: float
    idle_s: float
    waits: tuple[Wait, ...]

    def by_cause(self) -> dict[str, float]:
        causes: dict[str, float] = {}
        for wait in self.waits:
            causes[wait.cause] = causes.get(wait.cause, 0.0) + wait.seconds
        return causes

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"by_cause": self.by_cause()}


def attribute(timeline: Timeline) -> IdleReport:
    """Attribute compute's idle time to causes. Copies beside computing are no wait.

    Memory: a few times 8 bytes per event.
    """
    kinds = np.asarray(timeline.column("kind"))
    has_waits = bool((kinds == EventKind.IDLE).any())
    computing = _computing(timeline, kinds)
    if not has_waits and not len(computing):
        return IdleReport(computed=False, compute_recorded=False, wall_s=0.0, busy_s=0.0, idle_s=0.0, waits=())
    starts, ends = _spans(timeline, computing)
    idle = np.flatnonzero(kinds == EventKind.IDLE)
    idle_starts, idle_ends = _spans(timeline, idle)
    covered = _spans(timeline, np.concatenate([computing, idle])) if len(starts) else (starts, ends)
    waits = _summed(
        itertools.chain(
            _recorded_waits(timeline, idle), _inferred_waits(timeline, kinds, *covered, has_waits=has_waits)
        )
    )
    idle_s = sum(wait.seconds for wait in waits)
    if len(starts):
        busy_s = _seconds(*covered) - _seconds(idle_starts, idle_ends)
    else:
        busy_s = max(0.0, _recorded_s(timeline) - idle_s)
    return IdleReport(
        computed=True,
        compute_recorded=len(starts) > 0,
        wall_s=busy_s + idle_s,
        busy_s=busy_s,
        idle_s=idle_s,
        waits=waits,
    )


def _seconds(starts: _Numbers, ends: _Numbers) -> float:
    return float(np.sum(ends - starts))


def _computing(timeline: Timeline, kinds: _Numbers) -> _Numbers:
    """Return the indices of computing; collectives only wait for others."""
    categories, names = timeline.texts("category")
    collective = names.index(COLLECTIVE) if COLLECTIVE in names else -1
    return np.flatnonzero((kinds == EventKind.COMPUTE) & (np.asarray(categories) != collective))


def _recorded_s(timeline: Timeline) -> float:
    """Return the seconds from the first event to the end of the last."""
    times = np.asarray(timeline.column("time_s"))
    return float(np.max(times + np.asarray(timeline.column("duration_s"))) - np.min(times))


def _spans(timeline: Timeline, events: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return begins and ends of the sorted disjoint spans of ``events``."""
    begins = np.asarray(timeline.column("time_s"))[events]
    ends = begins + np.asarray(timeline.column("duration_s"))[events]
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.r_[np.ones(min(1, len(begins)), bool), begins[1:] > ends[:-1]])
    return begins[first], ends[np.r_[first[1:] - 1, len(ends) - 1][: len(first)]]


def _summed(parts: Iterable[_Part]) -> tuple[Wait, ...]:
    """Sum waits by label and cause, the longest first."""
    waits: dict[tuple[str, str], tuple[float, int]] = {}
    for label, cause, seconds in parts:
        known_s, count = waits.get((label, cause), (0.0, 0))
        waits[label, cause] = known_s + seconds, count + 1
    rows = [Wait(label=key[0], cause=key[1], seconds=value[0], count=value[1]) for key, value in waits.items()]
    return tuple(sorted(rows, key=lambda wait: (-wait.seconds, wait.label)))


def _recorded_waits(timeline: Timeline, events: _Numbers) -> Iterator[_Part]:
    labels, names = timeline.texts("label")
    causes, seconds = timeline.texts("category")[0], timeline.column("duration_s")
    for index in events:
        yield names[labels[index]], names[causes[index]] or UNKNOWN, seconds[index]


def _inferred_waits(
    timeline: Timeline, kinds: _Numbers, starts: _Numbers, ends: _Numbers, *, has_waits: bool
) -> Iterator[_Part]:
    """Yield waits for the gaps between spans of computing and recorded waiting, cut where copies begin and end.

    A copy that ends after the gap was not waited for. Of the others the last one was, and before it those that
    delayed it.
    """
    copies = np.flatnonzero(kinds == EventKind.COPY)
    times = np.asarray(timeline.column("time_s"))
    stops = times[copies] + np.asarray(timeline.column("duration_s"))[copies]
    order = np.argsort(stops, kind="stable")
    copies, stops = copies[order], stops[order]
    allocations = _Allocations(timeline, kinds)
    names = timeline.texts("label")[1]
    columns = [timeline.texts(name)[0] for name in ("label", "source", "tier")]
    last = np.searchsorted(stops, starts[1:], side="right") - 1
    for begin, end, index in zip(map(float, ends[:-1]), map(float, starts[1:]), map(int, last), strict=True):
        if has_waits and end - begin < SHORTEST_S:
            continue
        at = end
        while index >= 0 and stops[index] > begin and at > begin:
            copy, stop = int(copies[index]), min(float(stops[index]), at)
            start = max(float(times[copy]), begin)
            index -= 1
            if stop <= start:
                continue
            if at > stop:
                yield allocations.between(stop, at)
            yield _copied(copy, names, columns), COPY, stop - start
            at = start
        if at > begin:
            yield allocations.between(begin, at)


def _copied(index: int, names: list[str], columns: list[array[int]]) -> str:
    label, source, tier = (names[column[index]] for column in columns)
    return label or f"{source} to {tier}"


class _Allocations:
    """Allocations by time."""

    def __init__(self, timeline: Timeline, kinds: _Numbers) -> None:
        events = np.flatnonzero(kinds == EventKind.ALLOC)
        times = np.asarray(timeline.column("time_s"))[events]
        order = np.argsort(times, kind="stable")
        self._events, self._times = events[order], times[order]
        self._labels, self._names = timeline.texts("label")

    def between(self, begin: float, end: float) -> _Part:
        """Return the wait of a time without a copy: for an allocation in it, else unknown."""
        index = int(np.searchsorted(self._times, begin))
        if index < len(self._times) and self._times[index] < end:
            return self._names[self._labels[self._events[index]]], ALLOCATION, end - begin
        return "", UNKNOWN, end - begin
