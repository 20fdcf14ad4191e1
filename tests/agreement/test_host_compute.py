"""Blocks that the CPU computes from RAM beside streamed ones: the same bits, and what was predicted happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.core import Plan
from brim.core.hardware import RAM, VRAM
from brim.estimation.step_memory import watch_example
from brim.models.opening import open_model
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, predict, put_in_force
from brim.techniques.blocks import Partition
from brim.techniques.streaming.weight_streaming import COMPUTE_RAM, Weights, WeightStreaming
from support.families import assert_same_generation, generated, inputs, make, size_of
from support.hybrid import compute_some_in_ram
from support.recorded import lanes, peaks, settled

STEPS = 3
NAMES = ["llama", "llama-tied", "gpt2", "mixtral", "qwen3-moe", "t5", "vit", "mamba", "switch"]
FINE = ["llama-tied", "mixtral", "t5", "vit"]


def planned(
    model: nn.Module, weights: Weights | None = None, *, share: float = 0.5, vram: float = 0.4, example: Any = None
) -> tuple[Partition, Plan]:
    """A plan under which the CPU computes about ``share`` of what does not stay."""
    size = size_of(model)
    budget = {VRAM: int(vram * size), RAM: int(1.5 * size)}
    seen = None if example is None else watch_example(model, example)
    need = Need(step_bytes=0, observation=seen, cache_experts=False)
    partition, plan = make_plan(model, machine("emulated"), budget, need, weights or Weights(), task="forward")
    plan = compute_some_in_ram(plan, partition, share)
    assert COMPUTE_RAM in plan.choices("weight_streaming").values()
    return partition, plan


def fit(model: nn.Module, *, share: float = 0.5, example: Any = None) -> WeightStreaming:
    partition, plan = planned(model, share=share, example=example)
    return put_in_force(model, partition, plan, machine("emulated"), Weights(), "emulated")


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_what_is_predicted_is_what_happens(make_tiny: Any, tied: bool, share: float) -> None:
    ids = torch.arange(10).view(2, 5)
    model, hardware = make_tiny(tied=tied), machine("emulated")
    with torch.no_grad():
        wanted = model(ids)
        partition, plan = planned(model, share=share)
        handle = put_in_force(model, partition, plan, hardware, Weights(), "emulated")
        for _ in range(STEPS):
            assert torch.equal(model(ids), wanted)
        settled(handle.memory)
        real, real_peaks = lanes(handle.timeline()), peaks(handle.memory)
        assert handle.timeline().copied_bytes(VRAM, RAM) > 0
        handle.remove()
        assert torch.equal(model(ids), wanted)
    with FakeTensorMode(), torch.no_grad():
        model = make_tiny(tied=tied)
        handle = predict(model, partition, plan, hardware, Weights())
        for _ in range(STEPS):
            model(torch.zeros(2, 5, dtype=torch.long))
    assert lanes(handle.timeline()) == real
    assert peaks(handle.memory) == real_peaks


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "fine"), [*((name, False) for name in NAMES), *((name, True) for name in FINE)])
def test_the_same_bits_as_the_whole_model(name: str, fine: bool) -> None:
    """Also (``fine``) where single modules are computed apart from what is around them."""
    model, given = make(name), inputs(name)
    with torch.no_grad():
        wanted = model(**given).logits
        handle = fit(model, example=given if fine else None)
        for _ in range(STEPS):
            assert torch.equal(model(**given).logits, wanted)
        handle.remove()
        assert torch.equal(model(**given).logits, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "mamba"])
def test_generation_with_a_cache_that_lives_in_both_tiers(name: str, share: float) -> None:
    model = make(name)
    wanted = generated(model)
    handle = fit(model, share=share)
    assert_same_generation(generated(model), wanted)
    if name in ("llama", "mixtral"):
        static = {"cache_implementation": "static"}
        assert_same_generation(generated(model, **static), generated(make(name), **static))
    handle.remove()
    assert_same_generation(generated(model), wanted)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "t5"])
def test_a_folder(name: str, tmp_path: Any) -> None:
    model, given = make(name), inputs(name)
    model.save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    partition, plan = planned(opened.module, weights)
    handle = put_in_force(opened.module, partition, plan, machine("emulated"), weights, "emulated")
    with torch.no_grad():
        wanted = model(**given).logits
        for _ in range(STEPS):
            assert torch.equal(opened.module(**given).logits, wanted)
        state, expected = opened.module.state_dict(), model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())
        handle.remove()
        assert torch.equal(opened.module(**given).logits, wanted)


def test_in_half_precision_too() -> None:
    model, given = make("llama").to(torch.bfloat16), inputs("llama")
    with torch.no_grad():
        wanted = model(**given).logits
        handle = fit(model)
        assert torch.equal(model(**given).logits, wanted)
        handle.remove()
