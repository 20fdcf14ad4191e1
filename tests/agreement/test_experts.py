"""Experts cached one by one: the bits of the plain model in the same kernels, the memory that was promised."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.core import EventKind, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.models.opening import open_model
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, predict, put_in_force
from brim.techniques.experts.technique import CACHE_DISK, CACHE_RAM, EXPERT_SLOTS, NAME
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from support.cached_experts import fit, planned
from support.families import assert_same_generation, generated, inputs, make, size_of
from support.recorded import peaks, settled

# device, share of the rest's bytes in the compute tier, where experts rest
WAYS = [("cpu", CACHE_DISK), ("emulated", CACHE_RAM), ("emulated", CACHE_DISK)]
KERNELS = ["eager", "grouped_mm", "batched_mm"]
MOE = ["mixtral", "qwen3-moe", "gpt-oss"]


def loads(timeline: Timeline) -> int:
    return sum(e.kind is EventKind.COPY and ", expert " in e.label for e in timeline)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("name", "slots"), [("mixtral", 1), ("qwen3-moe", 4), ("qwen3-moe", 1), ("gpt-oss", 2)])
@pytest.mark.parametrize(("device", "choice"), [WAYS[0], WAYS[1]])
def test_the_same_bits_with_few_slots(name: str, kernels: str, device: str, choice: str, slots: int) -> None:
    model, given = make(name, num_hidden_layers=3), inputs(name)
    model.set_experts_implementation(kernels)
    with torch.no_grad():
        wanted = model(**given).logits
        handle = fit(model, device, choice, slots)
        for _ in range(3):
            assert torch.equal(model(**given).logits, wanted)
        facts = handle.timeline().facts
        assert facts["expert_loads"] > 0
        handle.remove()
        assert torch.equal(model(**given).logits, wanted)


@pytest.mark.parametrize("kernels", KERNELS)
def test_generation_and_half_precision(kernels: str) -> None:
    model = make("qwen3-moe", num_hidden_layers=4).to(torch.bfloat16)
    model.set_experts_implementation(kernels)
    wanted = generated(model)
    handle = fit(model, "emulated", CACHE_RAM, 4)
    for _ in range(2):
        assert_same_generation(generated(model), wanted)
    facts = handle.timeline().facts
    assert facts["expert_hits"] > 0
    assert loads(handle.timeline()) == facts["expert_loads"]
    handle.remove()


@pytest.mark.parametrize(("device", "choice"), WAYS)
@pytest.mark.parametrize("name", MOE)
def test_a_folder(name: str, device: str, choice: str, tmp_path: Path) -> None:
    """Also where the files hold experts one by one."""
    model, given = make(name, num_hidden_layers=3), inputs(name)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    opened = open_model(tmp_path)
    materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    handle = fit(opened.module, device, choice, 4, weights)
    with torch.no_grad():
        wanted = model(**given).logits
        for _ in range(2):
            assert torch.equal(opened.module(**given).logits, wanted)
        state, expected = opened.module.state_dict(), model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())
        assert handle.timeline().copied_bytes(DISK, RAM) > 0
        check_promise(handle)
        handle.remove()
        assert torch.equal(opened.module(**given).logits, wanted)


def check_promise(handle: WeightStreaming) -> None:
    held = peaks(handle.memory)
    for tier, bytes in handle.plan.promise.peak_bytes.items():
        assert held[tier] <= bytes <= handle.plan.budget_bytes[tier]


@pytest.mark.parametrize(("device", "choice"), WAYS)
@pytest.mark.parametrize("kernels", ["eager", "grouped_mm"])
def test_memory_is_what_was_predicted(device: str, choice: str, kernels: str) -> None:
    model, ids = make("qwen3-moe", num_hidden_layers=3), inputs("qwen3-moe")
    model.set_experts_implementation(kernels)
    partition, plan = planned(model, device, choice, 4, Weights())
    with torch.no_grad():
        handle = put_in_force(model, partition, plan, machine(device), Weights(), device)  # type: ignore[arg-type]
        for _ in range(3):
            model(**ids)
        settled(handle.memory)
        real = peaks(handle.memory)
        handle.remove()
    with FakeTensorMode(), torch.no_grad():
        twin = make("qwen3-moe", num_hidden_layers=3)
        foreseen = predict(twin, partition, plan, machine(device), Weights())  # type: ignore[arg-type]
        assert peaks(foreseen.memory) == real
    assert real == {tier: bytes for tier, bytes in plan.promise.peak_bytes.items() if tier in real}


@pytest.mark.parametrize("share", [0.35, 0.6])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_planner_caches_experts_where_that_is_faster(device: str, share: float) -> None:
    model = make("qwen3-moe", num_experts=32)
    size = size_of(model)
    budget = {RAM: int(share * size)} if device == "cpu" else {VRAM: int(share * size), RAM: 2 * size}
    hardware = machine(device)  # type: ignore[arg-type]
    partition, plan = make_plan(model, hardware, budget, Need(step_bytes=0), Weights(), task="generate")
    assert plan.choices(NAME)
    assert plan.settings[EXPERT_SLOTS] >= 2
    wanted = generated(model)
    handle = put_in_force(model, partition, plan, hardware, Weights(), device)
    assert_same_generation(generated(model), wanted)
    check_promise(handle)
    handle.remove()


class Listed(nn.Module):
    """Experts as modules of a list, as older models have them."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, position = torch.where(chosen == number)
            if rows.numel():
                made.index_add_(0, rows, expert(x[rows]) * weights[rows, position, None])
        return x + made


