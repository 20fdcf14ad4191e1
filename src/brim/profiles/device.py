"""Figures and Timelines of a profile, from the columns that both readers fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brim.core import EventKind, Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import FormatError
from brim.profiles.activity import COPY_NAMES, D2H, H2D, H2H, MEMSET, Activity, Columns, DeviceRows, Numbers
from brim.profiles.figures import (
    CAUSES,
    LARGEST,
    SIZES,
    CopyFigures,
    DeviceProfile,
    Gap,
    Host,
    Idle,
    KernelFigures,
    Migration,
    Profile,
    Spans,
    idle_of,
    labels_of,
    spans_of,
)

HOST = -1  # in place of a device
MOST_DEVICES = 1024
LONGEST_S = 1e9  # thirty years: larger values are not times
MOST_BYTES = 1 << 50
GAPS, KERNELS = 20, 20
MIGRATION_CAUSES = {1: "prefetch", 2: "page fault", 3: "speculative", 4: "eviction", 5: "access counters"}


HELD_BEFORE = "before the recording"
COLLECTIVE_CATEGORY = "collective"
_TIERS = (VRAM, RAM, "")  # as the indices below
_TRANSFERS = {H2D: (1, 0), D2H: (0, 1), H2H: (1, 1), MEMSET: (2, 0)}  # source and tier; all others: within the device


def profile_of(activity: Activity, *, source: str, kind: str, events: int, request: str) -> Profile:
    """Compute figures and Timelines. Raises FormatError, with ``request``, for impossible times, sizes or devices."""
    _check(activity, request)
    host = Host(activity)
    found = np.union1d(activity.device["device"], activity.memory["device"])
    numbers = [int(number) for number in found if number != HOST]
    return Profile(
        source=source,
        kind=kind,
        devices=tuple(_device(activity, host, number, source) for number in numbers),
        host=_host_timeline(activity, source),
        facts=activity.facts,
        events=events,
    )


def _check(activity: Activity, request: str) -> None:
    columns: list[tuple[Columns, str]] = [
        (rows, name)
        for rows in (activity.device, activity.call, activity.operations, activity.steps, activity.loads)
        for name in ("start", "duration")
    ]
    for rows, name in [*columns, (activity.memory, "time")]:
        times = rows[name]
        if len(times) and not (np.abs(times) < LONGEST_S).all():
            raise FormatError(request, "The time of an event is out of range.")
    for rows in (activity.device, activity.memory):
        sizes = rows["bytes"]
        if len(sizes) and not (np.abs(sizes) < MOST_BYTES).all():
            raise FormatError(request, "The size of an event is out of range.")
    if len(activity.device) and (activity.device["bytes"] < 0).any():
        raise FormatError(request, "A copy has a negative size.")
    if any(len(np.unique(rows["device"])) > MOST_DEVICES for rows in (activity.device, activity.memory)):
        raise FormatError(request, f"It has more than {MOST_DEVICES} devices.")


def _device(activity: Activity, host: Host, device: int, source: str) -> DeviceProfile:
    rows = DeviceRows(activity, device)
    begin, end = _wall(activity, rows)
    busy, copies = _spans(rows, rows.computing), _spans(rows, rows.memory)
    collectives = _spans(rows, rows.collective)
    idle = idle_of(
        busy.gaps(begin, end),
        collectives=collectives,
        copies=copies,
        kernel_starts=rows.start[rows.computing],
        kernel_keys=rows.key[rows.computing],
        host=host,
    )
    labels = labels_of(idle, host, activity.texts, rows)
    figures: dict[str, Any] = dict(
        device=device,
        name=activity.device_names.get(device, ""),
        wall_s=end - begin,
        busy_s=busy.seconds,
        idle_s=idle.spans.seconds,
        copy_s=copies.seconds,
        overlap_s=float(np.sum(busy.within(copies.starts, copies.ends))),
        collective_s=collectives.seconds,
        idle_by_cause=_by_cause(idle.parts.sum(axis=1)),
        gaps=_longest(idle, labels, activity.texts.all()),
        copies=_copies(rows),
        kernels=_kernels(rows, activity.texts.all()),
        migrations=_migrations(rows),
        page_faults=activity.page_faults_gpu.get(device, 0),
        **_shares(rows),
    )
    table = _device_table(activity, rows, idle, labels, device)
    del rows, busy, copies, collectives, idle, labels  # as large as the Timeline that follows
    timeline = Timeline(f"{source}: device {device}", measured=True)
    table.write(timeline, activity.texts.all())
    return DeviceProfile(**figures, timeline=timeline)


def _spans(rows: DeviceRows, chosen: Numbers) -> Spans:
    return spans_of(rows.start[chosen], rows.duration[chosen])


def _wall(activity: Activity, rows: DeviceRows) -> tuple[float, float]:
    """Return begin and end of the steps and activities; zeros without any activity."""
    if not len(rows.start):
        return 0.0, 0.0
    steps = activity.steps
    begins = np.r_[rows.start, steps["start"]]
    ends = begins + np.r_[rows.duration, steps["duration"]]
    return float(np.min(begins)), float(np.max(ends))


def _by_cause(parts: Numbers) -> dict[str, float]:
    return {cause: float(seconds) for cause, seconds in zip(CAUSES, parts, strict=True) if seconds > 0}


def _longest(idle: Idle, labels: Numbers, texts: list[str]) -> tuple[Gap, ...]:
    lengths = idle.spans.ends - idle.spans.starts
    return tuple(
        Gap(
            start_s=float(idle.spans.starts[index]),
            duration_s=float(lengths[index]),
            causes=_by_cause(idle.parts[:, index]),
            label=texts[labels[index]],
        )
        for index in np.argsort(-lengths, kind="stable")[:GAPS]
    )


def _copies(rows: DeviceRows) -> tuple[CopyFigures, ...]:
    bounds, names = list(SIZES.values()), [*SIZES, LARGEST]
    copies = []
    for kind, name in COPY_NAMES.items():
        for unified in (False, True):
            chosen = (rows.kind == kind) & (rows.unified == unified)
            if not chosen.any():
                continue
            counts = np.bincount(np.searchsorted(bounds, rows.bytes[chosen], side="right"), minlength=len(names))
            copies.append(
                CopyFigures(
                    kind=name,
                    unified=unified,
                    count=int(chosen.sum()),
                    bytes=int(rows.bytes[chosen].sum()),
                    seconds=float(rows.duration[chosen].sum()),
                    sizes={size: int(count) for size, count in zip(names, counts, strict=True) if count},
                )
            )
    return tuple(sorted(copies, key=lambda figures: -figures.seconds))


def _kernels(rows: DeviceRows, texts: list[str]) -> tuple[KernelFigures, ...]:
    chosen = rows.computing | rows.collective
    names, inverse = np.unique(rows.name[chosen], return_inverse=True)
    seconds = np.bincount(inverse, weights=rows.duration[chosen], minlength=len(names))
    counts = np.bincount(inverse, minlength=len(names))
    return tuple(
        KernelFigures(name=texts[names[index]], count=int(counts[index]), seconds=float(seconds[index]))
        for index in np.argsort(-seconds, kind="stable")[:KERNELS]
    )


def _migrations(rows: DeviceRows) -> dict[str, Migration]:
    migrations = {}
    for cause, name in MIGRATION_CAUSES.items():
        chosen = rows.memory & (rows.cause == cause)
        if chosen.any():
            migrations[name] = Migration(
                count=int(chosen.sum()),
                bytes=int(rows.bytes[chosen].sum()),
                seconds=float(rows.duration[chosen].sum()),
            )
    return migrations


def _shares(rows: DeviceRows) -> dict[str, Any]:
    unified, all_s = rows.memory & rows.unified, float(rows.duration.sum())
    memory_s = float(rows.duration[rows.memory].sum())
    return {
        "memory_operations_share": _share(memory_s, all_s),
        "unified_share_time": _share(float(rows.duration[unified].sum()), memory_s),
        "unified_share_bytes": _share(float(rows.bytes[unified].sum()), float(rows.bytes[rows.memory].sum())),
        "unified_share_count": _share(float(unified.sum()), float(rows.memory.sum())),
    }


def _share(part: float, total: float) -> float:
    return part / total if total > 0 else 0.0


@dataclass
class _Table:
    """Columns of events, sorted when they are written. Texts are numbers of the activity's texts."""

    parts: list[dict[str, Numbers]] = field(default_factory=list)

    def add(self, count: int, **columns: Numbers | int) -> None:
        self.parts.append({name: np.broadcast_to(np.asarray(column), count) for name, column in columns.items()})

    def column(self, name: str, default: int | float) -> Numbers:
        sizes = [len(part["kind"]) for part in self.parts]
        columns = [part.get(name, np.full(size, default)) for part, size in zip(self.parts, sizes, strict=True)]
        return np.concatenate(columns) if columns else np.empty(0)

    def write(self, timeline: Timeline, texts: list[str]) -> None:
        order = np.argsort(self.column("time_s", 0.0), kind="stable")
        names = {"tier": _TIERS, "source": _TIERS, "label": texts, "category": _CATEGORIES}
        timeline.extend(
            _view(self.column("kind", 0)[order].astype(np.int8)),
            _Columns(_NUMBERS, lambda name: _view(self.column(name, _NUMBERS[name])[order].astype(_TYPES[name]))),
            _Columns(_TEXTS, lambda name: _used(self.column(name, _TEXTS[name])[order], names[name])),
        )


