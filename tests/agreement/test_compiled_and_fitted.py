"""``torch.compile`` over and under a fit: no graph break, and no recompilation after the first step."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import brim

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler reads
IDS = torch.arange(16).reshape(2, 8)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(model: Any, regional: bool, backend: str) -> nn.Module:
    if not regional:
        run: nn.Module = torch.compile(model, backend=backend)
        return run
    for layer in model.layers:
        layer.compile(backend=backend)
    whole: nn.Module = model
    return whole


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.thorough
@pytest.mark.parametrize("fitted_first", [True, False], ids=["over", "under"])
@pytest.mark.parametrize("regional", [True, False], ids=["regional", "model"])
def test_a_streamed_model_has_a_graph_per_kind_of_block(tools: Any, fitted_first: bool, regional: bool) -> None:
    twin, model = tools.make(), tools.make()
    if fitted_first:
        tools.fit(model, example=[IDS])
        run = compiled(model, regional, "eager")
    else:
        run = compiled(model, regional, "eager")
        tools.fit(run, example=[IDS])
    with torch.no_grad():
        counts = []
        for _ in range(4):
            assert torch.equal(run(IDS), twin(IDS))
            counts.append(graphs())
    assert 1 <= counts[0][0] <= 4 and counts[-1][1] == 0
    assert counts[1] == counts[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("regional", [True, False], ids=["regional", "model"])
def test_training_with_streamed_weights(make_tiny: Any, regional: bool) -> None:
    losses: dict[bool, list[float]] = {False: [], True: []}
    counts = []
    for fitted, losses_of in losses.items():
        run = model = make_tiny(layers=12).train()
        for layer in model.layers:
            layer.drop.p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fitted:
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            handle = brim.fit(model, optimizer, device="emulated", vram=size, ram="64MiB", activations=0)
            assert handle.choice.streams and not handle.choice.checkpointing
            run = compiled(model, regional, "aot_eager")
        for _ in range(4):
            loss = run(IDS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses_of.append(loss.item())
            counts.append(graphs())
    assert counts[4][0] >= 1 and counts[-1][1] == 0
    assert counts[5] == counts[-1]
    assert losses[True] == losses[False]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor writes C++ for CPUs, and there is no g++")
def test_resident_and_compiled_by_inductor(tools: Any) -> None:
    twin, model = tools.make(), tools.make()
    brim.fit(model, device=tools.device, vram="1GiB", ram="1GiB", example=[IDS])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        expected = torch.compile(twin)(IDS)
        counters.clear()
        run = torch.compile(model)
        for _ in range(3):
            torch.testing.assert_close(run(IDS), expected)
    assert graphs()[1] == 0