@pytest.mark.parametrize(("device", "choice"), WAYS)
@pytest.mark.parametrize("slots", [1, 2])
def test_experts_in_lists(device: str, choice: str, slots: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Listed() for _ in range(4)]).eval(), torch.randn(3, 32)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        handle = fit(model, device, choice, slots)
        for _ in range(3):
            assert torch.equal(model(x), twin(x))
        facts = handle.timeline().facts
        assert facts["expert_loads"] > 0
        assert (facts["expert_hits"] > 0) or slots == 1
        for each in (model, twin):
            each.get_parameter("1.experts.2.0.weight").data += 1
            each.get_parameter("2.experts.1.1.weight").mul_(2)
        assert torch.equal(model(x), twin(x))
        handle.remove()
        assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize(("device", "choice"), WAYS)
def test_a_model_with_experts_in_lists(device: str, choice: str) -> None:
    model, given = make("switch", num_layers=3), inputs("switch")
    with torch.no_grad():
        wanted = model(**given).logits
        handle = fit(model, device, choice, 2)
        for _ in range(2):
            assert torch.equal(model(**given).logits, wanted)
        handle.remove()


@pytest.mark.parametrize("name", ["mixtral", "switch"])
def test_changed_experts_are_those_that_compute(name: str) -> None:
    model, twin, given = make(name, **LAYERS[name]), make(name, **LAYERS[name]), inputs(name)
    handle = fit(model, "emulated", CACHE_RAM, 2)
    torch.manual_seed(1)
    other = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    with torch.no_grad():
        model(**given)
        for each in (model, twin):
            each.load_state_dict(other)
        for _ in range(2):
            assert torch.equal(model(**given).logits, twin(**given).logits)
        assert all(torch.equal(value, twin.state_dict()[key]) for key, value in model.state_dict().items())
        if name == "mixtral":
            for each in (model, twin):
                experts = each.model.layers[1].mlp.experts
                experts.down_proj.data = torch.full_like(experts.down_proj, 0.5)
            assert torch.equal(model(**given).logits, twin(**given).logits)
        for key, parameter in twin.named_parameters():
            assert torch.equal(handle.value(key), parameter)
        handle.remove()
        assert torch.equal(model(**given).logits, twin(**given).logits)


LAYERS: dict[str, dict[str, int]] = {"mixtral": {"num_hidden_layers": 3}, "switch": {"num_layers": 3}}
