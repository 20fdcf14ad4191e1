"""A small net whose activations are large enough to leave, and memories for them to go to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.tiers import Memory, cpu_memory, emulated_memory, fake_memory
from brim.techniques.activation_offload.technique import ActivationOffload, apply

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = tuple(f"blocks.{index}" for index in range(5))
SMALLEST, WINDOW = 48 * KIB, 300 * KIB  # of the net's activations, 64 KiB to 256 KiB each

TIERS: dict[str, Callable[[], Memory]] = {
    "disk": lambda: cpu_memory(Timeline("run", measured=True), ram_bytes=64 * MIB),
    "ram": lambda: emulated_memory(Timeline("run", measured=True), vram_bytes=64 * MIB, ram_bytes=64 * MIB),
}
FAKES: dict[str, Callable[[], Memory]] = {
    "disk": lambda: _fake(RAM),
    "ram": lambda: _fake(VRAM),
}


def _fake(compute_tier: str) -> Memory:
    timeline = Timeline("run", measured=False)
    return fake_memory(timeline, compute_tier=compute_tier, compute_bytes=64 * MIB, ram_bytes=64 * MIB)


class Block(nn.Module):
    """Attention and an MLP, as a transformer has them: chunks of one storage, views, a weight used transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def example() -> torch.Tensor:
    return torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))


def step(net: nn.Module, x: torch.Tensor, seed: int = 7) -> list[torch.Tensor]:
    """The loss of one step, and the gradients; dropout draws the same in every call."""
    torch.manual_seed(seed)
    net.zero_grad()
    loss = net(x).pow(2).mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fit(net: nn.Module, memory: Memory, blocks: Any = BLOCKS, **options: Any) -> ActivationOffload:
    return apply(net, blocks, memory, **{"smallest_bytes": SMALLEST, "window_bytes": WINDOW} | options)


def moved_bytes(memory: Memory) -> tuple[int, int]:
    """Out and in."""
    home = DISK if memory.host is None else RAM
    copied, compute = memory.recorder.copied_bytes, memory.compute.tier
    return copied.get((compute, home), 0), copied.get((home, compute), 0)


def held_bytes(memory: Memory) -> tuple[int, int]:
    return memory.compute.held_bytes, memory.ram.held_bytes
