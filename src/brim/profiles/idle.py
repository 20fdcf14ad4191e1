"""Why a device did not compute: every gap between kernels, its time given to causes, and what was waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brim.profiles.activity import ALLOCATE, SYNCHRONIZE, Activity, Numbers
from brim.profiles.figures import CAUSES


@dataclass(frozen=True)
class Spans:
    """Disjoint spans of time in order: the union of whatever overlaps."""

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
        """Seconds covered before each of ``times``."""
        if not len(self.starts):
            return np.zeros(len(times))
        lengths = self.ends - self.starts
        before = np.r_[0.0, np.cumsum(lengths)]
        index = np.searchsorted(self.starts, times, side="right") - 1
        last = np.maximum(index, 0)
        return np.where(index < 0, 0.0, before[last] + np.clip(times - self.starts[last], 0.0, lengths[last]))

    def within(self, begins: Numbers, ends: Numbers) -> Numbers:
        """Seconds covered between each of ``begins`` and its end."""
        covered: Numbers = np.maximum(self.until(ends) - self.until(begins), 0.0)
        return covered

    def gaps(self, begin: float, end: float) -> Spans:
        """What is not covered of the time from ``begin`` to ``end``."""
        starts, ends = np.r_[begin, self.ends], np.r_[self.starts, end]
        real = ends > starts
        return Spans(starts[real], ends[real])


def spans_of(starts: Numbers, durations: Numbers) -> Spans:
    return Spans.of(starts, starts + durations)


class Host:
    """What the host did, ready to be asked about a moment. Made once for all devices."""

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
        """The operations that are in no other one. Threads are laid end to end: one search serves all."""
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
        """The outermost operation that ran on each thread at each time, as its name's number; -1: none."""
        if not len(self.top_start):
            return np.full(len(times), -1)
        at = times - self.origin + threads * self.stride
        index = np.maximum(np.searchsorted(self.top_start, at, side="right") - 1, 0)
        inside = (self.top_start[index] <= at) & (at <= self.top_end[index])
        return np.where(inside, self.top_name[index], -1)

    def call_of(self, keys: Numbers) -> Numbers:
        """The first call with each key, -1: none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        index = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[index] == keys) & (keys >= 0), self.by_key[index], -1)

    def last_call(self, kind: int, times: Numbers) -> Numbers:
        """The last call of ``kind`` that began before each time, -1: none."""
        chosen = np.flatnonzero(self.kind == kind)
        index = np.searchsorted(self.start[chosen], times, side="right") - 1
        return np.where(index < 0, -1, chosen[index]) if len(chosen) else np.full(len(times), -1)


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The gaps of one device. ``parts``: seconds, [cause, gap]; ``launch``: the call of what came next, or -1."""

    spans: Spans
    parts: Numbers
    launch: Numbers
    following: Numbers  # the kernel after each gap, as an index into those given; -1 after the last


def idle_of(
    spans: Spans, *, collectives: Spans, copies: Spans, kernel_starts: Numbers, kernel_keys: Numbers, host: Host
) -> Idle:
    """Give every gap's time to causes. ``kernel_starts`` are in order.

    A call that waits for the device also keeps the host from launching ahead: time that it had spent waiting before
    the gap began is time by which the launch after it came too late, so that much of what follows is its doing.
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
    ours = {"synchronization": host.waits, "allocation": host.allocations, "data loader": host.loads}
    for cause, more in ours.items():
        before, covered = covered.within(begins, host_ends), covered | more
        parts[CAUSES.index(cause)] = covered.within(begins, host_ends) - before
    rest = np.maximum((host_ends - begins) - covered.within(begins, host_ends), 0.0)
    synchronizing = np.minimum(_waited_before(host.waits, begins), rest)
    parts[CAUSES.index("synchronization")] += synchronizing
    # After the last kernel nothing was launched, which is the host's doing where its calls were recorded at all.
    told = is_known | (last & host.recorded)
    parts[CAUSES.index("cpu")] = np.where(told, rest - synchronizing, 0.0)
    parts[CAUSES.index("unknown")] = np.where(told, 0.0, rest - synchronizing)
    return Idle(spans=spans, parts=np.maximum(parts, 0.0), launch=launch, following=following)


def _waited_before(waits: Spans, times: Numbers) -> Numbers:
    """How long a wait that is going on at each time has lasted."""
    if not len(waits.starts):
        return np.zeros(len(times))
    index = np.searchsorted(waits.starts, times, side="right") - 1
    last = np.maximum(index, 0)
    return np.where((index >= 0) & (waits.ends[last] >= times), times - waits.starts[last], 0.0)
