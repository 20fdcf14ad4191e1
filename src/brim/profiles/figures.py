"""Figures of a profile: a device's seconds of computing, copying and waiting, and the causes of gaps in between."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from brim.core import Timeline
from brim.profiles.activity import ALLOCATE, SYNCHRONIZE, Activity, DeviceRows, Numbers, Texts

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Figures and Timeline of a device.

    ``wall_s`` runs from the first step or activity to the last. In ``busy_s`` a kernel ran (collectives do not count:
    they wait for others), ``idle_s`` is the rest, by cause in ``idle_by_cause``, the 20 longest gaps in ``gaps``.
    In ``copy_s`` a copy or memset ran, in ``overlap_s`` beside a kernel; in ``collective_s`` a collective.
    ``memory_operations_share``: seconds of copies and memsets over those of all activities, as in the summaries of
    Nsight Systems. ``unified_share_*``: managed memory's share of copies and memsets, by time, bytes and number.
    Nsight Systems records migrations of managed memory, PyTorch's profiler only the program's own copies.
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
    migrations: dict[str, Migration]
    page_faults: int
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without the timeline."""
        figures = asdict(replace(self, timeline=Timeline("", measured=True)))
        del figures["timeline"]
        return figures


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Figures of all devices in a file of the ``kind`` "pytorch" or "nsight" with ``events`` records.

    No devices: no GPU did anything. ``facts`` may have ``recorded_s``, ``page_faults_cpu``, ``schema``; ``host`` is
    the Timeline of the host's memory, empty if not recorded.
    """

    source: str
    kind: str
    devices: tuple[DeviceProfile, ...]
    host: Timeline
    facts: dict[str, float | str]
    events: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
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
