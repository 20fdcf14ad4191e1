"""The Timeline that a way to generate foresees: what the pools hold, and passes as the planner simulated them.

It is the schedule that the promise was read from, written down: a steady pass lasts exactly as long as promised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from brim.core import EventKind, Hardware, Timeline
from brim.core.hardware import RAM
from brim.planning.inference.choose import GenerationStrategy, older_tokens_s
from brim.planning.seconds.spans import BLOCKS, FORWARD, WHOLE
from brim.planning.solver import BlockCost
from brim.planning.solver.passes import BESIDE_BLOCKS, Passes, simulate_passes
from brim.techniques.experts import technique as experts
from brim.techniques.streaming.placement import COMPUTE_RAM
from brim.techniques.streaming.weight_streaming import (
    FROM_DISK,
    FROM_RAM,
    NAME,
    RING_SLOTS,
    STAGING_SLOTS,
    WeightStreaming,
)

MOST_EVENTS = 200_000  # of the passes; more of them look the same
_SIMULATED, _MOST_SIMULATED = 4, 64  # passes of tokens, until one lasts as long as the one before it
_STEADY = 1e-9


def beside(handle: WeightStreaming, strategy: GenerationStrategy) -> Timeline:
    """What the plan in force foresees, beside what was measured: as many passes, from the same moment on.

    Loading is there from the beginning, without time. Where compute was not recorded, no passes are written.
    """
    measured = handle.timeline()
    kinds, times, streams = (measured.column(name) for name in ("kind", "time_s", "stream"))
    passes = [
        time_s
        for kind, time_s, stream, label in zip(kinds, times, streams, _labels(measured), strict=True)
        if kind == EventKind.COMPUTE and stream == WHOLE and label == FORWARD
    ]
    start_s = min(times, default=0.0)
    return foreseen(strategy, len(passes), start_s=start_s, begin_s=min(passes, default=start_s))


def _labels(timeline: Timeline) -> Iterator[str]:
    indices, names = timeline.texts("label")
    return map(names.__getitem__, indices)


def foreseen(strategy: GenerationStrategy, passes: int, *, start_s: float = 0.0, begin_s: float = 0.0) -> Timeline:
    """So many passes, those of the prompt first, from ``begin_s`` on; what is held is there from ``start_s`` on."""
    plan = strategy.plan
    made = Timeline(f"{plan.model} {plan.task}", measured=False)
    made.facts |= {f"promised_bytes.{tier}": count for tier, count in plan.promise.peak_bytes.items()}
    made.facts["promised_step_s"] = plan.promise.step_s
    for storage, (tier, count, label) in enumerate(_held(strategy)):
        if count:
            made.add(EventKind.ALLOC, tier, count, time_s=start_s, storage=storage, label=label)
    _write_passes(strategy, made, passes, begin_s)
    return made


# -- what is held


def _held(strategy: GenerationStrategy) -> Iterator[tuple[str, int, str]]:
    """What stays, the ring, and what waits in RAM or passes through it: tier, bytes and name."""
    plan, job, compute = strategy.plan, strategy.job, strategy.hardware.compute
    choices, way = plan.choices(NAME), strategy.cut.way
    slots = list(_expert_slots(strategy))
    yield compute, job.fixed_bytes - sum(count for tier, count, _ in slots if tier == compute), "outside blocks"
    yield from slots
    streamed: list[BlockCost] = []
    for block in job.blocks:
        choice = choices[block.name]
        if choice == COMPUTE_RAM:
            yield RAM, block.bytes, block.name
        elif choice == FROM_DISK or (choice == FROM_RAM and compute != RAM):
            streamed += [block] * bool(block.uses)
            yield RAM, block.bytes * (choice == FROM_RAM), block.name
        else:
            yield compute, block.bytes, block.name
    slot_bytes = max((block.bytes for block in streamed), default=0)
    for slot in range(plan.settings[RING_SLOTS] if streamed else 0):
        yield compute, slot_bytes, f"ring slot {slot}"
    yield RAM, job.bounce_in(choices.values(), compute), "bounce buffer"
    yield from _cached(strategy)
    largest = max((b.passing_bytes for b in streamed if choices[b.name] == FROM_DISK), default=0)
    largest = max(largest, 0 if way is None else way.staging_bytes)
    for slot in range(plan.settings.get(STAGING_SLOTS, 0)):
        yield RAM, largest, f"staging slot {slot}"


def _expert_slots(strategy: GenerationStrategy) -> Iterator[tuple[str, int, str]]:
    """The slots of every layer of experts, and in RAM the experts themselves where they rest there."""
    way, compute = strategy.cut.way, strategy.hardware.compute
    for each in () if way is None else way.layers:
        assert way is not None
        yield compute, each.held_bytes(way.slots), f"{each.layer.path}, slots"
        if compute != RAM and way.choice == experts.CACHE_RAM:
            yield RAM, each.layer.count * each.packed_bytes, f"{each.layer.path}, experts"


def _cached(strategy: GenerationStrategy) -> Iterator[tuple[str, int, str]]:
    """The KV cache, its older tokens where they rest, and the slots in which they pass."""
    for tier, count in strategy.cache_bytes.items():
        yield tier, count, "KV cache" if tier == strategy.hardware.compute else "older part of the KV cache"


# -- passes


@dataclass(frozen=True, kw_only=True)
class _Stall:
    """What a pass waits for that nothing hides, by each of ``ways`` at once."""

    label: str
    bytes: float
    ways: list[tuple[str, str]]
    seconds: float


def _stalls(strategy: GenerationStrategy, tokens: int) -> Iterator[_Stall]:
    """Experts that are asked for when routers have spoken, in the mean, and older tokens of the KV cache."""
    way, hardware = strategy.cut.way, strategy.hardware
    for each in () if way is None else way.layers:
        assert way is not None
        ways, count = way.ways(hardware), each.loads(way.slots, tokens) * each.packed_bytes
        seconds = max(count / hardware.link(*one).bytes_per_s for one in ways)
        yield _Stall(label=f"{each.layer.path}, experts", bytes=count, ways=ways, seconds=seconds)
    placement = strategy.placement
    if placement is not None and placement.resting:
        seconds = older_tokens_s(placement, hardware)
        ways = [(RAM, hardware.compute)]
        yield _Stall(label="older part of the KV cache", bytes=placement.moved_bytes, ways=ways, seconds=seconds)


def _write_passes(strategy: GenerationStrategy, made: Timeline, passes: int, begin_s: float) -> None:
    """The prompt's passes and the first tokens' as they were simulated, then the steady one again and again."""
    prompts = min(passes, -(-strategy.sizes.prompt // strategy.sizes.chunk))
    done = _simulated(strategy, passes, prompts)
    repeated = len(done.lasts) - 2
    axis = _Axis(begin_s, done.ends_s, repeated)
    stalls = [list(_stalls(strategy, strategy.sizes.batch * tokens)) for tokens in (1, strategy.sizes.chunk)]
    limit = len(made) + MOST_EVENTS
    for number in range(passes):
        if len(made) > limit:
            return
        waits = stalls[number < prompts]
        axis.add(sum(stall.seconds for stall in waits))
        _write_pass(made, done, min(number, repeated), axis, strategy.hardware.compute)
        at_s = axis.end_s - axis.stall_s
        for stall in waits:
            _write_stall(made, stall, at_s, strategy.hardware)
            at_s += stall.seconds
        _computed(made, strategy.hardware.compute, axis.start_s, axis.end_s, FORWARD, WHOLE)


def _simulated(strategy: GenerationStrategy, passes: int, prompts: int) -> Passes:
    """All of the passes, or as many as it takes until they are steady: a long pass of the prompt fills the ring."""
    choices, slots = strategy.plan.choices(NAME), strategy.plan.settings[RING_SLOTS]
    most = min(passes - prompts + 1, _MOST_SIMULATED)  # loads for one more go on beside the end of the last
    tokens = min(_SIMULATED, most)
    while True:
        jobs = [strategy.prompt_job] * prompts + [strategy.job] * tokens
        done = simulate_passes(jobs, strategy.hardware, choices, slots)
        if tokens == most:
            return done
        before_s, last_s = (done.ends_s[at] - done.ends_s[at - 1] for at in (-3, -2))
        if abs(last_s - before_s) <= _STEADY * last_s:
            return done
        tokens = min(2 * tokens, most)


class _Axis:
    """Where passes lie in time: the simulated ones, each with what it waits for at its end, and then copies of one.

    What other lanes do while a pass waits stands still for as long.
    """

    def __init__(self, begin_s: float, ends_s: Sequence[float], repeated: int) -> None:
        self._begin_s, self._simulated_s, self._repeated = begin_s, ends_s, repeated
        self._ends_s: list[float] = []  # of passes by their schedule
        self._stalls_s = [0.0]  # of all that are over, by their number

    def add(self, stall_s: float) -> None:
        """One more pass, which all that is asked is about from now on."""
        number = len(self._ends_s)
        if number <= self._repeated:
            self._ends_s.append(self._simulated_s[number])
        else:
            before_s, end_s = self._simulated_s[self._repeated - 1 : self._repeated + 1]
            self._ends_s.append(self._ends_s[-1] + end_s - before_s)
        self._stalls_s.append(self._stalls_s[-1] + stall_s)

    @property
    def start_s(self) -> float:
        number = len(self._ends_s) - 1
        return self._begin_s + (self._ends_s[number - 1] if number else 0.0) + self._stalls_s[number]

    @property
    def end_s(self) -> float:
        return self._begin_s + self._ends_s[-1] + self._stalls_s[-1]

    @property
    def stall_s(self) -> float:
        return self._stalls_s[-1] - self._stalls_s[-2]

    def within(self, at_s: float) -> float:
        """A moment of the pass's own computing."""
        return self._begin_s + at_s + self._shift_s + self._stalls_s[-2]

    def beside(self, at_s: float) -> float:
        """A moment of what goes on beside passes: it may lie in one before."""
        at_s += self._shift_s
        return self._begin_s + at_s + self._stalls_s[min(bisect_left(self._ends_s, at_s), len(self._ends_s) - 1)]

    @property
    def _shift_s(self) -> float:
        number = len(self._ends_s) - 1
        return self._ends_s[-1] - self._simulated_s[min(number, self._repeated)]


