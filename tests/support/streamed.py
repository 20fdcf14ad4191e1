"""Small modules, fitted or loaded so that most of them is streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import brim
from brim.errors import BudgetError
from brim.estimation.step_memory import Inputs
from brim.techniques.streaming.weight_streaming import WeightStreaming

MIB = 1 << 20
INPUTS = Inputs(prompt=20, total=20)
X = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Dropout(), nn.ReLU()) for _ in range(8)]).eval()


FITS: dict[str, Callable[[nn.Module], WeightStreaming]] = {
    "cpu": lambda net: brim.fit(net, ram=MIB, activations=16 << 10),
    "three tiers": lambda net: brim.fit(net, vram=MIB, ram=MIB, device="emulated", activations=16 << 10),
}


def same_values(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def warm(path: Path) -> None:
    """Libraries that are imported on first use stay; let them not count as leaks or growth."""
    brim.load(path, ram="400MiB", inputs=INPUTS).brim.remove()  # little enough to be planned


def least_bytes(path: Path) -> int:
    """The smallest budget of a load, with room for what it varies by; most of the model still streams."""
    with pytest.raises(BudgetError) as caught:
        brim.load(path, ram=1, inputs=INPUTS)
    return caught.value.smallest_bytes["ram"] + 4 * MIB


def load_streamed(path: Path, ram: int | None = None) -> nn.Module:
    model = brim.load(path, ram=ram or least_bytes(path), inputs=INPUTS)
    assert any(d.choice == "stream:disk" for d in model.brim.plan.decisions)
    return model
