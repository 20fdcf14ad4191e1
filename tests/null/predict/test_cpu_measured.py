"""Some operators run once on the CPU to see what they allocate; those that would take too long are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from brim.predict.lowering.cpu import kernels
from brim.predict.tracer import trace
from support.cpu.compare import predicted_events
from support.cpu.truth import memory_events, peak_bytes

LAYERS = {
    "speech": lambda: (nn.Conv1d(1, 32, 10, stride=5), (2, 1, 8000)),
    "groups": lambda: (nn.Conv2d(24, 48, 5, groups=2, padding=1), (4, 24, 30, 30)),
    "transposed": lambda: (nn.ConvTranspose2d(32, 16, 3, stride=2), (4, 32, 24, 24)),
    "volume": lambda: (nn.Conv3d(16, 32, 3, stride=3), (4, 16, 9, 9, 9)),
    "bfloat16": lambda: (nn.Conv2d(16, 32, 3).bfloat16(), (2, 16, 12, 12)),
}


def steps(name: str) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        layer, shape = LAYERS[name]()
        source = torch.randn(shape, dtype=layer.weight.dtype, requires_grad=True)
        return lambda: layer(source).sum().backward()

    return build


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that were run, in order, beginning with nothing measured."""
    seen: list[str] = []
    run = kernels._run

    def counted(kernel: kernels.Kernel) -> Any:
        seen.append(kernel.func.__name__)
        return run(kernel)

    monkeypatch.setattr(kernels, "_scripts", {})
    monkeypatch.setattr(kernels, "_run", counted)
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_the_peak_is_what_the_profiler_sees(name):
    traced = trace(steps(name), steps=1, target="cpu")
    assert not traced.not_modelled
    predicted = predicted_events(traced)
    measured = memory_events(steps(name), steps=1)
    assert peak_bytes(predicted) == peak_bytes(measured)
    assert sorted(size for size, _ in predicted) == sorted(size for size, _ in measured)


def test_each_shape_runs_once(runs):
    for _ in range(2):
        trace(steps("groups"), steps=2, target="cpu")
    assert runs == ["convolution.default", "convolution_backward.default"]


def test_other_shapes_and_threads_are_measured_again(runs):
    threads = torch.get_num_threads()
    trace(steps("groups"), steps=1, target="cpu")
    trace(steps("transposed"), steps=1, target="cpu")
    try:
        torch.set_num_threads(threads + 1)
        trace(steps("groups"), steps=1, target="cpu")
    finally:
        torch.set_num_threads(threads)
    assert len(runs) == 6


@pytest.mark.parametrize("limit", ["_MOST_FLOPS", "_MOST_BYTES"])
def test_what_is_too_large_is_not_run_but_bounded_and_named(limit, runs, monkeypatch):
    exact = peak_bytes(predicted_events(trace(steps("groups"), steps=1, target="cpu")))
    runs.clear()
    monkeypatch.setattr(kernels, limit, 0)
    traced = trace(steps("groups"), steps=1, target="cpu")
    assert not runs
    assert any("convolution" in name for name in traced.not_modelled)
    assert exact <= peak_bytes(predicted_events(traced)) <= 3 * exact


def test_another_operator_that_is_too_large_counts_its_results_and_is_named(runs, monkeypatch):
    monkeypatch.setattr(kernels, "_MOST_BYTES", 0)
    traced = trace(lambda: lambda: torch.sort(torch.empty(64, 64)), steps=1, target="cpu")
    assert not runs
    assert traced.not_modelled == ("aten.sort: its buffers on the CPU, which were not measured",)
    assert [size for size, _ in predicted_events(traced) if size > 0] == [16384, 16384, 32768]


def test_a_target_with_a_gpu_runs_nothing(runs):
    trace(steps("groups"), steps=1, target="cuda")
    assert not runs
