"""A compiled model's memory, as predicted and as Inductor's own code takes it on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import brim
from brim.techniques import compiling
from support.compiled_model import Block, Model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor writes C++ for CPUs, and there is no g++"),
    pytest.mark.filterwarnings("ignore"),
]
_WIDTH, _TOKENS = 256, 512


def built(choice: str) -> tuple[Model, torch.Tensor, Callable[[], None]]:
    model, x = Model(lambda: Block(_WIDTH, choice)), torch.randn(2, _TOKENS, _WIDTH, requires_grad=True)
    compiling.apply(model)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()
        x.grad = None

    return model, x, step


def measured_bytes(choice: str) -> int:
    """The most that a later step has at once, by PyTorch's profiler, with weights and input."""
    torch.compiler.reset()
    model, x, step = built(choice)
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most + sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), x))


@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_a_step_takes_what_inductors_code_takes(choice: str) -> None:
    trace = brim.trace(lambda: built(choice)[2], steps=2, target="cpu")
    assert trace.not_modelled == ()
    assert brim.simulate(trace).peak_bytes.allocated == measured_bytes(choice)
