"""Figures and Timelines of a profile: a device's seconds of computing, copying and waiting, and why it waited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from brim.core import EventKind, Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import FormatError
from brim.profiles.activity import (
    ALLOCATE,
    COPY_NAMES,
    D2H,
    H2D,
    H2H,
    MEMSET,
    SYNCHRONIZE,
    Activity,
    Columns,
    DeviceRows,
    Numbers,
    Texts,
)

CAUSES = ("collective", "copy", "synchronization", "allocation", "data loader", "cpu", "launch", "unknown")
"""Causes of gaps between kernels, in the order in which time is given to them:

* ``collective``: only a collective (NCCL, RCCL) ran, which waits for other devices;
* ``copy``: only a copy or memset ran;
* ``synchronization``: a call that waits for the device kept the host from launching;
* ``allocation``: the host was in ``cudaMalloc``, ``cudaFree`` or the like before it launched the next kernel;
* ``data loader``: the host waited for data (``enumerate(DataLoader)``) before it launched the next kernel;
* ``cpu``: the host did something else (Python, operators, launching) before it launched the next kernel;
* ``launch``: the next kernel was launched already: it was on its way, or the device worked for another process;
* ``unknown``: the launch of the next kernel was not recorded.
"""
SIZES = {"< 4 KiB": 1 << 12, "< 64 KiB": 1 << 16, "< 1 MiB": 1 << 20, "< 16 MiB": 1 << 24, "< 256 MiB": 1 << 28}
LARGEST = ">= 256 MiB"
HOST = -1  # in place of a device
MOST_DEVICES = 1024
LONGEST_S = 1e9  # thirty years: larger values are not times
MOST_BYTES = 1 << 50
GAPS, KERNELS = 20, 20
HELD_BEFORE = "before the recording"
COLLECTIVE_CATEGORY = "collective"
_TIERS = (VRAM, RAM, "")  # as the indices below
_TRANSFERS = {H2D: (1, 0), D2H: (0, 1), H2H: (1, 1), MEMSET: (2, 0)}  # source and tier; all others: within the device


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A time without a kernel. ``causes``: seconds of each; ``label``: names what it mostly waited for."""

    start_s: float
    duration_s: float
    causes: dict[str, float]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFigures:
    """Copies of a kind. ``sizes``: their number by size. ``unified``: traffic of managed memory."""

    kind: str
    unified: bool
    count: int
    bytes: int
    seconds: float
    sizes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFigures:
    name: str
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Figures and Timeline of a device.

    ``wall_s`` runs from the first step or activity to the last. In ``busy_s`` a kernel ran (collectives do not count:
    they wait for others), ``idle_s`` is the rest, by cause in ``idle_by_cause``, the 20 longest gaps in ``gaps``.
    In ``copy_s`` a copy or memset ran, in ``overlap_s`` beside a kernel; in ``collective_s`` a collective.
    ``memory_operations_share``: seconds of copies and memsets over those of all activities. ``unified_share_*``:
    managed memory's share of the program's own copies and memsets, by time, bytes and number.
    """

    device: int
    name: str
    wall_s: float
    busy_s: float
    idle_s: float
    copy_s: float
    overlap_s: float
    collective_s: float
    idle_by_cause: dict[str, float]
    gaps: tuple[Gap, ...]
    copies: tuple[CopyFigures, ...]
    kernels: tuple[KernelFigures, ...]
    memory_operations_share: float
    unified_share_time: float
    unified_share_bytes: float
    unified_share_count: float
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without the timeline."""
        figures = asdict(replace(self, timeline=Timeline("", measured=True)))
        del figures["timeline"]
        return figures


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Figures of all devices in a file with ``events`` records.

    No devices: no GPU did anything. ``facts`` may have ``recorded_s``; ``host`` is the Timeline of the host's memory,
    empty if not recorded.
    """

    source: str
    devices: tuple[DeviceProfile, ...]
    host: Timeline
    facts: dict[str, float | str]
    events: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "profile",
            "source": self.source,
            "events": self.events,
            "facts": dict(self.facts),
            "devices": [device.to_json() for device in self.devices],
        }


PYTHON = "Python"  # no operation was running
DATA_LOADER = "DataLoader"


@dataclass(frozen=True)
class Spans:
    """Sorted disjoint spans of time, the union of overlapping ones."""

    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, starts: Numbers, ends: Numbers) -> Spans:
        if not len(starts):
            return cls(np.empty(0), np.empty(0))
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        apart = starts[1:] > ends[:-1]
        return cls(starts[np.r_[True, apart]], ends[np.r_[apart, True]])

    def __or__(self, other: Spans) -> Spans:
        return Spans.of(np.r_[self.starts, other.starts], np.r_[self.ends, other.ends])

    @property
    def seconds(self) -> float:
        return float(np.sum(self.ends - self.starts))

    def until(self, times: Numbers) -> Numbers:
        """Return the seconds covered before each of ``times``."""
        if not len(self.starts):
            return np.zeros(len(times))
        lengths = self.ends - self.starts
        before = np.r_[0.0, np.cumsum(lengths)]
        index = np.searchsorted(self.starts, times, side="right") - 1
        last = np.maximum(index, 0)
        return np.where(index < 0, 0.0, before[last] + np.clip(times - self.starts[last], 0.0, lengths[last]))

    def within(self, begins: Numbers, ends: Numbers) -> Numbers:
        """Return the seconds covered between each of ``begins`` and its end."""
        covered: Numbers = np.maximum(self.until(ends) - self.until(begins), 0.0)
        return covered

    def gaps(self, begin: float, end: float) -> Spans:
        """Return the spans between ``begin`` and ``end`` that are not covered."""
        starts, ends = np.r_[begin, self.ends], np.r_[self.starts, end]
        real = ends > starts
        return Spans(starts[real], ends[real])


def spans_of(starts: Numbers, durations: Numbers) -> Spans:
    return Spans.of(starts, starts + durations)


class Host:
    """Calls and operations of the host, searchable by time. Built once for all devices."""

    def __init__(self, activity: Activity) -> None:
        call = activity.call
        self.recorded = len(call) > 0
        order = np.argsort(call["start"], kind="stable")
        self.start, self.kind = call["start"][order], call["kind"][order]
        self.end = self.start + call["duration"][order]
        self.thread, self.name = call["thread"][order], call["name"][order]
        self.by_key = np.argsort(call["key"][order], kind="stable")
        self.keys = call["key"][order][self.by_key]
        self.waits, self.allocations = (
            Spans.of(self.start[self.kind == kind], self.end[self.kind == kind]) for kind in (SYNCHRONIZE, ALLOCATE)
        )
        self.loads = spans_of(activity.loads["start"], activity.loads["duration"])
        self._outermost(activity)

    def _outermost(self, activity: Activity) -> None:
        """Find the operations inside no other. Threads are laid end to end, so that one search serves all."""
        operations = activity.operations
        start, thread = operations["start"], operations["thread"]
        end = start + operations["duration"]
        every = [*(column for column in (start, end, self.start) if len(column))]
        self.origin = min((float(np.min(column)) for column in every), default=0.0)
        self.stride = max((float(np.max(column)) for column in every), default=0.0) - self.origin + 1.0
        start, end = (times - self.origin + thread * self.stride for times in (start, end))
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        before = np.r_[-np.inf, np.maximum.accumulate(end)[:-1]] if len(end) else end
        top = start >= before
        self.top_start, self.top_end, self.top_name = start[top], end[top], operations["name"][order][top]

    def operation(self, times: Numbers, threads: Numbers) -> Numbers:
        """Return the name's number of the outermost operation on each thread at each time; -1: none."""
        if not len(self.top_start):
            return np.full(len(times), -1)
        at = times - self.origin + threads * self.stride
        index = np.maximum(np.searchsorted(self.top_start, at, side="right") - 1, 0)
        inside = (self.top_start[index] <= at) & (at <= self.top_end[index])
        return np.where(inside, self.top_name[index], -1)

    def call_of(self, keys: Numbers) -> Numbers:
        """Return the first call with each key, -1: none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[index] == keys) & (keys >= 0), self.by_key[index], -1)

    def last_call(self, kind: int, times: Numbers) -> Numbers:
        """Return the last call of ``kind`` that began before each time, -1: none."""
        chosen = np.flatnonzero(self.kind == kind)
        index = np.searchsorted(self.start[chosen], times, side="right") - 1
        return np.where(index < 0, -1, chosen[index]) if len(chosen) else np.full(len(times), -1)


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The gaps of a device. ``parts``: seconds, [cause, gap]; ``launch``: the call for the next kernel, or -1."""

    spans: Spans
    parts: Numbers
    launch: Numbers
    following: Numbers  # index of the kernel after each gap; -1 after the last


