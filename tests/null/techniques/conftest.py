"""A folder for scratch files; a network that trains with all its blocks streamed, from each place where they rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from brim.techniques.blocks import adapters, find_blocks
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from brim.techniques.weights import place_weights
from support.streamed_training import CHOICES, memory_for, plan_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a scratch file goes: in RAM where there is such a file system."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path


@pytest.fixture(params=list(CHOICES))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm")
    return str(request.param)


@pytest.fixture
def fit(kind: str) -> Iterator[Callable[..., WeightStreaming]]:
    handles: list[WeightStreaming] = []

    def fit(net: nn.Module, *, slots: int = 2, training: bool = True, **parts: Any) -> WeightStreaming:
        partition = find_blocks(net, stay=adapters(net), **parts)
        plan, memory = plan_of(partition, CHOICES[kind], slots), memory_for(kind)
        handles.append(place_weights(net, partition, plan, memory, Weights(), training=training))
        return handles[-1]

    yield fit
    for handle in handles:
        handle.remove()