def _write_pass(made: Timeline, done: Passes, number: int, axis: _Axis, compute: str) -> None:
    for index in done.of_pass(number):
        task, begin_s, end_s = done.schedule.tasks[index], done.schedule.begin_s[index], done.schedule.end_s[index]
        source, _, target = task.lane.rpartition(" -> ")
        if source:
            first_s, last_s = axis.beside(begin_s), axis.beside(end_s)
            _copied(made, source, target, task.bytes, first_s, last_s - first_s, task.name)
        elif task.name != BESIDE_BLOCKS:
            waited_s = done.waited_s(index)
            _waited(made, compute, axis.within(begin_s) - waited_s, waited_s, task.name)
            _computed(made, compute, axis.within(begin_s), axis.within(end_s), task.name, BLOCKS)


def _write_stall(made: Timeline, stall: _Stall, at_s: float, hardware: Hardware) -> None:
    for source, target in stall.ways:
        took_s = stall.bytes / hardware.link(source, target).bytes_per_s
        _copied(made, source, target, round(stall.bytes), at_s, took_s, stall.label)
    _waited(made, hardware.compute, at_s, stall.seconds, stall.label)


def _copied(made: Timeline, source: str, target: str, count: int, begin_s: float, took_s: float, label: str) -> None:
    if took_s > 0:
        made.add(EventKind.COPY, target, count, time_s=begin_s, duration_s=took_s, source=source, label=label)


def _waited(made: Timeline, compute: str, begin_s: float, took_s: float, label: str) -> None:
    if took_s > 0:
        made.add(EventKind.IDLE, compute, 0, time_s=begin_s, duration_s=took_s, label=label, category="copy")


def _computed(made: Timeline, compute: str, begin_s: float, end_s: float, label: str, stream: int) -> None:
    made.add(EventKind.COMPUTE, compute, 0, time_s=begin_s, duration_s=end_s - begin_s, label=label, stream=stream)


__all__ = ["beside", "foreseen"]
