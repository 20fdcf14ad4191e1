"""The Timeline that a generation's plan foresees: what the pools hold, and the steps as the planner counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from brim.core import EventKind, Hardware, Plan, Timeline
from brim.core.hardware import DISK, RAM
from brim.planner import BlockCost, Job
from brim.run.fit.machine import Need, make_job
from brim.run.plan.choosing import rate_of, source_of
from brim.run.plan.expert_plans import ExpertWay, expert_ways
from brim.run.timing.spans import BLOCKS, FORWARD, WHOLE
from brim.techniques.experts import technique as experts
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import COMPUTE_RAM
from brim.techniques.streaming.weight_streaming import (
    FROM_DISK,
    FROM_RAM,
    NAME,
    RING_SLOTS,
    STAGING_SLOTS,
    WeightStreaming,
)

MOST_EVENTS = 200_000  # of the steps; more of them look the same


def beside(handle: WeightStreaming, hardware: Hardware) -> Timeline:
    """What the plan in force foresees, beside what was measured: as many passes, from the same moment on.

    The first pass takes the plan's prompt, all others a token of each sequence. Loading is there from the beginning,
    without time. Where compute was not recorded, no passes are written.
    """
    measured = handle.timeline()
    kinds, times, streams = (measured.column(name) for name in ("kind", "time_s", "stream"))
    passes = [
        time_s
        for kind, time_s, stream, label in zip(kinds, times, streams, _labels(measured), strict=True)
        if kind == EventKind.COMPUTE and stream == WHOLE and label == FORWARD
    ]
    foreseen = Foreseen.of(handle, hardware)
    start_s = min(times, default=0.0)
    return foreseen.timeline(len(passes), start_s=start_s, begin_s=min(passes, default=start_s))


def _labels(timeline: Timeline) -> Iterator[str]:
    indices, names = timeline.texts("label")
    return map(names.__getitem__, indices)


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What a generation's plan says of its passes. ``first`` is the one with the prompt, ``next`` any other.

    ``experts`` is how those of a mixture are cached; None: there are none, or they come with their layer.
    """

    plan: Plan
    hardware: Hardware
    first: Job
    next: Job
    experts: ExpertWay | None = None

    @classmethod
    def of(cls, handle: WeightStreaming, hardware: Hardware) -> Foreseen:
        settings = handle.plan.settings
        batch, way = settings.get("batch", 1), _expert_way(handle, hardware)
        first, other = (
            _job(handle, hardware, way, tokens) for tokens in (batch * settings.get("prompt_tokens", 1), batch)
        )
        return cls(plan=handle.plan, hardware=hardware, first=first, next=other, experts=way)

    def timeline(self, passes: int, *, start_s: float = 0.0, begin_s: float = 0.0) -> Timeline:
        """So many passes, the first of which begins at ``begin_s``; what is held is there from ``start_s`` on."""
        made = Timeline(f"{self.plan.model} {self.plan.task}", measured=False)
        promise = self.plan.promise
        made.facts |= {f"promised_bytes.{tier}": count for tier, count in promise.peak_bytes.items()}
        made.facts["promised_step_s"] = promise.step_s
        self._hold(made, start_s)
        run = _Schedule(self, made, begin_s)
        prompt_tokens = self.plan.settings.get("batch", 1) * self.plan.settings.get("prompt_tokens", 1)
        for number, job in enumerate((self.first, *[self.next] * (passes - 1))[:passes]):
            if len(made) > MOST_EVENTS:
                break
            run.step(job, self.plan.settings.get("batch", 1) if number else prompt_tokens)
        return made

    @cached_property
    def _choices(self) -> dict[str, str]:
        return self.plan.choices(NAME)

    def choice(self, block: BlockCost) -> str:
        return self._choices[block.name]

    def ways(self, choice: str) -> list[tuple[str, str]]:
        """The links that a block takes to the compute tier."""
        last = [] if self.hardware.compute == RAM else [(RAM, self.hardware.compute)]
        return [(DISK, RAM), *last] if choice == FROM_DISK else last if choice == FROM_RAM else []

    def _hold(self, made: Timeline, start_s: float) -> None:
        """What stays, the ring, and what waits in RAM or passes through it."""
        compute, job = self.hardware.compute, self.next
        slots = list(self._expert_slots())
        outside = job.fixed_bytes - sum(count for tier, count, _ in slots if tier == compute)
        held: list[tuple[str, int, str]] = [(compute, outside, "outside blocks"), *slots]
        streamed: list[BlockCost] = []
        for block in job.blocks:
            choice = self.choice(block)
            if choice == COMPUTE_RAM:
                held.append((RAM, block.bytes, block.name))
            elif not self.ways(choice):
                held.append((compute, block.bytes, block.name))
            else:
                streamed += [block] * bool(block.uses)
                held += [(RAM, block.bytes, block.name)] * (choice == FROM_RAM)
        slot_bytes = max((block.bytes for block in streamed), default=0)
        held += [(compute, slot_bytes, f"ring slot {slot}") for slot in range(self.slots if streamed else 0)]
        held += [(RAM, job.bounce_bytes, "bounce buffer")]
        held += list(self._cached())
        if STAGING_SLOTS in self.plan.settings:
            largest = max((b.bytes for b in streamed if self.choice(b) == FROM_DISK), default=0)
            largest = max(largest, 0 if self.experts is None else self.experts.staging_bytes)
            held += [(RAM, largest, f"staging slot {slot}") for slot in range(self.plan.settings[STAGING_SLOTS])]
        for storage, (tier, count, label) in enumerate(held):
            if count:
                made.add(EventKind.ALLOC, tier, count, time_s=start_s, storage=storage, label=label)

    def _expert_slots(self) -> Iterator[tuple[str, int, str]]:
        """The slots of every layer of experts, and in RAM the experts themselves where they rest there."""
        if self.experts is None:
            return
        for each in self.experts.layers:
            yield self.hardware.compute, each.held_bytes(self.experts.slots), f"{each.layer.path}, slots"
            if self.hardware.compute != RAM and self.experts.choice == experts.CACHE_RAM:
                yield RAM, each.layer.count * each.packed_bytes, f"{each.layer.path}, experts"

    def _cached(self) -> Iterator[tuple[str, int, str]]:
        """The KV cache, its older tokens where they rest."""
        settings = self.plan.settings
        resting = settings.get(kv_cache.RESTING_TOKENS, 0)
        for decision in self.plan.decisions:
            if decision.technique == kv_cache.NAME:
                tokens = max(settings["prompt_tokens"], settings["total_tokens"] - 1)
                away = decision.bytes * min(resting, tokens) // tokens
                yield self.hardware.compute, decision.bytes - away, "KV cache"
                yield RAM, away, "older part of the KV cache"

    @property
    def slots(self) -> int:
        return self.plan.settings[RING_SLOTS]


