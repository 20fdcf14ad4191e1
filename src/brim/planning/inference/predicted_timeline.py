"""Predict the Timeline of a generation: the pools' memory, and the passes that the planner simulated.

The promise is read from the same schedule, so a steady pass lasts exactly as long as promised.
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

MOST_EVENTS = 200_000  # of the passes; further ones look the same
_SIMULATED, _MOST_SIMULATED = 4, 64  # token passes: the first try, and the limit where no two last equally long
_STEADY = 1e-9


def beside(handle: WeightStreaming, strategy: GenerationStrategy) -> Timeline:
    """Predict the Timeline beside the measured one: as many passes, from the same moment on.

    Loading takes no time. Where compute was not recorded, there are no passes.
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
    """Predict a number of ``passes``, the prompt's first, from ``begin_s`` on; memory is held from ``start_s`` on."""
    plan = strategy.plan
    timeline = Timeline(f"{plan.model} {plan.task}", measured=False)
    timeline.facts |= {f"promised_bytes.{tier}": count for tier, count in plan.promise.peak_bytes.items()}
    timeline.facts["promised_step_s"] = plan.promise.step_s
    for storage, (tier, count, label) in enumerate(_allocations(strategy)):
        if count:
            timeline.add(EventKind.ALLOC, tier, count, time_s=start_s, storage=storage, label=label)
    _write_passes(strategy, timeline, passes, begin_s)
    return timeline


# -- memory


def _allocations(strategy: GenerationStrategy) -> Iterator[tuple[str, int, str]]:
    """Yield tier, bytes and name of residents, ring slots, blocks in RAM, buffers and the KV cache."""
    plan, job, compute = strategy.plan, strategy.job, strategy.hardware.compute
    choices, expert_plan = plan.choices(NAME), strategy.cut.experts
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
    largest = max(largest, 0 if expert_plan is None else expert_plan.staging_bytes)
    for slot in range(plan.settings.get(STAGING_SLOTS, 0)):
        yield RAM, largest, f"staging slot {slot}"


def _expert_slots(strategy: GenerationStrategy) -> Iterator[tuple[str, int, str]]:
    """Yield the slots of every layer of experts, and the experts that rest in RAM."""
    expert_plan, compute = strategy.cut.experts, strategy.hardware.compute
    for each in () if expert_plan is None else expert_plan.layers:
        assert expert_plan is not None
        yield compute, each.held_bytes(expert_plan.slots), f"{each.layer.path}, slots"
        if compute != RAM and expert_plan.choice == experts.CACHE_RAM:
            yield RAM, each.layer.count * each.packed_bytes, f"{each.layer.path}, experts"


def _cached(strategy: GenerationStrategy) -> Iterator[tuple[str, int, str]]:
    """Yield the KV cache, its resting tokens, and the slots that those are loaded through."""
    for tier, count in strategy.cache_bytes.items():
        yield tier, count, "KV cache" if tier == strategy.hardware.compute else "older part of the KV cache"


# -- passes


@dataclass(frozen=True, kw_only=True)
class _Stall:
    """A wait of a pass that nothing hides, for copies over all ``links`` at once."""

    label: str
    bytes: float
    links: list[tuple[str, str]]
    seconds: float


def _stalls(strategy: GenerationStrategy, tokens: int) -> Iterator[_Stall]:
    """Yield the waits for experts (their mean number) and for resting tokens of the KV cache."""
    expert_plan, hardware = strategy.cut.experts, strategy.hardware
    for each in () if expert_plan is None else expert_plan.layers:
        assert expert_plan is not None
        links, count = expert_plan.links(hardware), each.loads(expert_plan.slots, tokens) * each.packed_bytes
        seconds = max(count / hardware.link(*link).bytes_per_s for link in links)
        yield _Stall(label=f"{each.layer.path}, experts", bytes=count, links=links, seconds=seconds)
    placement = strategy.placement
    if placement is not None and placement.resting:
        seconds = older_tokens_s(placement, hardware)
        links = [(RAM, hardware.compute)]
        yield _Stall(label="older part of the KV cache", bytes=placement.moved_bytes, links=links, seconds=seconds)


