"""The data of a page's view: levels of detail, events around the peak, blocks at some moments, lanes.

Each level cuts a run into buckets, even in events and in time, and keeps of each the moments of least and most
allocated bytes, of most reserved bytes, and its last event. So no peak is lost at any zoom, and a picture is true
between bursts of events too. (After M4: Jugel et al., "M4: a visualization-oriented time series data aggregation",
VLDB 2014.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core import EventKind, Plan, Timeline
from brim.core.hardware import VRAM
from brim.core.timeline import CONTEXT_BYTES
from brim.report.html.memory import (
    Numbers,
    TierEvents,
    durations_ns,
    frames_of,
    module_of,
    moments,
    ranked,
    tier_events,
    tiers_of,
    times_ns,
)
from brim.report.html.packing import integers, plain, texts

_MOST_FRAMES = 40  # of a stack, from the innermost
_MOST_OOMS = 50
_SPAN_COLUMNS = ("start_ns", "duration_ns", "busy_ns", "bytes", "count")


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Limits of a view. ``exact_events`` lie around the peak; a shorter run is exact throughout."""

    buckets: tuple[int, ...] = (500, 4_000, 16_000)
    exact_events: int = 150_000
    block_rows: int = 150_000  # of all moments
    moments: int = 40
    owners: int = 20_000
    spans: int = 20_000  # of a lane

    def less(self) -> Detail:
        """Return half of everything."""
        return Detail(
            buckets=tuple(max(count // 2, 100) for count in self.buckets),
            exact_events=self.exact_events // 2,
            block_rows=self.block_rows // 2,
            moments=max(self.moments // 2, 2),
            owners=self.owners // 2,
            spans=self.spans // 2,
        )


def view_data(
    timeline: Timeline, title: str, plan: Plan | None, detail: Detail, phases: Sequence[tuple[str, int]] = ()
) -> dict[str, Any]:
    """Return the page's data of a timeline."""
    times = times_ns(timeline)
    durations = durations_ns(timeline)
    ends = [0] if times is None else times + durations
    phases = phases or phases_of_spans(timeline)
    return {
        "title": plain(title),
        "measured": timeline.measured,
        "axis": "event" if times is None else "time",
        "events": len(timeline),
        "end_ns": int(np.max(ends)),
        "phases": [
            {
                "name": plain(name),
                "event": event,
                "time_ns": 0 if times is None else int(times[event]),
                "duration_ns": int(durations[event]),  # 0: until the next begins
            }
            for name, event in phases
        ],
        "panels": [_panel(timeline, tier, plan, detail) for tier in tiers_of(timeline)],
        "lanes": [
            {"name": plain(lane.name), "kind": lane.kind, "label": texts(lane.label)}
            | {name: integers(getattr(lane, name)) for name in _SPAN_COLUMNS}
            for lane in lanes(timeline, detail.spans)
        ],
    }  # fmt: skip


def _panel(timeline: Timeline, tier: str, plan: Plan | None, detail: Detail) -> dict[str, Any]:
    """Return a tier's picture, its peak, and its events, blocks and owners to look up."""
    events = tier_events(timeline, tier)
    allocated, reserved = np.cumsum(events.delta), np.cumsum(events.reserved_delta)
    peak = int(np.argmax(allocated)) if len(allocated) else -1
    named, rank = ranked(events, peak, detail.owners)
    all_positions = levels(events.time_ns, allocated, reserved, detail.buckets)
    if len(events) <= detail.exact_events:
        all_positions.append(np.arange(len(events)))
    first, last = _exact_range(len(events), peak, detail.exact_events)
    ooms = np.flatnonzero(events.kind == EventKind.OOM)
    chosen = _moment_positions(events, allocated, peak, first, ooms, detail)
    return {
        "tier": plain(tier),
        "events": len(events),
        "first_event": int(events.event[0]),
        "last_event": int(events.event[-1]),
        "groups": [plain(name) for name in events.owners.groups],
        "grouped_by": events.owners.grouped_by,
        "peak": {
            "event": int(events.event[peak]),
            "position": peak,
            "allocated_bytes": int(max(allocated[peak], 0)),
            "reserved_bytes": int(reserved[peak]),
        },
        "reserved_peak_bytes": int(max(reserved.max(), 0)),
        "context_bytes": int(timeline.facts.get(CONTEXT_BYTES, 0)) if tier == VRAM else 0,
        "lines": _lines(timeline, tier, plan),
        "levels": _levels(events, all_positions, reserved),
        "exact": _exact(events, first, last, rank),
        "moments": moments(events, chosen, detail.block_rows // len(chosen), rank),
        "owners": _owner_data(events, named),
        "ooms": _oom_data(timeline, events, ooms),
    }


def _exact_range(count: int, peak: int, most: int) -> tuple[int, int]:
    """Return the range of ``most`` events around the peak."""
    first = max(0, min(peak - most * 3 // 5, count - most))
    return first, min(count, first + most)


def _levels(events: TierEvents, all_positions: list[Numbers], reserved: Numbers) -> list[dict[str, Any]]:
    """Return the live bytes of each group at each level's positions; a group at a time, to bound memory."""
    levels: list[dict[str, Any]] = [
        {
            "event": integers(events.event[positions]),
            "time_ns": integers(events.time_ns[positions]),
            "reserved": integers(reserved[positions]),
            "groups": [],
        }
        for positions in all_positions
    ]
    group = np.append(events.owners.group, -1)[events.owner]  # the owner -1 has the group -1
    for number in range(len(events.owners.groups)):
        held_bytes = np.cumsum(np.where(group == number, events.delta, 0))
        for level, positions in zip(levels, all_positions, strict=True):
            level["groups"].append(integers(held_bytes[positions]))
    return levels


def _exact(events: TierEvents, first: int, last: int, rank: Numbers) -> dict[str, Any]:
    part = slice(first, last)
    owner = np.append(rank, -1)[events.owner[part]]
    columns: dict[str, Numbers] = {
        "event": events.event[part],
        "time_ns": events.time_ns[part],
        "kind": events.kind[part].astype(np.int64),
        "bytes": events.delta[part] + events.reserved_delta[part],
        "address": events.address[part],
        "stream": events.stream[part],
        "owner": owner,
    }
    return {"first": first, "last": last} | {name: integers(column) for name, column in columns.items()}


def _moment_positions(
    events: TierEvents, allocated: Numbers, peak: int, first: int, ooms: Numbers, detail: Detail
) -> list[int]:
    """Return the position before the exact events; of a longer run also the peak, OOMs and local peaks."""
    if len(events) <= detail.exact_events:
        return [-1]
    live = max(len(events.live_at(peak)), 1)
    count = max(min(detail.moments, detail.block_rows // live), 2)
    borders = np.linspace(0, len(events), count + 1).astype(int).tolist()
    tops = [start + int(np.argmax(allocated[start:end])) for start, end in pairwise(borders)]
    return sorted({first - 1, peak, len(events) - 1, *ooms[:2].tolist(), *tops})


def _owner_data(events: TierEvents, named: Numbers) -> dict[str, Any]:
    """Return the named owners, then the others of each group; stacks as numbers of frames."""
    owners, chosen = events.owners, named.tolist()
    frames: dict[str, int] = {}
    stacks: dict[str, int] = {}
    rows: list[list[int]] = []
    for index in chosen:
        stack = owners.stack[index]
        if stack not in stacks:
            stacks[stack] = len(rows)
            rows.append([frames.setdefault(frame, len(frames)) for frame in frames_of(stack)[:_MOST_FRAMES]])
    others = [f"all others: {name}" for name in owners.groups]
    return {
        "group": integers([*owners.group[named].tolist(), *range(len(owners.groups))]),
        "label": texts([*(owners.label[index] for index in chosen), *others]),
        "module": texts([*(module_of(owners.label[index], owners.stack[index]) for index in chosen), *others]),
        "stack": integers([*(stacks[owners.stack[index]] for index in chosen), *[-1] * len(others)]),
        "frames": texts(list(frames)),
        "stack_frames": integers([number for row in rows for number in row]),
        "stack_lengths": integers([len(row) for row in rows]),
    }


def _oom_data(timeline: Timeline, events: TierEvents, ooms: Numbers) -> list[dict[str, Any]]:
    indices, names = timeline.texts("label")
    sizes = timeline.column("bytes")
    return [
        {
            "event": int(events.event[at]),
            "time_ns": int(events.time_ns[at]),
            "bytes": int(sizes[int(events.event[at])]),
            "label": plain(names[indices[int(events.event[at])]]),
        }
        for at in ooms[:_MOST_OOMS].tolist()
    ]


def _lines(timeline: Timeline, tier: str, plan: Plan | None) -> list[dict[str, Any]]:
    """Return horizontal lines: the promise, the budget and the device's memory."""
    facts = timeline.facts
    promised = plan.promise.peak_bytes.get(tier) if plan else facts.get(f"promised_bytes.{tier}")
    budget = plan.budget_bytes.get(tier) if plan else facts.get(f"budget_bytes.{tier}")
    device = facts.get("total_bytes") if tier == timeline.peak_bytes.tier else None
    lines = (("promised", promised), ("budget", budget), ("device", device))
    return [{"name": name, "bytes": int(count)} for name, count in lines if count and math.isfinite(count)]


def levels(time_ns: Numbers, allocated: Numbers, reserved: Numbers, buckets: Sequence[int]) -> list[Numbers]:
    """Return positions of events, for each of ``buckets`` (ascending) that is coarser than the run itself.

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
    extremes = (_first_maximum(column, starts) for column in (allocated, -allocated, reserved))
    return np.unique(np.concatenate([*extremes, ends]))


def _bucket_starts(time_ns: Numbers, count: int) -> Numbers:
    """Return the starts of ``count`` buckets of equal events, and of ``count`` of equal duration."""
    even = np.linspace(0, len(time_ns), count, endpoint=False).astype(np.int64)
    times = np.linspace(time_ns[0], time_ns[-1], count, endpoint=False)
    timed = np.searchsorted(time_ns, times)
    return np.unique(np.concatenate([even, timed]))


def _first_maximum(values: Numbers, starts: Numbers) -> Numbers:
    """Return the first position of each bucket's largest value."""
    lengths = np.diff(np.append(starts, len(values)))
    hits = np.flatnonzero(values == np.repeat(np.maximum.reduceat(values, starts), lengths))
    _, first = np.unique(np.searchsorted(starts, hits, side="right"), return_index=True)
    return hits[first]


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
