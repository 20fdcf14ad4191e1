"""Predict the Timeline of a training step, its tensors, computation and copies, by the machine's rates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from brim.core import EventKind, Hardware, Op, Phase, Timeline, Trace
from brim.estimation.simulation import simulate
from brim.planning.seconds.spans import BACKWARD, BLOCKS, FORWARD, UPDATE, WHOLE
from brim.predict import cost

_PHASES = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.OPTIMIZER: UPDATE}


_BEFORE_S = -1.0  # the time of tensors from before the step, until ``placed`` sets it


def step_timeline(
    name: str, trace: Trace, copies: Timeline, blocks: Iterable[str], hardware: Hardware, step_s: float
) -> Timeline:
    """The step of ``trace``, from 0 to ``step_s``; ``placed`` shifts it to its place in a measured timeline.

    ``copies`` has the COPY events, in order; each link is assumed to copy without pauses from the step's beginning.
    ``blocks`` are paths of modules: each gets a span of time, its waiting included.
    """
    clock = _Clock(trace, hardware, step_s)
    timeline = Timeline(name, measured=False)
    _write_memory(timeline, trace, clock, hardware.compute)
    parts = {part for block in blocks for part in block.split("+")}
    _write_compute(timeline, clock, sorted(parts, key=len, reverse=True), hardware.compute)
    _write_copies(timeline, copies, hardware)
    return timeline


def placed(foreseen: Timeline, measured: Timeline) -> Timeline:
    """``foreseen``, shifted in place to begin with the first step in ``measured``."""
    rows = zip(measured.column("kind"), measured.column("time_s"), strict=True)
    start_s = min(measured.column("time_s"), default=0.0)
    begin_s = min((time_s for kind, time_s in rows if kind == EventKind.COMPUTE), default=start_s)
    times = foreseen.column("time_s")
    for index, time_s in enumerate(times):
        times[index] = start_s if time_s < 0 else begin_s + time_s
    return foreseen


class _Clock:
    """Converts ticks to seconds: the step's seconds are divided among operations in proportion to their rooflines."""

    def __init__(self, trace: Trace, hardware: Hardware, step_s: float) -> None:
        self.ops = [op for op in trace.ops if op.step >= 0]
        took = [cost.op_s(op, hardware) + hardware.kernel_s for op in self.ops]
        share = step_s / (sum(took) or 1.0)
        self.starts_s = [0.0]
        for seconds in took:
            self.starts_s.append(self.starts_s[-1] + share * seconds)
        self._ticks = [op.at for op in self.ops]

    def at(self, tick: int) -> float:
        """Begin of the operation that includes ``tick``."""
        index = bisect_right(self._ticks, tick) - 1
        return self.starts_s[index] if index >= 0 else _BEFORE_S


def _write_memory(timeline: Timeline, trace: Trace, clock: _Clock, tier: str) -> None:
    """Add every storage as the simulation places it: through the caching allocator on CUDA."""
    ticks = sorted(
        tick
        for storage in trace.storages
        if storage.bytes
        for tick in (storage.born, storage.died)
        if tick is not None
    )
    moments = iter(ticks)
    time_s = _BEFORE_S
    for event in simulate(trace):
        if event.kind in (EventKind.ALLOC, EventKind.FREE):
            time_s = clock.at(next(moments))
        timeline.add(
            event.kind,
            tier,
            event.bytes,
            time_s=time_s,
            address=event.address,
            storage=event.storage,
            label=event.label,
            category=event.category,
            stack=event.stack,
        )


def _write_compute(timeline: Timeline, clock: _Clock, blocks: Sequence[str], tier: str) -> None:
    """Add a span for each phase, and for each uninterrupted run of a block's operations."""
    owners: dict[str, str] = {}
    for op in clock.ops:
        if op.module not in owners:
            owners[op.module] = next((b for b in blocks if f"{op.module}.".startswith(f"{b}.")), "")
    rows = list(zip(clock.ops, clock.starts_s, clock.starts_s[1:], strict=False))
    lanes: list[tuple[int, Callable[[tuple[Op, float, float]], str]]] = [
        (WHOLE, lambda row: _PHASES.get(row[0].phase, "")),
        (BLOCKS, lambda row: owners[row[0].module]),
    ]
    for lane, label_of in lanes:
        for label, group in groupby(rows, key=label_of):
            own = list(group)
            begin_s, end_s = own[0][1], own[-1][2]
            if label:
                timeline.add(
                    EventKind.COMPUTE, tier, 0, time_s=begin_s, duration_s=end_s - begin_s, label=label, stream=lane
                )


def _write_copies(timeline: Timeline, copies: Timeline, hardware: Hardware) -> None:
    free_s: dict[tuple[str, str], float] = {}
    for event in copies:
        if event.kind is not EventKind.COPY:
            continue
        link = event.source, event.tier
        took_s = hardware.link(*known_way(hardware, *link)).seconds(event.bytes)
        start_s = free_s.get(link, 0.0)
        free_s[link] = start_s + took_s
        timeline.add(
            EventKind.COPY,
            event.tier,
            event.bytes,
            time_s=start_s,
            duration_s=took_s,
            source=event.source,
            label=event.label,
        )


def known_way(hardware: Hardware, source: str, target: str) -> tuple[str, str]:
    """The link itself if it was measured, else the opposite one: a drive is assumed to write as fast as it reads."""
    have = {(link.source, link.target) for link in hardware.links}
    return (source, target) if (source, target) in have else (target, source)
