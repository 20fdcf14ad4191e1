"""Timelines as a trace that Perfetto and chrome://tracing open: lanes of work, counters of memory, side by side.

Format: "Trace Event Format" (the JSON that ``chrome://tracing`` and ui.perfetto.dev read). Times are microseconds.
Each Timeline is a process: a predicted one lies beside a measured one on the same axis. Where no event has a time (a
prediction of memory alone), each is put a microsecond after the one before.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from brim.core import Event, EventKind, Timeline
from brim.errors import UsageError

_HELD = {EventKind.ALLOC: 1, EventKind.FREE: -1}
_RESERVED = {EventKind.SEGMENT_ALLOC: 1, EventKind.SEGMENT_FREE: -1}
_LANES = {EventKind.COMPUTE: "compute", EventKind.COPY: "copy", EventKind.IDLE: "idle"}
UNNAMED = "other"  # memory without a category


def write(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """One trace file of all ``timelines``, packed if its name ends in ``.gz``.

    Raises UsageError for no timelines, or a file that cannot be written.
    """
    path = Path(path)
    if not timelines:
        raise UsageError(f"A trace was to be written to {path}.", "There is no timeline to write.")
    try:
        with (
            gzip.open(path, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open("w", encoding="utf-8") as file
        ):
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(trace_events(timelines)):
                file.write((",\n" if number else "\n") + json.dumps(event, allow_nan=False))
            file.write("\n]}\n")
    except (OSError, ValueError) as error:  # ValueError: a time that is infinite
        raise UsageError(f"A trace was to be written to {path}.", f"{error}.") from error


def trace_events(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """The events of the trace, one process after the other, each in the order of time."""
    for number, timeline in enumerate(timelines, 1):
        yield from _Process(number, timeline).events()


class _Process:
    def __init__(self, number: int, timeline: Timeline) -> None:
        self.number, self.timeline = number, timeline
        self.lanes: dict[str, list[tuple[int, float]]] = {}  # name -> (thread, free from), one for each row
        self.threads = 0
        self.at_us = 0.0  # where we are
        self.held: dict[str, dict[str, int]] = {}  # counter -> series -> bytes
        self.owners: dict[tuple[str, int, int], list[str]] = {}  # what was allocated where -> its category

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
        """A lane of its own for each stream and way. What overlaps in one lane goes into a further row of it."""
        lane = _LANES[event.kind]
        if event.kind is EventKind.COPY:
            lane += f" {event.source or 'fill'} to {event.tier}"
        elif event.kind is EventKind.COMPUTE:
            lane += f" {event.tier} stream {event.stream}"
        rows = self.lanes.setdefault(lane, [])
        end = self.at_us + event.duration_s * 1e6
        for index, (thread, free) in enumerate(rows):
            if free <= self.at_us:
                rows[index] = (thread, end)
                break
        else:
            self.threads += 1
            thread = self.threads
            rows.append((thread, end))
            yield self.about("thread_name", thread, name=lane if len(rows) == 1 else f"{lane} ({len(rows)})")
            yield self.about("thread_sort_index", thread, sort_index=thread)
        args: dict[str, Any] = {"bytes": event.bytes} if event.bytes else {}
        if event.category:
            args["why" if event.kind is EventKind.IDLE else "category"] = event.category
        name = event.label or event.category or lane
        yield self.made("X", name, thread) | {
            "dur": event.duration_s * 1e6,
            "cat": _LANES[event.kind],
            "args": args,
        }

    def made(self, phase: str, name: str, thread: int) -> dict[str, Any]:
        return {"ph": phase, "name": name, "pid": self.number, "tid": thread, "ts": self.at_us}

    def counter(self, event: Event) -> dict[str, Any]:
        """Bytes that are held, stacked by category; or reserved. A free goes by what the allocation was."""
        if event.kind in _RESERVED:
            name, series, sign = f"{event.tier} reserved", "reserved", _RESERVED[event.kind]
        else:
            name, sign = f"{event.tier} held", _HELD[event.kind]
            series = self.category(event)
        values = self.held.setdefault(name, {})
        values[series] = values.get(series, 0) + sign * event.bytes
        return self.made("C", name, 0) | {"args": dict(values)}

    def category(self, event: Event) -> str:
        key = (event.tier, event.storage, event.address)
        if event.kind is EventKind.ALLOC:
            self.owners.setdefault(key, []).append(event.category or UNNAMED)
            return event.category or UNNAMED
        known = self.owners.get(key)
        if not known:
            return event.category or UNNAMED
        return known.pop() if len(known) > 1 else self.owners.pop(key)[0]

    def out_of_memory(self, event: Event) -> dict[str, Any]:
        name = f"out of memory: {event.label or event.tier}"
        return self.made("i", name, 0) | {"s": "p", "args": {"bytes": event.bytes}}
