"""A small model of every awkward kind, and how to fit it so that most of it really streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.techniques.streaming.weight_streaming import RESIDENT, WeightStreaming

WIDTH, WORDS = 48, 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Tiny(nn.Module):
    """A language model with a batch norm. ``order`` is the sequence of layers in a step, to be changed at will."""

    def __init__(self, *, tied: bool = False, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


@dataclass(frozen=True)
class Tools:
    """``device`` is ``cpu`` or ``emulated``; ``fit`` leaves at most ``share`` of the model in the compute tier."""

    device: str
    share: float = 0.6

    def make(self, *, tied: bool = False, seed: int = 0, layers: int = 6) -> Tiny:
        torch.manual_seed(seed)
        return Tiny(tied=tied, layers=layers).eval()

    def fit(self, model: nn.Module, **options: Any) -> WeightStreaming:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        budget: dict[str, Any] = {"ram": int(size * self.share)}
        if self.device == "emulated":
            budget = {"vram": int(size * self.share), "ram": int(size * self.share)}
        handle = brim.fit(model, device=self.device, activations=0, **{**budget, **options})
        assert any(choice != RESIDENT for choice in handle.plan.choices("weight_streaming").values())
        return handle


@pytest.fixture(params=["cpu", "emulated"])
def tools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tools:
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm")  # hundreds of tiny files: a busy disk would set the pace
    return Tools(request.param)


@pytest.fixture
def make_tiny() -> Callable[..., Tiny]:
    return Tools("cpu").make


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(10).view(2, 5)


@pytest.fixture
def same(ids: torch.Tensor) -> Callable[[nn.Module, nn.Module], None]:
    """Asserts that two models give the same, bit for bit, step after step."""

    def check(fitted: nn.Module, twin: nn.Module, *, steps: int = 3) -> None:
        with torch.no_grad():
            for _ in range(steps):
                assert torch.equal(fitted(ids), twin(ids))

    return check
