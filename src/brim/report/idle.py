"""What compute waited for, and how long: one table for profiled devices and for brim's own runs.

A profile says why each gap was (its IDLE events). Where there are none, the gaps between COMPUTE events are given to
what was under way in them: a copy (the block that it brought), else an allocation, else unknown.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from brim.core import Event, EventKind, Timeline

COPY, ALLOCATION, UNKNOWN, COLLECTIVE = "copy", "allocation", "unknown", "collective"


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

    ``computed`` tells whether the Timeline says when something computed; where not, ``busy_s`` is 0 and nothing is
    known of waiting.
    """

    computed: bool
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
    """Who kept compute waiting. Copies and computing that overlap are nobody's fault."""
    told = EventKind.IDLE in timeline.column("kind")
    spans: list[tuple[float, float]] = []
    awaited: list[Event] = []
    parts: list[tuple[str, str, float]] = []
    begin_s, end_s = math.inf, -math.inf
    for event in timeline:
        if event.kind is EventKind.COMPUTE and event.category != COLLECTIVE:
            spans.append((event.time_s, event.time_s + event.duration_s))
        elif event.kind is EventKind.IDLE:
            parts.append((event.label, event.category or UNKNOWN, event.duration_s))
        elif not told and event.kind in (EventKind.COPY, EventKind.ALLOC):
            awaited.append(event)
        begin_s, end_s = min(begin_s, event.time_s), max(end_s, event.time_s + event.duration_s)
    if not spans and not told:
        return IdleReport(computed=False, wall_s=0.0, busy_s=0.0, idle_s=0.0, waits=())
    busy = _union(spans)
    if not told:
        parts = list(_infer(busy, awaited))
    idle_s = sum(seconds for _, _, seconds in parts)
    # Where only waiting was recorded, the rest of the time is computing.
    busy_s = sum(end - begin for begin, end in busy) if spans else max(0.0, end_s - begin_s - idle_s)
    return IdleReport(computed=True, wall_s=busy_s + idle_s, busy_s=busy_s, idle_s=idle_s, waits=_summed(parts))


def _summed(parts: list[tuple[str, str, float]]) -> tuple[Wait, ...]:
    """One row for each thing that was waited for, the longest wait first."""
    waits: dict[tuple[str, str], tuple[float, int]] = {}
    for label, cause, seconds in parts:
        known_s, count = waits.get((label, cause), (0.0, 0))
        waits[label, cause] = known_s + seconds, count + 1
    rows = [Wait(label=key[0], cause=key[1], seconds=value[0], count=value[1]) for key, value in waits.items()]
    return tuple(sorted(rows, key=lambda wait: (-wait.seconds, wait.label)))


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _infer(busy: list[tuple[float, float]], events: list[Event]) -> Iterator[tuple[str, str, float]]:
    """The gaps between ``busy`` spans, cut where copies begin and end.

    A copy that ends after compute went on was not waited for. Of the others the last one was, and before it those
    that kept it from beginning.
    """
    copies = sorted((e for e in events if e.kind is EventKind.COPY), key=lambda e: e.time_s + e.duration_s)
    ends = [copy.time_s + copy.duration_s for copy in copies]
    allocations = sorted((e for e in events if e.kind is EventKind.ALLOC), key=lambda e: e.time_s)
    times = [allocation.time_s for allocation in allocations]
    for (_, begin), (end, _) in pairwise(busy):
        at, index = end, bisect_right(ends, end) - 1
        while index >= 0 and ends[index] > begin and at > begin:
            copy, stop, start = copies[index], min(ends[index], at), max(copies[index].time_s, begin)
            index -= 1
            if stop <= start:
                continue
            if at > stop:
                yield _between(allocations, times, stop, at)
            yield copy.label or f"{copy.source} to {copy.tier}", COPY, stop - start
            at = start
        if at > begin:
            yield _between(allocations, times, begin, at)


def _between(allocations: list[Event], times: list[float], begin: float, end: float) -> tuple[str, str, float]:
    """Time without a copy: an allocation's if one was made in it."""
    index = bisect_left(times, begin)
    if index < len(times) and times[index] < end:
        return allocations[index].label, ALLOCATION, end - begin
    return "", UNKNOWN, end - begin
