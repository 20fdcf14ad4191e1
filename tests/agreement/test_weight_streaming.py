"""Weight streaming applied to fake memory and for real: the same events, the same peaks, and what was promised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from brim.core import Plan
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.models.opening import open_model
from brim.models.weights import by_parameter, materialize
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, predict, put_in_force
from brim.techniques.blocks import Partition
from brim.techniques.streaming.weight_streaming import FROM_DISK, FROM_RAM, RESIDENT, Weights
from support.recorded import lanes, peaks, settled

STEPS = 3
STEP_BYTES = 1000


def size_of(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run(model: torch.nn.Module, ids: torch.Tensor, plan: Plan, partition: Partition, device: str) -> tuple[Any, ...]:
    with torch.no_grad():
        handle = put_in_force(model, partition, plan, machine(device), Weights(), device)  # type: ignore[arg-type]
        for _ in range(STEPS):
            model(ids)
        settled(handle.memory)
        result = lanes(handle.timeline()), peaks(handle.memory), handle.timeline()
        handle.remove()
    return result


def foresee(
    model: torch.nn.Module, ids: torch.Tensor, plan: Plan, partition: Partition, device: str, weights: Weights
) -> tuple[Any, ...]:
    handle = predict(model, partition, plan, machine(device), weights)  # type: ignore[arg-type]
    with torch.no_grad():
        for _ in range(STEPS):
            model(ids)
    return lanes(handle.timeline()), peaks(handle.memory), handle.timeline()


def promised(plan: Plan) -> dict[str, int]:
    """Of pools: what a step's activations take is not theirs."""
    compute = VRAM if VRAM in plan.budget_bytes else RAM
    return {tier: bytes - STEP_BYTES * (tier == compute) for tier, bytes in plan.promise.peak_bytes.items()}


CASES: list[tuple[str, Mapping[str, float], set[str]]] = [
    ("cpu", {RAM: 0.45}, {RESIDENT, FROM_DISK}),
    ("cpu", {RAM: 0.7}, {RESIDENT, FROM_DISK}),
    ("cpu", {RAM: 1.3}, {RESIDENT}),
    ("emulated", {VRAM: 0.5, RAM: 1.0}, {RESIDENT, FROM_RAM}),
    ("emulated", {VRAM: 0.5, RAM: 0.6}, {RESIDENT, FROM_RAM, FROM_DISK}),
    ("emulated", {VRAM: 0.4, RAM: 0.35}, {RESIDENT, FROM_DISK}),
    ("emulated", {VRAM: 1.3, RAM: 0.1}, {RESIDENT}),
]


