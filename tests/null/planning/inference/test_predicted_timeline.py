"""What a generation's plan foresees has all that the run holds, the slots of cached experts among it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from brim.core import EventKind, Timeline
from brim.core.hardware import RAM, VRAM
from brim.planning.inference.choose import GenerationStrategy
from brim.planning.inference.machine import machine, put_in_force
from brim.planning.inference.predicted_timeline import foreseen
from brim.techniques.experts.technique import NAME
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from support.families import inputs, make, size_of
from support.strategies import strategy_of


@pytest.fixture(params=["cpu", "emulated"])
def cached(request: pytest.FixtureRequest) -> Iterator[tuple[WeightStreaming, GenerationStrategy]]:
    """A mixture of experts in force with a cache of a few of them per layer."""
    device = request.param
    model = make("qwen3-moe", num_experts=32)
    budget = {RAM: int(0.4 * size_of(model))}
    if device == "emulated":
        budget = {VRAM: budget[RAM], RAM: 2 * size_of(model)}
    hardware = machine(device)
    strategy = strategy_of(model, hardware, budget)
    handle = put_in_force(model, strategy.partition, strategy.plan, hardware, Weights(), device)
    yield handle, strategy
    handle.remove()


def total(timeline: Timeline, kind: EventKind) -> int:
    return sum(event.bytes for event in timeline if event.kind is kind)


def test_the_slots_of_experts_are_foreseen(cached: tuple[WeightStreaming, GenerationStrategy]) -> None:
    handle, strategy = cached
    assert handle.plan.choices(NAME), "the planner caches experts here"
    with torch.no_grad():
        handle.model(**inputs("qwen3-moe"))
    predicted = foreseen(strategy, 3)
    assert predicted.peak_bytes(strategy.hardware.compute) == handle.memory.compute.peak_bytes
    slots = [event for event in predicted if event.label.endswith(", slots")]
    assert {event.label.removesuffix(", slots") for event in slots} == set(handle.plan.choices(NAME))
    assert any(event.label.endswith(", experts") and event.kind is EventKind.COPY for event in predicted)


def test_a_pass_lasts_as_long_as_the_plan_says(cached: tuple[WeightStreaming, GenerationStrategy]) -> None:
    handle, strategy = cached
    few, many = (foreseen(strategy, count) for count in (7, 8))
    ends = [max(e.time_s + e.duration_s for e in one if e.kind is EventKind.COMPUTE) for one in (few, many)]
    assert ends[1] - ends[0] == pytest.approx(handle.plan.promise.step_s, rel=1e-9)
    assert total(many, EventKind.COPY) > total(few, EventKind.COPY)
