"""A compiled model's memory, as predicted and as Inductor's own code takes it on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import brim
from brim.techniques import checkpointing, compiling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor writes C++ for CPUs, and there is no g++"),
    pytest.mark.filterwarnings("ignore"),
]
_WIDTH, _HEADS, _TOKENS = 256, 4, 512


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    """Of a Llama, checkpointed as torchtitan does it: within what is compiled."""

    def __init__(self, choice: str) -> None:
        super().__init__()
        self._choice = choice
        self.before, self.after = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(_WIDTH, 3 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._choice == "none":
            return self._block(x)
        if self._choice == "full":
            return checkpoint(self._block, x, use_reentrant=False)
        return checkpoint(self._block, x, use_reentrant=False, context_fn=checkpointing.selective_contexts)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        normed = self.before(x)
        heads = (part(normed).view(batch, tokens, _HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.after(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, choice: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(choice) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def built(choice: str) -> tuple[Model, torch.Tensor, Callable[[], None]]:
    model, x = Model(choice), torch.randn(2, _TOKENS, _WIDTH, requires_grad=True)
    compiling.apply(model, ["layers.0", "layers.1"])

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
    assert brim.simulate(trace).peak_bytes.allocated == pytest.approx(measured_bytes(choice), rel=0.01)
