"""Memory that grows with every step of a trace is reported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from brim.core import Trace
from brim.predict.tracer import trace


def test_a_step_is_repeated_only_as_often_as_was_asked() -> None:
    def build() -> Any:
        layer, kept = nn.Linear(256, 256).cuda(), list[torch.Tensor]()
        return lambda: kept.append(layer(torch.ones(256, 256, device="cuda")))

    assert len(trace(build, steps=3).step_starts) == 3
    assert trace(build, steps=3).leak is None, "three steps do not tell a leak from a warm-up"
    leak = trace(build, steps=3, most_steps=20).leak
    assert leak is not None
    assert (leak.steps, leak.bytes_per_step) == (20, 2 * 256 * 256 * 4)


def test_a_trace_with_a_leak_is_the_same_after_json() -> None:
    kept: list[torch.Tensor] = []
    made = trace(lambda: lambda: kept.append(torch.ones(256, 256, device="cuda")), steps=20)
    assert made.leak is not None
    assert Trace.from_json(made.to_json()) == made
