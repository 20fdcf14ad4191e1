"""From columns to figures and Timelines: the part that all profilers share."""

from __future__ import annotations

from typing import Any

import numpy as np

from brim.core import Timeline
from brim.errors import FormatError
from brim.profiles.activity import (
    COLLECTIVE,
    COMPUTE,
    COPY_NAMES,
    MEMSET,
    Activity,
    Columns,
    Numbers,
)
from brim.profiles.figures import (
    CAUSES,
    LARGEST,
    SIZES,
    CopyFigures,
    DeviceProfile,
    Gap,
    KernelFigures,
    Migration,
    Profile,
)
from brim.profiles.idle import (
    Host,
    Idle,
    Spans,
    idle_of,
    spans_of,
)
from brim.profiles.labels import labels_of
from brim.profiles.timeline import device_table, host_timeline

HOST = -1  # in place of a device
MOST_DEVICES = 1024
LONGEST_S = 1e9  # thirty years: larger values are not times
MOST_BYTES = 1 << 50
GAPS, KERNELS = 20, 20
MIGRATION_CAUSES = {1: "prefetch", 2: "page fault", 3: "speculative", 4: "eviction", 5: "access counters"}


def profile_of(activity: Activity, *, source: str, kind: str, events: int, asked: str) -> Profile:
    """Figures and Timelines of everything recorded. Raises FormatError for times, sizes or devices that cannot be."""
    _check(activity, asked)
    host = Host(activity)
    told = np.union1d(activity.device["device"], activity.memory["device"])  # one that only held memory counts too
    numbers = [int(number) for number in told if number != HOST]
    return Profile(
        source=source,
        kind=kind,
        devices=tuple(_device(activity, host, number, source) for number in numbers),
        host=host_timeline(activity, source),
        facts=activity.facts,
        events=events,
    )


def _check(activity: Activity, asked: str) -> None:
    columns: list[tuple[Columns, str]] = [
        (rows, name)
        for rows in (activity.device, activity.call, activity.operations, activity.steps, activity.loads)
        for name in ("start", "duration")
    ]
    for rows, name in [*columns, (activity.memory, "time")]:
        times = rows[name]
        if len(times) and not (np.abs(times) < LONGEST_S).all():
            raise FormatError(asked, "The time of an event is out of range.")
    for rows in (activity.device, activity.memory):
        sizes = rows["bytes"]
        if len(sizes) and not (np.abs(sizes) < MOST_BYTES).all():
            raise FormatError(asked, "The size of an event is out of range.")
    if len(activity.device) and (activity.device["bytes"] < 0).any():
        raise FormatError(asked, "A copy has a negative size.")
    if any(len(np.unique(rows["device"])) > MOST_DEVICES for rows in (activity.device, activity.memory)):
        raise FormatError(asked, f"It has more than {MOST_DEVICES} devices.")


class _Rows:
    """What one device did, in order."""

    def __init__(self, activity: Activity, device: int) -> None:
        every = activity.device
        mine, start = every["device"] == device, every["start"]
        chosen: Any = slice(None)  # what is in order already is not copied
        if not mine.all() or not (start[1:] >= start[:-1]).all():
            chosen = np.flatnonzero(mine)
            chosen = chosen[np.argsort(start[chosen], kind="stable")]
        self.start, self.duration = every["start"][chosen], every["duration"][chosen]
        self.kind, self.stream, self.key = every["kind"][chosen], every["stream"][chosen], every["key"][chosen]
        self.bytes, self.name = every["bytes"][chosen], every["name"][chosen]
        self.unified, self.cause = every["unified"][chosen] != 0, every["cause"][chosen]
        self.computing = self.kind == COMPUTE
        self.collective = self.kind == COLLECTIVE
        self.memory = self.kind >= MEMSET

    def spans(self, chosen: Numbers) -> Spans:
        return spans_of(self.start[chosen], self.duration[chosen])


def _device(activity: Activity, host: Host, device: int, source: str) -> DeviceProfile:
    rows = _Rows(activity, device)
    begin, end = _wall(activity, rows)
    busy, copies = rows.spans(rows.computing), rows.spans(rows.memory)
    collectives = rows.spans(rows.collective)
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
    table = device_table(activity, rows, idle, labels, device)
    del rows, busy, copies, collectives, idle, labels  # as much as the Timeline that is made now
    timeline = Timeline(f"{source}: device {device}", measured=True)
    table.write(timeline, activity.texts.all())
    return DeviceProfile(**figures, timeline=timeline)


def _wall(activity: Activity, rows: _Rows) -> tuple[float, float]:
    """From the first step, or the first thing that the device did, to the last of either; none if it did nothing."""
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


def _copies(rows: _Rows) -> tuple[CopyFigures, ...]:
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


def _kernels(rows: _Rows, texts: list[str]) -> tuple[KernelFigures, ...]:
    chosen = rows.computing | rows.collective
    names, inverse = np.unique(rows.name[chosen], return_inverse=True)
    seconds = np.bincount(inverse, weights=rows.duration[chosen], minlength=len(names))
    counts = np.bincount(inverse, minlength=len(names))
    return tuple(
        KernelFigures(name=texts[names[index]], count=int(counts[index]), seconds=float(seconds[index]))
        for index in np.argsort(-seconds, kind="stable")[:KERNELS]
    )


def _migrations(rows: _Rows) -> dict[str, Migration]:
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


def _shares(rows: _Rows) -> dict[str, Any]:
    ours, all_s = rows.memory & rows.unified, float(rows.duration.sum())
    memory_s = float(rows.duration[rows.memory].sum())
    return {
        "memory_operations_share": _share(memory_s, all_s),
        "unified_share_time": _share(float(rows.duration[ours].sum()), memory_s),
        "unified_share_bytes": _share(float(rows.bytes[ours].sum()), float(rows.bytes[rows.memory].sum())),
        "unified_share_count": _share(float(ours.sum()), float(rows.memory.sum())),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
