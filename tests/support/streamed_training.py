"""A small network whose blocks all stream, put into force without a planner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.core import Decision, Plan, Promise, Timeline
from brim.memory.tiers import Memory, cpu_memory, emulated_memory
from brim.memory.transfer import ThreadEngine
from brim.techniques.blocks import Partition
from brim.techniques.streaming.weight_streaming import FROM_DISK, FROM_RAM, NAME, RING_SLOTS

WIDTH, LAYERS, WORDS = 32, 6, 40


class Layer(nn.Module):
    """``scale`` belongs to the layer itself; with ``repeats`` its forward is repeated in backward, past all hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.repeats = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.repeats and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


IDS = torch.arange(12).view(3, 4)


def loss_of(net: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten())


def plan_of(partition: Partition, choice: str, slots: int) -> Plan:
    return Plan(
        model="net",
        hardware="this",
        task="train",
        budget_bytes={},
        decisions=tuple(
            Decision(technique=NAME, block=b.name, choice=choice, bytes=b.bytes) for b in partition.blocks
        ),
        promise=Promise(peak_bytes={}, step_s=1.0, bound_s=1.0, limited_by="link"),
        settings={RING_SLOTS: slots},
    )


def memory_for(kind: str) -> Memory:
    timeline = Timeline("training", measured=True)
    if kind == "disk":
        return cpu_memory(timeline, ram_bytes=1 << 20)
    return emulated_memory(timeline, vram_bytes=1 << 20, ram_bytes=1 << 20)


CHOICES = {"disk": FROM_DISK, "ram": FROM_RAM, "three tiers": FROM_DISK}


def kept_gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    made = kept_gradients(net)
    net.zero_grad()
    return made


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.stride() == other[name].stride(), name


def wanted_gradients(**options: Any) -> dict[str, torch.Tensor]:
    twin = Net(**options)
    loss_of(twin).backward()
    return gradients(twin)


def finish_copies(memory: Memory) -> None:
    """Wait until the engine's threads have done everything that they were asked for."""
    engine = memory.engine
    assert isinstance(engine, ThreadEngine)
    for lane in (engine._disk, engine._copy, engine._back, engine._write):
        lane.submit(lambda: None).wait()
