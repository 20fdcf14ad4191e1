"""Export of Timelines as a trace for Perfetto and chrome://tracing: lanes of work and counters of memory.

Format: "Trace Event Format" (the JSON that ``chrome://tracing`` and ui.perfetto.dev read). Times are microseconds.
Each Timeline is a process: a predicted one lies beside a measured one on the same axis. If no event has a time (a
prediction of memory alone), each is a microsecond after the one before.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from brim.core import Event, EventKind, Timeline
from brim.core.files import replacing
from brim.errors import UsageError

_HELD = {EventKind.ALLOC: 1, EventKind.FREE: -1}
_RESERVED = {EventKind.SEGMENT_ALLOC: 1, EventKind.SEGMENT_FREE: -1}
_LANES = {EventKind.COMPUTE: "compute", EventKind.COPY: "copy", EventKind.IDLE: "idle"}
UNNAMED = "other"  # memory without a category
MOST_SERIES = 32  # of one counter: each of its events names them all
FURTHER = "further categories"


def write(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write a trace file of all ``timelines``, completely or not at all, packed if its name ends in ``.gz``.

    A pipe or a device is written to directly, so a failure leaves a part there.
    Raises UsageError without timelines, or for a file that cannot be written.
    """
    path = Path(path)
    if not timelines:
        raise UsageError(f"Cannot write a trace to {path}.", "There is no timeline to write.")
    try:
        with replacing(path) as partial:
            _fill(partial, timelines, packed=path.suffix == ".gz")
    except (OSError, ValueError) as error:  # ValueError: a time that is infinite
        raise UsageError(f"Cannot write a trace to {path}.", f"{error}.") from error


def _fill(path: Path, timelines: Sequence[Timeline], *, packed: bool) -> None:
    with gzip.open(path, "wt", encoding="utf-8") if packed else path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(trace_events(timelines)):
            file.write((",\n" if number else "\n") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def trace_events(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace, process by process, each in the order of time."""
    for number, timeline in enumerate(timelines, 1):
        yield from _Process(number, timeline).events()


class _Lane:
    """Rows of a lane, by the numbers of their threads."""

    def __init__(self) -> None:
        self.count = 0
        self.busy: list[tuple[float, int]] = []  # a heap: (until, thread)
        self._free: list[int] = []  # a heap: the first row is taken first

    def thread(self, at_us: float) -> int | None:
        """Return a row that is free at this time, or None."""
        while self.busy and self.busy[0][0] <= at_us:
            heapq.heappush(self._free, heapq.heappop(self.busy)[1])
        return heapq.heappop(self._free) if self._free else None


class _Process:
    def __init__(self, number: int, timeline: Timeline) -> None:
        self.number, self.timeline = number, timeline
        self.lanes: dict[str, _Lane] = {}
        self.threads = 0
        self.at_us = 0.0
        self.counters: dict[str, dict[str, int]] = {}  # counter -> series -> bytes
        self.owners: dict[tuple[str, int, int], list[str]] = {}  # tier, storage, address -> categories

    def events(self) -> Iterator[dict[str, Any]]:
        kind = "measured" if self.timeline.measured else "predicted"
        yield self.about("process_name", 0, name=f"{kind}: {self.timeline.name}")
        yield self.about("process_sort_index", 0, sort_index=self.number)
        times = self.timeline.column("time_s")
        # Sorting makes objects of all events, which take four times the memory.
        in_order = all(before <= after for before, after in pairwise(times))
        timed = any(times)
        events = self.timeline if in_order else sorted(self.timeline, key=lambda event: event.time_s)
        for number, event in enumerate(events):
            self.at_us = event.time_s * 1e6 if timed else float(number)
            if event.kind in _LANES:
                yield from self.slice(event)
            elif event.kind is EventKind.OOM:
                yield self.out_of_memory(event)
            else:
                yield self.counter(event)

    def about(self, what: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self.number, "tid": thread, "args": args}

    def slice(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield a slice. Computing streams, directions of copies and idle times have lanes, with rows for overlaps.

        Events must come in the order of time.
        """
        lane = _LANES[event.kind]
        if event.kind is EventKind.COPY:
            lane += f" {event.source or 'fill'} to {event.tier}"
        elif event.kind is EventKind.COMPUTE:
            lane += f" {event.tier} stream {event.stream}"
        rows = self.lanes.setdefault(lane, _Lane())
        thread = rows.thread(self.at_us)
        if thread is None:
            self.threads += 1
            thread = self.threads
            rows.count += 1
            yield self.about("thread_name", thread, name=lane if rows.count == 1 else f"{lane} ({rows.count})")
            yield self.about("thread_sort_index", thread, sort_index=thread)
        heapq.heappush(rows.busy, (self.at_us + event.duration_s * 1e6, thread))
        args: dict[str, Any] = {"bytes": event.bytes} if event.bytes else {}
        if event.category:
            args["why" if event.kind is EventKind.IDLE else "category"] = event.category
        name = event.label or event.category or lane
        yield self.record("X", name, thread) | {
            "dur": event.duration_s * 1e6,
            "cat": _LANES[event.kind],
            "args": args,
        }

    def record(self, phase: str, name: str, thread: int) -> dict[str, Any]:
        return {"ph": phase, "name": name, "pid": self.number, "tid": thread, "ts": self.at_us}

    def counter(self, event: Event) -> dict[str, Any]:
        """Return allocated bytes by category, or reserved bytes. A free has the category of its allocation."""
        if event.kind in _RESERVED:
            name, series, sign = f"{event.tier} reserved", "reserved", _RESERVED[event.kind]
        else:
            name, sign = f"{event.tier} held", _HELD[event.kind]
            series = self.category(event)
        values = self.counters.setdefault(name, {})
        if series not in values and len(values) >= MOST_SERIES:
            series = FURTHER
        values[series] = values.get(series, 0) + sign * event.bytes
        return self.record("C", name, 0) | {"args": dict(values)}

    def category(self, event: Event) -> str:
        key = (event.tier, event.storage, event.address)
        if event.kind is EventKind.ALLOC:
            self.owners.setdefault(key, []).append(event.category or UNNAMED)
            return event.category or UNNAMED
        categories = self.owners.get(key)
        if not categories:
            return event.category or UNNAMED
        return categories.pop() if len(categories) > 1 else self.owners.pop(key)[0]

    def out_of_memory(self, event: Event) -> dict[str, Any]:
        name = f"out of memory: {event.label or event.tier}"
        return self.record("i", name, 0) | {"s": "p", "args": {"bytes": event.bytes}}
