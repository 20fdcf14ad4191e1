"""A view's numbers as its page needs them: levels, the events around the peak, what was held, lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from brim.core import EventKind, Plan, Timeline
from brim.core.hardware import VRAM
from brim.core.timeline import CONTEXT_BYTES
from brim.report.held import Held, Numbers, durations_ns, frames_of, held, module_of, tiers_of, times_ns
from brim.report.html.packing import integers, plain, texts
from brim.report.html.pyramid import levels
from brim.report.lanes import lanes, phases_of_spans
from brim.report.occupancy import moments, ranked

_MOST_FRAMES = 40  # of a stack, from the innermost
_MOST_OOMS = 50
_SPAN_COLUMNS = ("start_ns", "duration_ns", "busy_ns", "bytes", "count")


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How much of a run is kept. ``exact_events`` lie around the peak; a shorter run is kept whole."""

    buckets: tuple[int, ...] = (500, 4_000, 16_000)
    exact_events: int = 150_000
    block_rows: int = 150_000  # over all kept moments
    moments: int = 40
    owners: int = 20_000
    spans: int = 20_000  # of a lane

    def less(self) -> Detail:
        """Half of everything."""
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
    """Everything that the page shows of one timeline."""
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
    """One tier of a timeline: its picture, its peak and what can be looked up in it."""
    events = held(timeline, tier)
    allocated, reserved = np.cumsum(events.delta), np.cumsum(events.reserved_delta)
    peak = int(np.argmax(allocated)) if len(allocated) else -1
    named, rank = ranked(events, peak, detail.owners)
    kept = [np.arange(len(events))] if len(events) <= detail.exact_events else []
    kept = levels(events.time_ns, allocated, reserved, detail.buckets) + kept
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
        "levels": _levels(events, kept, reserved),
        "exact": _exact(events, first, last, rank),
        "moments": moments(events, chosen, detail.block_rows // len(chosen), rank),
        "owners": _owner_data(events, named),
        "ooms": _oom_data(timeline, events, ooms),
    }


def _exact_range(count: int, peak: int, most: int) -> tuple[int, int]:
    """[first, last): ``most`` events, the peak among them."""
    first = max(0, min(peak - most * 3 // 5, count - most))
    return first, min(count, first + most)


def _levels(found: Held, kept: list[Numbers], reserved: Numbers) -> list[dict[str, Any]]:
    """What was held of each group at the kept positions; one group at a time, as each is a whole run's column."""
    levels: list[dict[str, Any]] = [
        {
            "event": integers(found.event[positions]),
            "time_ns": integers(found.time_ns[positions]),
            "reserved": integers(reserved[positions]),
            "groups": [],
        }
        for positions in kept
    ]
    group = np.append(found.owners.group, -1)[found.owner]  # the owner -1 has the group -1
    for number in range(len(found.owners.groups)):
        held_bytes = np.cumsum(np.where(group == number, found.delta, 0))
        for level, positions in zip(levels, kept, strict=True):
            level["groups"].append(integers(held_bytes[positions]))
    return levels


def _exact(found: Held, first: int, last: int, rank: Numbers) -> dict[str, Any]:
    part = slice(first, last)
    owner = np.append(rank, -1)[found.owner[part]]
    columns: dict[str, Numbers] = {
        "event": found.event[part],
        "time_ns": found.time_ns[part],
        "kind": found.kind[part].astype(np.int64),
        "bytes": found.delta[part] + found.reserved_delta[part],
        "address": found.address[part],
        "stream": found.stream[part],
        "owner": owner,
    }
    return {"first": first, "last": last} | {name: integers(column) for name, column in columns.items()}


def _moment_positions(
    found: Held, allocated: Numbers, peak: int, first: int, ooms: Numbers, detail: Detail
) -> list[int]:
    """Before the exact events; and, of a run that is not kept whole, the peak, each OOM and peaks all along."""
    if len(found) <= detail.exact_events:
        return [-1]
    live = max(len(found.live_at(peak)), 1)
    count = max(min(detail.moments, detail.block_rows // live), 2)
    borders = np.linspace(0, len(found), count + 1).astype(int).tolist()
    tops = [start + int(np.argmax(allocated[start:end])) for start, end in pairwise(borders)]
    return sorted({first - 1, peak, len(found) - 1, *ooms[:2].tolist(), *tops})


def _owner_data(found: Held, named: Numbers) -> dict[str, Any]:
    """The named owners, then one stand-in per group; stacks as numbers of frames."""
    owners, chosen = found.owners, named.tolist()
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


def _oom_data(timeline: Timeline, found: Held, ooms: Numbers) -> list[dict[str, Any]]:
    indices, names = timeline.texts("label")
    sizes = timeline.column("bytes")
    return [
        {
            "event": int(found.event[at]),
            "time_ns": int(found.time_ns[at]),
            "bytes": int(sizes[int(found.event[at])]),
            "label": plain(names[indices[int(found.event[at])]]),
        }
        for at in ooms[:_MOST_OOMS].tolist()
    ]


def _lines(timeline: Timeline, tier: str, plan: Plan | None) -> list[dict[str, Any]]:
    """Horizontal lines: what was promised, the budget, what the device has."""
    facts = timeline.facts
    promised = plan.promise.peak_bytes.get(tier) if plan else facts.get(f"promised_bytes.{tier}")
    budget = plan.budget_bytes.get(tier) if plan else facts.get(f"budget_bytes.{tier}")
    device = facts.get("total_bytes") if tier == timeline.peak_bytes.tier else None
    lines = (("promised", promised), ("budget", budget), ("device", device))
    return [{"name": name, "bytes": int(count)} for name, count in lines if count and math.isfinite(count)]
