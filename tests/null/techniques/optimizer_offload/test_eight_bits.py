"""States of 8 bits, beside their scales or wrapped with them, that are offloaded: as in memory, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import brim
from brim.errors import ModelError, UnsupportedError
from brim.memory.checkpoint_writing import write_safetensors
from brim.planning.strategy.state import WrappedStates, optimizer_numbers
from brim.run.train.finite import finite
from brim.techniques.offloaded_tensor import OffloadedTensor
from brim.techniques.optimizer_offload.technique import apply
from support.offloaded import MIB, ON_GPU, EightBits, assert_same, assert_same_state, machine, offloaded

WIDTH = 256


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 100))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_torchao(parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = pytest.importorskip("torchao.optim").AdamW8bit(parameters)
    return optimizer


def of_bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters)
    return optimizer


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("states", ["ram", ON_GPU, "disk"])
@pytest.mark.parametrize(
    "make",
    [
        EightBits,
        lambda p: EightBits(p, wrapped=True),
        pytest.param(of_torchao, marks=pytest.mark.thorough),  # it is compiled
        of_bitsandbytes,
    ],
    ids=["beside", "wrapped", "torchao", "bitsandbytes"],
)
def test_a_training_that_is_saved_and_resumed_is_that_in_memory(make: Any, states: str, tmp_path: Path) -> None:
    twin, model = net(), net()
    plain, optimizer = make(twin.parameters()), make(model.parameters())
    with offloaded(model, optimizer, machine("emulated", tmp_path), states=states, block_bytes=MIB):
        assert train(model, optimizer, range(3)) == train(twin, plain, range(3))
        torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    model = net()
    optimizer = make(model.parameters())
    with offloaded(model, optimizer, machine("emulated", tmp_path), states=states, block_bytes=MIB) as handle:
        saved = torch.load(tmp_path / "saved.pt", weights_only=False)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert {type(tensor) for tensor in tensors if tensor.dim()} == {OffloadedTensor}
        state_bytes = sum(block.state_bytes for block in handle.blocks.values())
        assert state_bytes < 0.6 * sum(p.nbytes for p in model.parameters())
        assert train(model, optimizer, range(3, 6)) == train(twin, plain, range(3, 6))
    assert_same(model, twin)
    assert_same_state(
        *(
            {"param_groups": [], "state": {name: o.state[p] for name, p in m.named_parameters()}}
            for m, o in ((model, optimizer), (twin, plain))
        )
    )


@pytest.mark.thorough
@pytest.mark.parametrize("wrapped", [False, True], ids=["beside", "wrapped"])
def test_a_plan_counts_their_bytes(wrapped: bool) -> None:
    model, twin = net(), net()
    optimizer, plain = (EightBits(m.parameters(), wrapped=wrapped) for m in (model, twin))
    example = torch.zeros(8, WIDTH)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    handle = brim.fit(
        model, optimizer, vram=int(2.6 * weights_bytes), ram="64MiB", device="emulated", example=example
    )
    assert handle.choice.states == "ram"
    assert train(model, optimizer, range(3)) == train(twin, plain, range(3))
    assert handle.memory.ram.peak_bytes == handle.plan.promise.peak_bytes["ram"]
    handle.remove()
    assert_same(model, twin)


def fitted(model: nn.Module, optimizer: torch.optim.Optimizer, weights_factor: float) -> Any:
    """The handle of a training in so many times the bytes of the weights."""
    vram_bytes = int(weights_factor * sum(p.nbytes for p in model.parameters()))
    example = torch.zeros(8, WIDTH)
    return brim.fit(model, optimizer, vram=vram_bytes, ram="64MiB", device="emulated", example=example)


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("resumed", "then"), [("keep", 20.0), ("ram", 2.5)])
@pytest.mark.parametrize(("states", "factor"), [("keep", 20.0), ("ram", 2.5)])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(EightBits, marks=pytest.mark.thorough),
        lambda p: EightBits(p, wrapped=True),
        pytest.param(of_torchao, marks=pytest.mark.thorough),  # it is compiled
        pytest.param(of_bitsandbytes, marks=pytest.mark.thorough),
    ],
    ids=["beside", "wrapped", "torchao", "bitsandbytes"],
)
def test_a_checkpoint_without_pickle_holds_them(
    make: Any, states: str, factor: float, resumed: str, then: float, tmp_path: Path
) -> None:
    twin, model = net(), net()
    plain, optimizer = make(twin.parameters()), make(model.parameters())
    handle = fitted(model, optimizer, factor)
    assert handle.choice.states == states
    assert train(model, optimizer, range(3)) == train(twin, plain, range(3))
    layout, values = handle.states(names_of(model))
    write_safetensors(tmp_path / "states.safetensors", layout, values)
    numbers = json.loads(json.dumps(optimizer_numbers(optimizer, names_of(model))))
    handle.remove()
    weights = model.state_dict()
    model = net()
    model.load_state_dict(weights)
    optimizer = make(model.parameters())
    handle = fitted(model, optimizer, then)
    assert handle.choice.states == resumed
    handle.load_states(names_of(model), numbers, load_file(tmp_path / "states.safetensors").items())
    assert train(model, optimizer, range(3, 6)) == train(twin, plain, range(3, 6))
    handle.remove()
    assert_same(model, twin)


def test_a_wrapped_state_that_could_not_be_restored_is_not_saved() -> None:
    model = net()
    optimizer = EightBits(model.parameters())
    handle = fitted(model, optimizer, 20.0)
    train(model, optimizer, range(1))
    weight = model.get_parameter("0.0.weight")
    optimizer.state[weight] = EightBits([weight], wrapped=True).new(weight)
    with pytest.raises(UnsupportedError, match="Codes, which safetensors cannot hold"):
        handle.states(names_of(model))


def test_scales_that_are_not_finite_are_noticed() -> None:
    model = net()
    optimizer = EightBits(model.parameters(), wrapped=True)
    handle = fitted(model, optimizer, 20.0)
    train(model, optimizer, range(1))
    optimizer.state[model.get_parameter("0.0.weight")]["average"].scales[3] = float("nan")
    _, values = handle.states(names_of(model), finite)
    with pytest.raises(ModelError, match=r"0\.0\.weight\.average"):
        list(values)


def test_bytes_that_are_not_those_of_a_state_are_refused() -> None:
    model = net()
    optimizer = EightBits(model.parameters(), wrapped=True)
    states = WrappedStates(optimizer, names_of(model))
    for name in ("0.0.weight.average.bytes", "0.0.weight.other.bytes", "elsewhere.average.bytes"):
        with pytest.raises(ModelError, match="3 bytes of"):
            list(states.unpacked([(name, torch.zeros(3, dtype=torch.uint8))]))


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("is_paged", True, "pages"),
        ("mng", SimpleNamespace(index2config={(0, 1): {}}, module_weight_config_triple=[]), "positions"),
        ("mng", SimpleNamespace(index2config={}, module_weight_config_triple=[()]), "positions"),
    ],
)
def test_what_bitsandbytes_does_with_all_parameters_is_refused(
    attribute: str, value: Any, words: str, tmp_path: Path
) -> None:
    model = net()
    optimizer = EightBits(model.parameters())
    setattr(optimizer, attribute, value)
    with pytest.raises(UnsupportedError, match=words):
        apply(model, optimizer, machine("emulated", tmp_path), states="ram")
