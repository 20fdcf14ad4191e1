"""The KV cache on fake memory and for real: the same events, the same peaks, beside streamed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.core import EventKind, Timeline
from brim.core.hardware import RAM, VRAM
from brim.memory.tiers import Memory
from brim.model_cache import cache_input, cache_of
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, predict, put_in_force
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.weight_streaming import Weights
from support.generating import make

PIECES = [4, 3, 1, 1, 1, 1]
TOKENS = sum(PIECES)
Events = dict[str, list[tuple[str, int, str, str]]]


def lanes(timeline: Timeline) -> Events:
    """Events by pool and by way: lanes run beside one another, so there is no order between them."""
    found: Events = {}
    for e in timeline:
        if e.kind is not EventKind.IDLE:  # how long compute waited differs from run to run
            lane = f"{e.source} -> {e.tier}" if e.kind is EventKind.COPY else f"{e.tier} pool"
            if e.label != "bounce buffer":  # made by the lane that reads
                found.setdefault(lane, []).append((e.kind.name, e.bytes, e.label, e.category))
    return found


def run(model: Any, memory: Memory, placement: kv_cache.Placement) -> None:
    cache = kv_cache.apply(model, placement, memory)
    with torch.no_grad():
        for count in PIECES:
            model(
                torch.zeros(placement.batch, count, dtype=torch.long),
                **cache_input(model, cache),
                use_cache=True,
            )
    cache.remove()
    for lane in ("_disk", "_copy", "_back"):
        if hasattr(memory.engine, lane):
            getattr(memory.engine, lane).submit(lambda: None).wait()


@pytest.mark.thorough
@pytest.mark.parametrize("resting", [0, 5, TOKENS])
@pytest.mark.parametrize(("device", "share"), [("cpu", 0.6), ("emulated", 0.6)])
def test_what_is_predicted_is_what_happens(device: Any, share: float, resting: int) -> None:
    if device == "cpu" and resting:
        pytest.skip("RAM is the compute tier")
    model = make("llama")
    with torch.no_grad():
        shape = kv_cache.shape_of(cache_of(model(torch.zeros(1, 1, dtype=torch.long))))
    assert shape is not None
    hardware = machine(device)
    placement = kv_cache.Placement(shape=shape, batch=2, tokens=TOKENS, resting=resting)
    held = placement.held_bytes(hardware.compute)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = {hardware.compute: int(share * size) + held[hardware.compute], RAM: size + held.get(RAM, 0)}
    if device == "cpu":
        budget = {RAM: int(share * size) + held[RAM]}
    spent = {RAM: held.get(RAM, 0)} if device != "cpu" else {}
    need = Need(step_bytes=held[hardware.compute], spent_bytes=spent)
    partition, plan = make_plan(model, hardware, budget, need, Weights(), task="generate")
    handle = put_in_force(model, partition, plan, hardware, Weights(), device)
    run(model, handle.memory, placement)
    real, peaks = lanes(handle.timeline()), {p.tier: p.peak_bytes for p in (handle.memory.compute, handle.memory.ram)}
    handle.remove()
    with FakeTensorMode():
        fake = make("llama")
        foreseen = predict(fake, partition, plan, hardware, Weights())
        run(fake, foreseen.memory, placement)
    assert lanes(foreseen.timeline()) == real
    assert peaks == {p.tier: p.peak_bytes for p in (foreseen.memory.compute, foreseen.memory.ram)}
    assert peaks == {tier: plan.promise.peak_bytes[tier] for tier in peaks}
    if resting:
        assert any(label.startswith("kv_cache") for _, _, label, _ in real[f"{RAM} -> {VRAM}"])
