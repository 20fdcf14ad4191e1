"""The Timeline that a generation's plan foresees: what the pools hold, and the steps as the planner counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from brim.core import EventKind, Hardware, Plan, Timeline
from brim.core.hardware import DISK, RAM
from brim.planner import BlockCost, Job
from brim.run.fitting import Need, make_job
from brim.run.spans import BLOCKS, FORWARD, WHOLE
from brim.techniques import kv_cache
from brim.techniques.placement import COMPUTE_RAM
from brim.techniques.weight_streaming import (
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
    """What a generation's plan says of its passes. ``first`` is the one with the prompt, ``next`` any other."""

    plan: Plan
    hardware: Hardware
    first: Job
    next: Job

    @classmethod
    def of(cls, handle: WeightStreaming, hardware: Hardware) -> Foreseen:
        settings = handle.plan.settings
        batch = settings.get("batch", 1)
        first, other = (
            make_job(
                handle.model,
                handle.partition,
                hardware,
                Need(step_bytes=0, tokens=tokens),
                handle.weights,
                handle.plan.task,
            )
            for tokens in (batch * settings.get("prompt_tokens", 1), batch)
        )
        return cls(plan=handle.plan, hardware=hardware, first=first, next=other)

    def timeline(self, passes: int, *, start_s: float = 0.0, begin_s: float = 0.0) -> Timeline:
        """So many passes, the first of which begins at ``begin_s``; what is held is there from ``start_s`` on."""
        made = Timeline(f"{self.plan.model} {self.plan.task}", measured=False)
        promise = self.plan.promise
        made.facts |= {f"promised_bytes.{tier}": count for tier, count in promise.peak_bytes.items()}
        made.facts["promised_step_s"] = promise.step_s
        self._hold(made, start_s)
        run = _Schedule(self, made, begin_s)
        for job in (self.first, *[self.next] * (passes - 1))[:passes]:
            if len(made) > MOST_EVENTS:
                break
            run.step(job)
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
        held: list[tuple[str, int, str]] = [(compute, job.fixed_bytes, "outside blocks")]
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
            held += [(RAM, largest, f"staging slot {slot}") for slot in range(self.plan.settings[STAGING_SLOTS])]
        for storage, (tier, count, label) in enumerate(held):
            if count:
                made.add(EventKind.ALLOC, tier, count, time_s=start_s, storage=storage, label=label)

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


class _Schedule:
    """Cyclic loads into a ring of slots, beside compute: the planner's own account, with its events written down.

    Nothing is in the ring when the first step begins.
    """

    def __init__(self, foreseen: Foreseen, made: Timeline, begin_s: float) -> None:
        self._foreseen, self._made = foreseen, made
        self._compute = foreseen.hardware.compute
        self._link_free_s = self._now_s = begin_s
        self._freed_s = [begin_s] * foreseen.slots  # when each slot was let go, oldest first

    def step(self, job: Job) -> None:
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
        self._made.add(
            EventKind.COMPUTE,
            self._compute,
            0,
            time_s=begin_s,
            duration_s=self._now_s - begin_s,
            label=FORWARD,
            stream=WHOLE,
        )

    def _load(self, block: BlockCost, ways: list[tuple[str, str]]) -> None:
        """A copy by each way, all at once, as soon as a slot and the slowest way are free; compute waits for it."""
        begin_s = max(self._link_free_s, self._freed_s.pop(0))
        for source, target in ways:
            took_s = block.bytes / self._foreseen.hardware.link(source, target).bytes_per_s
            self._link_free_s = max(self._link_free_s, begin_s + took_s)
            self._made.add(
                EventKind.COPY,
                target,
                block.bytes,
                time_s=begin_s,
                duration_s=took_s,
                source=source,
                label=block.name,
            )
        wait_s = self._link_free_s - self._now_s
        if wait_s > 0:
            self._made.add(
                EventKind.IDLE,
                self._compute,
                0,
                time_s=self._now_s,
                duration_s=wait_s,
                label=block.name,
                category="copy",
            )
            self._now_s = self._link_free_s

    def _compute_for(self, took_s: float, label: str) -> None:
        self._made.add(
            EventKind.COMPUTE, self._compute, 0, time_s=self._now_s, duration_s=took_s, label=label, stream=BLOCKS
        )
        self._now_s += took_s
