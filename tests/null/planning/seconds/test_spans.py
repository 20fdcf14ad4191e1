"""A run records when compute worked, on the whole and by block, and what it foresaw lies on the same axis."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brim.core import EventKind, Hardware, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.tiers import Memory, cpu_memory
from brim.planning.inference import predicted_timeline
from brim.planning.inference.choose import GenerationStrategy
from brim.planning.inference.machine import emulated_hardware, put_in_force
from brim.planning.seconds import spans
from brim.planning.seconds.spans import BLOCKS, WHOLE, ComputeSpans
from brim.report.idle import attribute
from brim.techniques.streaming.weight_streaming import FROM_DISK, Weights, WeightStreaming
from brim.units import GIB
from support.strategies import strategy_of

PASSES = 8


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


IDS = torch.arange(12).view(2, 6)


def computed(timeline: Timeline, lane: int) -> list[tuple[str, float, float]]:
    """Label, begin and end of what computed, by its begin."""
    found = [
        (e.label, e.time_s, e.time_s + e.duration_s)
        for e in timeline
        if e.kind is EventKind.COMPUTE and e.stream == lane
    ]
    return sorted(found, key=lambda one: one[1])


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = cpu_memory(Timeline("run", measured=True), ram_bytes=GIB)
    yield made
    made.close()


def test_a_pass_has_a_span_and_in_it_one_for_each_block_in_order(memory: Memory) -> None:
    model = llama()
    with torch.no_grad():
        expected = model(IDS).logits
        with ComputeSpans(model, ["model.layers.0", "model.layers.1+lm_head", "no such module"], memory):
            assert torch.equal(model(IDS).logits, expected)
        model(IDS)  # nothing is recorded any more
    timeline = memory.recorder.timeline
    ((whole, begin_s, end_s),) = computed(timeline, WHOLE)
    blocks = computed(timeline, BLOCKS)
    assert whole == "forward"
    assert [label for label, _, _ in blocks] == ["model.layers.0", "model.layers.1", "lm_head"]
    assert begin_s <= blocks[0][1]
    assert blocks[-1][2] <= end_s
    assert all(before[2] <= after[1] for before, after in pairwise(blocks))
    assert {e.tier for e in timeline} == {RAM}


def test_training_has_its_backward_passes_and_updates_too(memory: Memory) -> None:
    model, twin = llama().train(), llama().train()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, twin)]
    watched = ComputeSpans(model, ["model.layers.0"], memory, optimizers[0])
    for _ in range(2):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            one(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    watched.close()
    watched.close()
    found = computed(memory.recorder.timeline, WHOLE)
    assert [label for label, _, _ in found] == ["forward", "backward", "update"] * 2
    assert all(before[2] <= after[1] for before, after in pairwise(found))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(twin.named_parameters())[name])
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_call_that_raises_leaves_no_span_and_the_next_one_is_right(memory: Memory) -> None:
    model = llama()
    with ComputeSpans(model, ["model.layers.0"], memory), torch.no_grad():
        with pytest.raises(IndexError):
            model(torch.full_like(IDS, 10_000))  # no such row
        begun_s = memory.recorder.now_s()
        model(IDS)
    ((_, begin_s, _),) = computed(memory.recorder.timeline, WHOLE)
    assert begin_s >= begun_s


def test_a_long_run_keeps_the_first_spans_and_is_left_alone_then(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MOST_SPANS", 3)
    model = llama()
    with ComputeSpans(model, ["model.layers.0"], memory), torch.no_grad():
        for _ in range(5):
            model(IDS)
        assert not model._forward_hooks
    assert len(memory.recorder.timeline) == 3


def streamed(device: str, share: float, hardware: Hardware) -> tuple[WeightStreaming, GenerationStrategy]:
    model = llama()
    machine = emulated_hardware(hardware) if device == "emulated" else hardware
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = {machine.compute: int(size * share)} | ({RAM: 4 * size} if device == "emulated" else {})
    strategy = strategy_of(model, machine, budget, batch=2)
    return put_in_force(model, strategy.partition, strategy.plan, machine, Weights(), device), strategy


@pytest.mark.parametrize(("device", "source", "tier"), [("cpu", DISK, RAM), ("emulated", RAM, VRAM)])
def test_what_is_foreseen_is_what_the_plan_promises_and_lies_beside_what_was_measured(
    device: str, source: str, tier: str, known_machine: Hardware
) -> None:
    handle, strategy = streamed(device, 0.5, known_machine)
    model: Any = handle.model
    with torch.no_grad(), ComputeSpans(model, [name for name, _ in handle.blocks], handle.memory):
        for _ in range(PASSES):
            model(IDS)
    handle.close()
    measured = handle.timeline()
    predicted = predicted_timeline.beside(handle, strategy)
    assert measured.measured and not predicted.measured
    passes = computed(predicted, WHOLE)
    assert len(passes) == len(computed(measured, WHOLE)) == PASSES
    assert passes[0][1] == pytest.approx(computed(measured, WHOLE)[0][1])
    assert min(predicted.column("time_s")) == min(measured.column("time_s"))
    steady_s = passes[-1][1] - passes[-2][1]
    assert steady_s == pytest.approx(handle.plan.promise.step_s, rel=1e-9)
    assert predicted.peak_bytes(tier) == handle.memory.compute.peak_bytes
    uses = {name: choice for name, choice in handle.plan.choices("weight_streaming").items() if choice != "resident"}
    assert uses
    moved = [e for e in predicted if e.kind is EventKind.COPY and (e.source, e.tier) == (source, tier)]
    assert {e.label for e in moved} <= {e.label for e in measured if e.kind is EventKind.COPY}
    assert len(moved) % PASSES == 0
    handle.remove()


def test_time_is_told_apart_into_computing_and_waiting_for_blocks(known_machine: Hardware) -> None:
    handle, strategy = streamed("cpu", 0.45, known_machine)
    assert FROM_DISK in handle.plan.choices("weight_streaming").values()
    model: Any = handle.model
    with torch.no_grad(), ComputeSpans(model, [name for name, _ in handle.blocks], handle.memory):
        for _ in range(PASSES):
            model(IDS)
    handle.close()
    for timeline in (handle.timeline(), predicted_timeline.beside(handle, strategy)):
        found = attribute(timeline)
        passes = computed(timeline, WHOLE)
        assert found.compute_recorded
        assert found.busy_s > 0
        assert found.wall_s == pytest.approx(found.busy_s + found.idle_s)
        assert found.wall_s == pytest.approx(passes[-1][2] - passes[0][1], rel=0.05)
        names = {name for name, _ in handle.blocks}
        assert {wait.label for wait in found.waits if wait.cause == "copy"} <= names
    handle.remove()