def idle_of(
    spans: Spans, *, collectives: Spans, copies: Spans, kernel_starts: Numbers, kernel_keys: Numbers, host: Host
) -> Idle:
    """Divide every gap's time between causes. ``kernel_starts`` are sorted.

    A call that waits for the device also keeps the host from launching ahead: the next launch comes later by the time
    that it waited before the gap, so that much of the gap is caused by the call.
    """
    begins, ends = spans.starts, spans.ends
    following = np.searchsorted(kernel_starts, ends)
    last = following == len(kernel_starts)
    following = np.where(last, -1, following)
    keys = kernel_keys[following] if len(kernel_keys) else following
    launch = np.where(last, -1, host.call_of(keys))
    called = host.start[launch] if host.recorded else np.zeros(len(ends))
    is_known = launch >= 0
    host_ends = np.where(is_known, np.clip(called, begins, ends), ends)
    parts = np.zeros((len(CAUSES), len(begins)))
    covered = Spans(np.empty(0), np.empty(0))
    for cause, more in (("collective", collectives), ("copy", copies)):
        before, covered = covered.within(begins, ends), covered | more
        parts[CAUSES.index(cause)] = covered.within(begins, ends) - before
    parts[CAUSES.index("launch")] = (ends - host_ends) - covered.within(host_ends, ends)
    on_host = {"synchronization": host.waits, "allocation": host.allocations, "data loader": host.loads}
    for cause, more in on_host.items():
        before, covered = covered.within(begins, host_ends), covered | more
        parts[CAUSES.index(cause)] = covered.within(begins, host_ends) - before
    rest = np.maximum((host_ends - begins) - covered.within(begins, host_ends), 0.0)
    synchronizing = np.minimum(_waited_before(host.waits, begins), rest)
    parts[CAUSES.index("synchronization")] += synchronizing
    # After the last kernel the host launched nothing: its doing, if its calls were recorded.
    caused_by_host = is_known | (last & host.recorded)
    parts[CAUSES.index("cpu")] = np.where(caused_by_host, rest - synchronizing, 0.0)
    parts[CAUSES.index("unknown")] = np.where(caused_by_host, 0.0, rest - synchronizing)
    return Idle(spans=spans, parts=np.maximum(parts, 0.0), launch=launch, following=following)


