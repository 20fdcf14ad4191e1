"""Gradients that are away are read and changed as they are, or refused: never silently changed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from brim.core import Timeline
from brim.errors import UnsupportedError
from brim.memory.tiers import cpu_memory
from brim.techniques import optimizer_offload
from brim.techniques.away import Away


@pytest.fixture
def trained(tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    memory = cpu_memory(Timeline("test", measured=True), ram_bytes=1 << 30)
    memory.use_disk(folder=str(tmp_path), limit_bytes=None)
    optimizer_offload.apply(net, optimizer, memory, states="disk", gradients="disk")
    net(torch.ones(2, 8)).square().sum().backward()
    assert isinstance(net[0].weight.grad, Away)
    return net, optimizer


def through_a_view(gradient: torch.Tensor) -> None:
    gradient[:2] = 0


def through_a_flat_view(gradient: torch.Tensor) -> None:
    gradient.view(-1).mul_(2)


def by_name(gradient: torch.Tensor) -> None:
    torch.mul(gradient, 2, out=gradient)


@pytest.mark.parametrize("change", [through_a_view, through_a_flat_view, by_name])
def test_a_change_that_would_be_lost_is_refused(
    change: Callable[[torch.Tensor], None], trained: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    net, _ = trained
    gradient = net[0].weight.grad
    assert gradient is not None
    before = gradient.clone()
    with pytest.raises(UnsupportedError, match="elsewhere"):
        change(gradient)
    assert torch.equal(gradient.clone(), before)
    gradient.add_(1)
    assert torch.equal(gradient.clone(), before + 1)
