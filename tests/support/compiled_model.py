"""Blocks of a Llama, as torchtitan checkpoints them within what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from brim.techniques.checkpointing import technique as checkpointing

_HEADS = 4
_CONTEXTS = {
    "selective": checkpointing.selective_contexts,
    "alternate": partial(checkpointing.selective_contexts, alternate=True),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, width: int, choice: str = "none") -> None:
        super().__init__()
        self._choice = choice
        self.before, self.after = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._choice == "none":
            return self._block(x)
        contexts = _CONTEXTS.get(self._choice)
        more = {} if contexts is None else {"context_fn": contexts}
        return checkpoint(self._block, x, use_reentrant=False, **more)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        normed = self.before(x)
        heads = (part(normed).view(batch, tokens, _HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.after(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