def _waited_before(waits: Spans, times: Numbers) -> Numbers:
    """Return how long the wait at each time has lasted; 0 without one."""
    if not len(waits.starts):
        return np.zeros(len(times))
    index = np.searchsorted(waits.starts, times, side="right") - 1
    last = np.maximum(index, 0)
    return np.where((index >= 0) & (waits.ends[last] >= times), times - waits.starts[last], 0.0)


def labels_of(idle: Idle, host: Host, texts: Texts, rows: DeviceRows) -> Numbers:
    """Return the number of each gap's label, by its largest cause.

    It is the name of the copy or collective, of the operation that synchronized, allocated or launched the next
    kernel, or of the next kernel.
    """
    ends = idle.spans.ends
    main = idle.parts.argmax(axis=0)
    labels = np.full(len(ends), texts.number(""))
    kernels = rows.name[rows.computing]
    came_next = idle.following >= 0
    labels[came_next] = kernels[idle.following[came_next]]
    for cause, chosen in (("collective", rows.collective), ("copy", rows.memory)):
        mine = np.flatnonzero(main == CAUSES.index(cause))
        if len(mine):
            index = np.searchsorted(rows.start[chosen], ends[mine]) - 1
            labels[mine] = rows.name[chosen][np.maximum(index, 0)]
    for cause, kind in (("synchronization", SYNCHRONIZE), ("allocation", ALLOCATE)):
        mine = np.flatnonzero(main == CAUSES.index(cause))
        if len(mine):
            labels[mine] = _call_labels(host, texts, host.last_call(kind, ends[mine]))
    labels[main == CAUSES.index("data loader")] = texts.number(DATA_LOADER)
    mine = np.flatnonzero((main == CAUSES.index("cpu")) & (idle.launch >= 0))
    if len(mine):
        launch = idle.launch[mine]
        running = host.operation(host.start[launch], host.thread[launch])
        labels[mine] = np.where(running >= 0, running, texts.number(PYTHON))
    return labels


def _call_labels(host: Host, texts: Texts, calls: Numbers) -> Numbers:
    """Return a label for each call: "aten::item (cudaStreamSynchronize)", or its own name outside of operations."""
    names = host.name[calls]
    operations = host.operation(host.start[calls], host.thread[calls])
    all_texts = texts.all()
    pairs, inverse = np.unique(np.stack([operations, names]), axis=1, return_inverse=True)
    labels = [
        texts.number(f"{all_texts[operation]} ({all_texts[name]})") if operation >= 0 else int(name)
        for operation, name in pairs.T
    ]
    return np.array(labels)[inverse.ravel()]


def profile_of(activity: Activity, *, source: str, events: int, request: str) -> Profile:
    """Compute figures and Timelines. Raises FormatError, with ``request``, for impossible times, sizes or devices."""
    _check(activity, request)
    host = Host(activity)
    found = np.union1d(activity.device["device"], activity.memory["device"])
    numbers = [int(number) for number in found if number != HOST]
    return Profile(
        source=source,
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


@dataclass(eq=False)
class _Columns(Mapping[str, Any]):
    """Columns built on access: all at once they would be as large as the Timeline."""

    _names: Mapping[str, Any]
    _make: Callable[[str], Any]

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
