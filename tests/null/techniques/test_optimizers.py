"""Optimizers by name: the real ones, and what each keeps is what it is said to keep."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import UnsupportedError, UsageError
from brim.predict.optimizer_states import OPTIMIZERS
from brim.techniques import optimizers

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
PURE = [name for name in OPTIMIZERS if name != "adamw8bit"]
SHAPES = [(64, 80), (40,), (3, 5, 7), (100, 41), (), (1, 4096)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, dtype=torch.float32).to(dtype)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def real_bytes(value: Any) -> int:
    """Of a tensor, or of the tensors that a wrapping one is made of."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(real_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PURE)
def test_state_is_what_the_real_one_keeps(name: str, dtype: torch.dtype) -> None:
    made = parameters(dtype)
    expected = [optimizers.state_bytes(name, [p]) for p in made]
    optimizer = optimizers.make(name, made, lr=1e-3)
    optimizer.step()
    assert [sum(real_bytes(v) for v in optimizer.state[p].values()) for p in made] == expected


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("default")
def test_eight_bit_state_is_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the same update, without a C++ compiler
    made = parameters()
    expected = [optimizers.state_bytes("adamw8bit", [p]) for p in made]
    before = [parameter.detach().clone() for parameter in made]
    optimizer = optimizers.make("adamw8bit", made, lr=1e-2)
    optimizer.step()
    assert [sum(real_bytes(v) for v in optimizer.state[p].values()) for p in made] == expected
    plain = parameters()
    torch.optim.AdamW(plain, lr=1e-2).step()
    for parameter, old, other in zip(made, before, plain, strict=True):
        assert not torch.equal(parameter, old)
        assert (parameter - other).abs().max() < 2e-3


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_eight_bits_without_torchao_is_a_clear_error() -> None:
    with pytest.raises(UnsupportedError, match="torchao"):
        optimizers.make("adamw8bit", parameters())


@pytest.mark.parametrize("name", PURE)
def test_every_one_lowers_a_loss(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 6), torch.randn(32, 6)
    optimizer = optimizers.make(name, model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


def test_options_and_groups_reach_the_library() -> None:
    first, second = parameters()[:2]
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": [second]}]
    made = optimizers.make("adamw", groups, lr=2e-3, betas=(0.8, 0.9), weight_decay=0.3, fused=True)
    assert type(made) is torch.optim.AdamW
    assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.3]
    assert made.defaults["betas"] == (0.8, 0.9)
    assert made.defaults["fused"] is True
    assert optimizers.make("sgd-momentum", [first]).defaults["momentum"] == 0.9


def test_lion_follows_its_algorithm() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = optimizers.make("lion", [parameter], lr=0.1, weight_decay=0.5)
    momentum, value = torch.zeros(3), parameter.detach().clone()
    for gradient in (torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-3.0, 0.5, 2.0])):
        update = (0.9 * momentum + 0.1 * gradient).sign()
        value = value - 0.1 * (update + 0.5 * value)
        momentum = 0.99 * momentum + 0.01 * gradient
        parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), value)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], momentum)


def test_misuse() -> None:
    made = parameters()
    with pytest.raises(UsageError, match="adamw"):
        optimizers.make("adanw", made)
    with pytest.raises(UsageError, match="beta3"):
        optimizers.make("adamw", made, beta3=0.1)
    with pytest.raises(UsageError, match="momentum"):
        optimizers.make("sgd-momentum", made, momentum=0.5)
    with pytest.raises(UsageError, match="known"):
        optimizers.state_bytes("nothing", made)


def test_a_rate_in_a_tensor_is_filled_and_a_number_replaced() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    held = torch.tensor(0.1)
    tensor, number = torch.optim.SGD([parameter], lr=held), torch.optim.SGD([parameter], lr=0.1)
    for optimizer in (tensor, number):
        optimizers.set_lr(optimizer, 0.5)
    assert tensor.param_groups[0]["lr"] is held and held.item() == 0.5
    assert number.param_groups[0]["lr"] == 0.5
