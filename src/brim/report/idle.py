"""What compute waited for, and how long: one table for profiled devices and for brim's own runs.

A profile, and brim's own runs, say why compute waited (IDLE events), in gaps or inside of a COMPUTE event that
lasted all the while. The gaps that are left between COMPUTE events are given to what was under way in them: a copy
(the block that it brought), else an allocation, else unknown.
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
SHORTEST_S = 1e-6  # of a gap that counts as waiting: a shorter one is within the resolution of the clocks
_Numbers = NDArray[Any]
_Part = tuple[str, str, float]  # label, cause, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Time that compute spent on waiting for one thing. ``label``: a block, tensor, operation or kernel."""

    label: str
    cause: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True)
class IdleReport:
    """``wall_s`` runs from the first to the last thing done; ``waits`` sum to ``idle_s``, the longest first.

    ``computed`` tells whether the Timeline says when something computed or waited; where not, ``busy_s`` is 0 and
    nothing is known of waiting. ``compute_recorded``: where false, only waiting was recorded, and ``busy_s`` is all
    other time, whatever was done in it.
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
    """Who kept compute waiting. Copies and computing that overlap are nobody's fault.

    Works on columns: a few times 8 bytes for each event, whatever their number.
    """
    kinds = np.asarray(timeline.column("kind"))
    told = bool((kinds == EventKind.IDLE).any())
    computing = _computing(timeline, kinds)
    if not told and not len(computing):
        return IdleReport(computed=False, compute_recorded=False, wall_s=0.0, busy_s=0.0, idle_s=0.0, waits=())
    starts, ends = _spans(timeline, computing)
    idle = np.flatnonzero(kinds == EventKind.IDLE)
    idle_starts, idle_ends = _spans(timeline, idle)
    covered = _spans(timeline, np.concatenate([computing, idle])) if len(starts) else (starts, ends)
    waits = _summed(itertools.chain(_told(timeline, idle), _infer(timeline, kinds, *covered, told=told)))
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
    """The indices of what computed; collectives wait for others."""
    categories, names = timeline.texts("category")
    collective = names.index(COLLECTIVE) if COLLECTIVE in names else -1
    return np.flatnonzero((kinds == EventKind.COMPUTE) & (np.asarray(categories) != collective))


def _recorded_s(timeline: Timeline) -> float:
    """From the first thing that was recorded to the end of the last."""
    times = np.asarray(timeline.column("time_s"))
    return float(np.max(times + np.asarray(timeline.column("duration_s"))) - np.min(times))


def _spans(timeline: Timeline, events: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Begins and ends of the times in which any of ``events`` went on, in order and apart from each other."""
    begins = np.asarray(timeline.column("time_s"))[events]
    ends = begins + np.asarray(timeline.column("duration_s"))[events]
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.r_[np.ones(min(1, len(begins)), bool), begins[1:] > ends[:-1]])
    return begins[first], ends[np.r_[first[1:] - 1, len(ends) - 1][: len(first)]]


def _summed(parts: Iterable[_Part]) -> tuple[Wait, ...]:
    """One row for each thing that was waited for, the longest wait first."""
    waits: dict[tuple[str, str], tuple[float, int]] = {}
    for label, cause, seconds in parts:
        known_s, count = waits.get((label, cause), (0.0, 0))
        waits[label, cause] = known_s + seconds, count + 1
    rows = [Wait(label=key[0], cause=key[1], seconds=value[0], count=value[1]) for key, value in waits.items()]
    return tuple(sorted(rows, key=lambda wait: (-wait.seconds, wait.label)))


def _told(timeline: Timeline, events: _Numbers) -> Iterator[_Part]:
    """The waits that were recorded as such."""
    labels, names = timeline.texts("label")
    causes, seconds = timeline.texts("category")[0], timeline.column("duration_s")
    for index in events:
        yield names[labels[index]], names[causes[index]] or UNKNOWN, seconds[index]


def _infer(timeline: Timeline, kinds: _Numbers, starts: _Numbers, ends: _Numbers, *, told: bool) -> Iterator[_Part]:
    """The gaps between the spans of computing, and of waiting that is ``told``, cut where copies begin and end.

    A copy that ends after compute went on was not waited for. Of the others the last one was, and before it those
    that kept it from beginning.
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
        if told and end - begin < SHORTEST_S:
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
    """When memory was taken, and for what."""

    def __init__(self, timeline: Timeline, kinds: _Numbers) -> None:
        events = np.flatnonzero(kinds == EventKind.ALLOC)
        times = np.asarray(timeline.column("time_s"))[events]
        order = np.argsort(times, kind="stable")
        self._events, self._times = events[order], times[order]
        self._labels, self._names = timeline.texts("label")

    def between(self, begin: float, end: float) -> _Part:
        """Time without a copy: an allocation's if one was made in it."""
        index = int(np.searchsorted(self._times, begin))
        if index < len(self._times) and self._times[index] < end:
            return self._names[self._labels[self._events[index]]], ALLOCATION, end - begin
        return "", UNKNOWN, end - begin
