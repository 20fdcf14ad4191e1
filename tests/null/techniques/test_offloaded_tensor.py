"""Gradients that are away are read and changed as they are, or refused: never silently changed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from brim.core import Timeline
from brim.errors import UnsupportedError
from brim.memory.tiers import cpu_memory, emulated_memory
from brim.techniques.offloaded_tensor import OffloadedTensor
from brim.techniques.optimizer_offload import technique as optimizer_offload

Trained = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(params=["disk", "ram"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Trained:
    """A net after its first backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    timeline = Timeline("test", measured=True)
    if request.param == "disk":
        memory = cpu_memory(timeline, ram_bytes=1 << 30)
        memory.use_disk(folder=str(tmp_path), limit_bytes=None)
    else:
        memory = emulated_memory(timeline, vram_bytes=1 << 20, ram_bytes=1 << 20)
    optimizer_offload.apply(net, optimizer, memory, states=request.param, gradients=request.param)
    backward(net)
    assert isinstance(net[0].weight.grad, OffloadedTensor)
    return net, optimizer


def backward(net: nn.Module, by: float = 1.0) -> None:
    (net(torch.ones(2, 8)) * by).square().sum().backward()


def through_a_view(gradient: torch.Tensor) -> None:
    gradient[:2] = 0


def through_a_flat_view(gradient: torch.Tensor) -> None:
    gradient.view(-1).mul_(2)


def by_name(gradient: torch.Tensor) -> None:
    torch.mul(gradient, 2, out=gradient)


@pytest.mark.parametrize("change", [through_a_view, through_a_flat_view, by_name])
def test_a_change_that_would_be_lost_is_refused(change: Callable[[torch.Tensor], None], trained: Trained) -> None:
    net, _ = trained
    gradient = net[0].weight.grad
    assert gradient is not None
    before = gradient.clone()
    with pytest.raises(UnsupportedError, match="not in memory"):
        change(gradient)
    assert torch.equal(gradient.clone(), before)
    gradient.add_(1)
    assert torch.equal(gradient.clone(), before + 1)


def test_a_gradient_that_was_accumulated_and_changed_is_read_as_it_is_now(trained: Trained) -> None:
    net, _ = trained
    gradient = net[0].weight.grad
    assert gradient is not None
    before = gradient.clone()
    backward(net)
    assert torch.equal(gradient.clone(), before + before)
    gradient.mul_(3).add_(1)
    assert torch.equal(gradient.clone(), (before + before) * 3 + 1)
    net[0].weight.grad.zero_()
    assert not gradient.any()


def test_a_gradient_that_is_gone_is_not_mistaken_for_the_next(trained: Trained) -> None:
    net, optimizer = trained
    gradient = net[0].weight.grad
    assert gradient is not None
    before = gradient.clone()
    optimizer.zero_grad()
    assert torch.equal(gradient.clone(), before), "nothing has taken its place yet"
    backward(net, by=2.0)
    for use in (torch.Tensor.clone, torch.Tensor.zero_, lambda g: g.mul_(torch.tensor(2.0)), lambda g: g.add_(1)):
        with pytest.raises(UnsupportedError, match="and no longer exists"):
            use(gradient)
    assert torch.equal(net[0].weight.grad.clone(), before * 4)
    held = net[0].weight.grad
    optimizer.brim.remove()
    assert torch.equal(net[0].weight.grad, before * 4)
    with pytest.raises(UnsupportedError, match="and no longer exists"):
        held.clone()


def test_gradients_asked_for_twice_are_added_once(trained: Trained) -> None:
    """While what a second pass has made waits to be added to what the first one has left."""
    net, optimizer = trained
    gradients = optimizer.brim._storage.gradients
    before = net[0].weight.grad.clone()
    index, number = next(
        (i, b.parameters.index(net[0].weight))
        for i, b in optimizer.brim.blocks.items()
        if net[0].weight in b.parameters
    )
    net[0].weight.grad = None
    gradients._adding.add((index, number))
    net[0].weight.grad = torch.ones(8, 8)
    for _ in range(2):
        with gradients.present(index) as found:
            assert torch.equal(found[number][0], before + 1)