def _write_passes(strategy: GenerationStrategy, timeline: Timeline, passes: int, begin_s: float) -> None:
    """Write the simulated passes of the prompt and the first tokens, then repeat the steady one."""
    prompts = min(passes, -(-strategy.sizes.prompt // strategy.sizes.chunk))
    done = _simulated(strategy, passes, prompts)
    repeated = len(done.lasts) - 2
    axis = _Axis(begin_s, done.ends_s, repeated)
    stalls = [list(_stalls(strategy, strategy.sizes.batch * tokens)) for tokens in (1, strategy.sizes.chunk)]
    limit = len(timeline) + MOST_EVENTS
    for number in range(passes):
        if len(timeline) > limit:
            return
        waits = stalls[number < prompts]
        axis.add(sum(stall.seconds for stall in waits))
        _write_pass(timeline, done, min(number, repeated), axis, strategy.hardware.compute)
        at_s = axis.end_s - axis.stall_s
        for stall in waits:
            _write_stall(timeline, stall, at_s, strategy.hardware)
            at_s += stall.seconds
        _computed(timeline, strategy.hardware.compute, axis.start_s, axis.end_s, FORWARD, WHOLE)


def _simulated(strategy: GenerationStrategy, passes: int, prompts: int) -> Passes:
    """Simulate all passes, or until they are steady: a long prompt pass fills the ring first."""
    choices, slots = strategy.plan.choices(NAME), strategy.plan.settings[RING_SLOTS]
    most = min(passes - prompts + 1, _MOST_SIMULATED)  # loads for one more pass overlap with the end of the last
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
    """The times of passes: the simulated ones, each with its stall at its end, and then copies of the steady one.

    Other lanes pause during a stall.
    """

    def __init__(self, begin_s: float, ends_s: Sequence[float], repeated: int) -> None:
        self._begin_s, self._simulated_s, self._repeated = begin_s, ends_s, repeated
        self._ends_s: list[float] = []  # of passes without stalls
        self._stalls_s = [0.0]  # the sum of stalls after each number of passes

    def add(self, stall_s: float) -> None:
        """Move on to the next pass, which the properties describe from now on."""
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
        """Convert a simulated time of the pass's computation."""
        return self._begin_s + at_s + self._shift_s + self._stalls_s[-2]

    def beside(self, at_s: float) -> float:
        """Convert a simulated time of a copy, which may lie in an earlier pass."""
        at_s += self._shift_s
        return self._begin_s + at_s + self._stalls_s[min(bisect_left(self._ends_s, at_s), len(self._ends_s) - 1)]

    @property
    def _shift_s(self) -> float:
        number = len(self._ends_s) - 1
        return self._ends_s[-1] - self._simulated_s[min(number, self._repeated)]


def _write_pass(timeline: Timeline, done: Passes, number: int, axis: _Axis, compute: str) -> None:
    for index in done.of_pass(number):
        task, begin_s, end_s = done.schedule.tasks[index], done.schedule.begin_s[index], done.schedule.end_s[index]
        source, _, target = task.lane.rpartition(" -> ")
        if source:
            first_s, last_s = axis.beside(begin_s), axis.beside(end_s)
            _copied(timeline, source, target, task.bytes, first_s, last_s - first_s, task.name)
        elif task.name != BESIDE_BLOCKS:
            waited_s = done.waited_s(index)
            _waited(timeline, compute, axis.within(begin_s) - waited_s, waited_s, task.name)
            _computed(timeline, compute, axis.within(begin_s), axis.within(end_s), task.name, BLOCKS)


def _write_stall(timeline: Timeline, stall: _Stall, at_s: float, hardware: Hardware) -> None:
    for source, target in stall.links:
        took_s = stall.bytes / hardware.link(source, target).bytes_per_s
        _copied(timeline, source, target, round(stall.bytes), at_s, took_s, stall.label)
    _waited(timeline, hardware.compute, at_s, stall.seconds, stall.label)


def _copied(out: Timeline, source: str, target: str, count: int, begin_s: float, took_s: float, label: str) -> None:
    if took_s > 0:
        out.add(EventKind.COPY, target, count, time_s=begin_s, duration_s=took_s, source=source, label=label)


def _waited(out: Timeline, compute: str, begin_s: float, took_s: float, label: str) -> None:
    if took_s > 0:
        out.add(EventKind.IDLE, compute, 0, time_s=begin_s, duration_s=took_s, label=label, category="copy")


def _computed(out: Timeline, compute: str, begin_s: float, end_s: float, label: str, stream: int) -> None:
    out.add(EventKind.COMPUTE, compute, 0, time_s=begin_s, duration_s=end_s - begin_s, label=label, stream=stream)