def _expert_way(handle: WeightStreaming, hardware: Hardware) -> ExpertWay | None:
    """How the plan in force caches experts."""
    choices, parameters = handle.plan.choices(experts.NAME), dict(handle.model.named_parameters())
    if not choices:
        return None
    ways = expert_ways(
        handle.model, hardware, lambda name: source_of(name, parameters[name], handle.weights), {}, choices.keys()
    )
    slots = handle.plan.settings[experts.EXPERT_SLOTS]
    made = next(way for way in ways if way.choice in choices.values())
    return replace(made, slots=slots)


def _job(handle: WeightStreaming, hardware: Hardware, way: ExpertWay | None, tokens: int) -> Job:
    need = Need(step_bytes=0, tokens=tokens)
    job = make_job(handle.model, handle.partition, hardware, need, handle.weights, handle.plan.task)
    return job if way is None else way.job(job, hardware, tokens, rate_of(handle.model, hardware))


class _Schedule:
    """Cyclic loads into a ring of slots, beside compute: the planner's own account, with its events written down.

    Nothing is in the ring when the first step begins.
    """

    def __init__(self, foreseen: Foreseen, made: Timeline, begin_s: float) -> None:
        self._foreseen, self._made = foreseen, made
        self._compute = foreseen.hardware.compute
        self._link_free_s = self._now_s = begin_s
        self._freed_s = [begin_s] * foreseen.slots  # when each slot was let go, oldest first

    def step(self, job: Job, tokens: int) -> None:
        begin_s = self._now_s
        for block in job.blocks:
            if not block.uses:
                continue
            ways = self._foreseen.ways(self._foreseen.choice(block))
            if ways:
                self._load(block, ways)
            self._compute_for(block.compute_s, block.name)
            if ways:
                self._now_s += block.overhead_s
                self._freed_s.append(self._now_s)
        self._now_s += job.fixed_compute_s
        self._load_experts(tokens)
        self._made.add(
            EventKind.COMPUTE,
            self._compute,
            0,
            time_s=begin_s,
            duration_s=self._now_s - begin_s,
            label=FORWARD,
            stream=WHOLE,
        )

    def _load_experts(self, tokens: int) -> None:
        """What a pass waits for when routers have spoken, in the mean."""
        way, hardware = self._foreseen.experts, self._foreseen.hardware
        if way is None:
            return
        for each in way.layers:
            count = round(each.loads(way.slots, tokens) * each.packed_bytes)
            ways = way.ways(hardware)
            took_s = max(count / hardware.link(*one).bytes_per_s for one in ways)
            if not took_s:
                continue
            label = f"{each.layer.path}, experts"
            for source, target in ways:
                part_s = count / hardware.link(source, target).bytes_per_s
                self._copied(source, target, count, self._now_s, part_s, label)
            self._waited(took_s, label)

    def _load(self, block: BlockCost, ways: list[tuple[str, str]]) -> None:
        """A copy by each way, all at once, as soon as a slot and the slowest way are free; compute waits for it."""
        begin_s = max(self._link_free_s, self._freed_s.pop(0))
        for source, target in ways:
            took_s = self._foreseen.hardware.link(source, target).seconds(block.bytes)
            self._link_free_s = max(self._link_free_s, begin_s + took_s)
            self._copied(source, target, block.bytes, begin_s, took_s, block.name)
        self._waited(self._link_free_s - self._now_s, block.name)

    def _copied(self, source: str, target: str, count: int, begin_s: float, took_s: float, label: str) -> None:
        self._made.add(EventKind.COPY, target, count, time_s=begin_s, duration_s=took_s, source=source, label=label)

    def _waited(self, wait_s: float, label: str) -> None:
        if wait_s <= 0:
            return
        self._made.add(
            EventKind.IDLE,
            self._compute,
            0,
            time_s=self._now_s,
            duration_s=wait_s,
            label=label,
            category="copy",
        )
        self._now_s += wait_s

    def _compute_for(self, took_s: float, label: str) -> None:
        self._made.add(
            EventKind.COMPUTE, self._compute, 0, time_s=self._now_s, duration_s=took_s, label=label, stream=BLOCKS
        )
        self._now_s += took_s
