"""Lanes of computing, copying and waiting; each a row of spans on the axis of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.core import EventKind, Timeline
from brim.report.html.memory import Numbers, durations_ns, times_ns

MOST_LANES = 24
MOST_PHASES = 5_000  # 50 KB of the page
_KINDS = (EventKind.COMPUTE, EventKind.COPY, EventKind.IDLE)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Spans by begin. A span of ``count`` > 1 stands for neighbours, which fill ``busy_ns`` of it."""

    name: str
    kind: str  # "compute", "copy" or "idle"
    start_ns: Numbers
    duration_ns: Numbers
    busy_ns: Numbers
    bytes: Numbers
    count: Numbers
    label: list[str]  # of the longest in each span


def phases_of_spans(timeline: Timeline) -> list[tuple[str, int]]:
    """Return the parts of a run's steps in order of time: name and number of the event.

    They are the spans of its first compute lane; none if these have a single name, as the tokens of a text have, or
    are more than ``MOST_PHASES``.
    """
    times, kinds = times_ns(timeline), np.asarray(timeline.column("kind"))
    rows = np.flatnonzero((kinds == EventKind.COMPUTE) & (np.asarray(timeline.column("stream")) == 0))
    if times is None or not 1 < len(rows) <= MOST_PHASES:
        return []
    rows = rows[np.argsort(times[rows], kind="stable")]
    number, names = timeline.texts("label")
    phases = [(names[number[row]], int(row)) for row in rows.tolist()]
    return phases if len({name for name, _ in phases}) > 1 else []


def lanes(timeline: Timeline, most_spans: int) -> list[Lane]:
    """Return a lane per (kind, tier, source, stream): the ``MOST_LANES`` busiest, of ``most_spans`` spans each."""
    times = times_ns(timeline)
    kinds = np.asarray(timeline.column("kind"))
    events = np.flatnonzero(np.isin(kinds, _KINDS))
    if times is None or not len(events):
        return []
    durations = durations_ns(timeline)[events]
    columns = (
        kinds[events].astype(np.int64),
        np.asarray(timeline.texts("tier")[0])[events].astype(np.int64),
        np.asarray(timeline.texts("source")[0])[events].astype(np.int64),
        np.asarray(timeline.column("stream"))[events],
    )
    keys, number = np.unique(np.stack(columns), axis=1, return_inverse=True)
    number = number.reshape(-1)
    busy = np.bincount(number, weights=durations)
    chosen = sorted(np.argsort(-busy)[:MOST_LANES].tolist(), key=lambda lane: tuple(keys[:, lane].tolist()))
    chosen.sort(key=lambda lane: _KINDS.index(EventKind(int(keys[0, lane]))))
    return [
        _lane(timeline, _name(timeline, keys[:, lane]), times, events[mine], durations[mine], most_spans)
        for lane, mine in ((lane, number == lane) for lane in chosen)
    ]


def _name(timeline: Timeline, key: NDArray[np.int64]) -> str:
    names = timeline.texts("tier")[1]
    kind, tier, source, stream = EventKind(int(key[0])), names[int(key[1])], names[int(key[2])], int(key[3])
    where = f"{source} → {tier}" if source else tier
    return f"{kind.name.lower()} {where}" + (f", stream {stream}" if stream else "")


def _lane(
    timeline: Timeline, name: str, times: Numbers, events: Numbers, durations: Numbers, most_spans: int
) -> Lane:
    order = np.argsort(times[events], kind="stable")
    events, duration = events[order], durations[order]
    start, size = times[events], np.asarray(timeline.column("bytes"))[events]
    firsts = np.unique(np.linspace(0, len(events), min(len(events), most_spans), endpoint=False).astype(np.int64))
    group = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(events))))
    longest = np.lexsort((-duration, group))[firsts]  # the first of each group
    indices, texts = timeline.texts("label")
    label = np.asarray(indices)[events[longest]].tolist()
    return Lane(
        name=name,
        kind=EventKind(int(timeline.column("kind")[int(events[0])])).name.lower(),
        start_ns=start[firsts],
        duration_ns=np.maximum.reduceat(start + duration, firsts) - start[firsts],
        busy_ns=np.add.reduceat(duration, firsts),
        bytes=np.add.reduceat(size, firsts),
        count=np.diff(np.append(firsts, len(events))),
        label=[texts[index] for index in label],
    )