@pytest.mark.parametrize(("device", "shares", "expected"), CASES)
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
def test_what_is_predicted_is_what_happens(
    make_tiny: Any, device: str, shares: Mapping[str, float], expected: set[str], tied: bool
) -> None:
    ids = torch.arange(10).view(2, 5)
    model = make_tiny(tied=tied)
    budget = {tier: int(size_of(model) * share) for tier, share in shares.items()}
    hardware = machine(device)  # type: ignore[arg-type]
    partition, plan = make_plan(model, hardware, budget, Need(step_bytes=STEP_BYTES), Weights(), task="forward")
    assert expected - {RESIDENT} <= set(plan.choices("weight_streaming").values())
    real, real_peaks, timeline = run(model, ids, plan, partition, device)
    with FakeTensorMode():
        fake_model = make_tiny(tied=tied)
        predicted, predicted_peaks, fake = foresee(
            fake_model, torch.zeros(2, 5, dtype=torch.long), plan, partition, device, Weights()
        )
    assert predicted == real
    assert predicted_peaks == real_peaks == promised(plan)
    assert {tier: timeline.peak_bytes(tier) for tier in budget} == {t: fake.peak_bytes(t) for t in budget}
    assert timeline.measured and not fake.measured
    if FROM_DISK in expected:
        assert timeline.copied_bytes(DISK, RAM) > 0
    if device == "emulated" and expected != {RESIDENT}:
        assert timeline.copied_bytes(RAM, VRAM) > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=136,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
    )
    path: Path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("device", "shares"),
    [
        ("cpu", {RAM: 0.5}),
        ("cpu", {RAM: 1.2}),
        ("emulated", {VRAM: 0.5, RAM: 1.2}),
        ("emulated", {VRAM: 0.5, RAM: 0.75}),
        ("emulated", {VRAM: 1.2, RAM: 0.4}),
    ],
)
def test_a_checkpoint_on_disk(folder: Path, device: str, shares: Mapping[str, float]) -> None:
    ids = torch.arange(10).view(2, 5)
    timelines = []
    for fake in (False, True):
        opened = open_model(folder)
        module, weights = opened.module, Weights(sources=by_parameter(opened))
        materialize(module, opened)
        budget = {tier: int(opened.bytes * share) for tier, share in shares.items()}
        hardware = machine(device)  # type: ignore[arg-type]
        need = Need(step_bytes=STEP_BYTES)
        partition, plan = make_plan(module, hardware, budget, need, weights, task="generate")
        if fake:
            with FakeTensorMode(allow_non_fake_inputs=True):
                config = module.config
                module = LlamaForCausalLM(config).eval()  # type: ignore[arg-type]
                timelines.append(
                    foresee(module, torch.zeros(2, 5, dtype=torch.long), plan, partition, device, weights)
                )
        else:
            with torch.no_grad():
                handle = put_in_force(module, partition, plan, hardware, weights, device)
                for _ in range(STEPS):
                    module(ids)
                settled(handle.memory)
                timelines.append((lanes(handle.timeline()), peaks(handle.memory), handle.timeline()))
                handle.remove()
    (real, real_peaks, _), (predicted, predicted_peaks, _) = timelines
    assert predicted == real
    assert predicted_peaks == real_peaks
    for tier, bytes in promised(plan).items():
        assert real_peaks[tier] <= bytes <= budget[tier]


def test_the_smallest_budget_that_is_named_works_and_a_byte_less_does_not(make_tiny: Any) -> None:
    model, ids = make_tiny(), torch.arange(10).view(2, 5)
    hardware, need = machine("cpu"), Need(step_bytes=STEP_BYTES)
    with pytest.raises(BudgetError) as caught:
        make_plan(model, hardware, {RAM: 1}, need, Weights(), task="forward")
    smallest = caught.value.smallest_bytes[RAM]
    with pytest.raises(BudgetError):
        make_plan(model, hardware, {RAM: smallest - 1}, need, Weights(), task="forward")
    partition, plan = make_plan(model, hardware, {RAM: smallest}, need, Weights(), task="forward")
    _, measured, _ = run(model, ids, plan, partition, "cpu")
    assert measured == promised(plan)
    assert plan.promise.peak_bytes[RAM] <= smallest


def test_the_smallest_vram_and_ram_that_are_named_work(make_tiny: Any) -> None:
    model, ids = make_tiny(), torch.arange(10).view(2, 5)
    hardware, need = machine("emulated"), Need(step_bytes=STEP_BYTES)
    budget = {VRAM: 1, RAM: 1}
    for tier in (VRAM, RAM):
        with pytest.raises(BudgetError) as caught:
            make_plan(model, hardware, budget, need, Weights(), task="forward")
        assert list(caught.value.smallest_bytes) == [tier]
        budget |= caught.value.smallest_bytes
    partition, plan = make_plan(model, hardware, budget, need, Weights(), task="forward")
    _, measured, _ = run(model, ids, plan, partition, "emulated")
    assert measured == promised(plan)
    for tier in (VRAM, RAM):
        with pytest.raises(BudgetError):
            make_plan(model, hardware, {**budget, tier: budget[tier] - 1}, need, Weights(), task="forward")