class _Columns(Mapping[str, Any]):
    """Columns built on access: all at once they would be as large as the Timeline."""

    def __init__(self, names: Mapping[str, Any], make: Callable[[str], Any]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _view(column: Numbers) -> memoryview:
    return np.ascontiguousarray(column).data


def _used(numbers: Numbers, texts: Sequence[str]) -> tuple[memoryview, list[str]]:
    """Return each row's index among the used texts, and those: the activity may have far more texts."""
    chosen = numbers.astype(np.int32)
    used = np.flatnonzero(np.bincount(chosen, minlength=1))
    place = np.zeros(used.max(initial=0) + 1, np.int32)
    place[used] = np.arange(len(used))
    return _view(place[chosen]), [texts[number] for number in used.tolist()]


_NUMBERS = {"time_s": 0.0, "duration_s": 0.0, "bytes": 0, "address": -1, "stream": 0}
_TYPES = {name: np.float64 if isinstance(default, float) else np.int64 for name, default in _NUMBERS.items()}
_TEXTS = {"tier": 2, "source": 2, "label": 0, "category": 0}
_CATEGORIES = ("", COLLECTIVE_CATEGORY, *CAUSES)


def _device_table(activity: Activity, rows: DeviceRows, idle: Idle, labels: Numbers, device: int) -> _Table:
    """Return kernels, copies, allocations and idle times of a device, in seconds since the recording began."""
    table = _Table()
    kernels = ~rows.memory
    table.add(
        int(kernels.sum()),
        kind=EventKind.COMPUTE,
        tier=0,
        time_s=rows.start[kernels],
        duration_s=rows.duration[kernels],
        stream=rows.stream[kernels],
        label=rows.name[kernels],
        category=rows.collective[kernels].astype(np.int64),
    )
    transfers = np.array([_TRANSFERS.get(kind, (0, 0)) for kind in range(int(rows.kind.max(initial=0)) + 1)])
    copies = rows.memory
    table.add(
        int(copies.sum()),
        kind=EventKind.COPY,
        source=transfers[rows.kind[copies], 0],
        tier=transfers[rows.kind[copies], 1],
        bytes=rows.bytes[copies],
        time_s=rows.start[copies],
        duration_s=rows.duration[copies],
        stream=rows.stream[copies],
        label=rows.name[copies],
    )
    _add_idle(table, idle, labels)
    _add_memory(table, activity, device, tier=0)
    return table


def _host_timeline(activity: Activity, source: str) -> Timeline:
    table, timeline = _Table(), Timeline(f"{source}: host", measured=True)
    _add_memory(table, activity, -1, tier=1)
    table.write(timeline, activity.texts.all())
    return timeline


def _add_idle(table: _Table, idle: Idle, labels: Numbers) -> None:
    """Add an event for each cause of each gap, one after the other, so that their sums are exact."""
    at = idle.spans.starts.copy()
    for number in range(len(CAUSES)):
        there = idle.parts[number] > 0
        table.add(
            int(there.sum()),
            kind=EventKind.IDLE,
            tier=0,
            time_s=at[there],
            duration_s=idle.parts[number][there],
            label=labels[there],
            category=2 + number,
        )
        at += idle.parts[number]


def _add_memory(table: _Table, activity: Activity, device: int, *, tier: int) -> None:
    """Add allocations and frees, after an allocation of the bytes in use before the recording.

    Segments are derived from the reserved totals that PyTorch writes with every event.
    """
    memory, plain = activity.memory, activity.texts.number("")
    chosen = np.flatnonzero(memory["device"] == device)
    chosen = chosen[np.argsort(memory["time"][chosen], kind="stable")]
    if not len(chosen):
        return
    time, size = memory["time"][chosen], memory["bytes"][chosen]
    total, reserved = memory["total"][chosen], memory["reserved"][chosen]
    initial_bytes = int(total[0] - size[0]) if total[0] >= 0 else -int(min(0, np.cumsum(size).min()))
    if initial_bytes > 0:
        table.add(
            1,
            kind=EventKind.ALLOC,
            tier=tier,
            bytes=initial_bytes,
            time_s=time[:1],
            label=activity.texts.number(HELD_BEFORE),
        )
    table.add(
        len(chosen),
        kind=np.where(size >= 0, EventKind.ALLOC, EventKind.FREE),
        tier=tier,
        bytes=np.abs(size),
        time_s=time,
        address=memory["address"][chosen],
        label=plain,
    )
    known_rows = np.flatnonzero(reserved >= 0)
    steps = np.diff(reserved[known_rows], prepend=0)
    moved = np.flatnonzero(steps)
    table.add(
        len(moved),
        kind=np.where(steps[moved] > 0, EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE),
        tier=tier,
        bytes=np.abs(steps[moved]),
        time_s=time[known_rows[moved]],
        label=plain,
    )
