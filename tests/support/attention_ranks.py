"""Attention over several ranks in real processes, each of which compares its part with that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from brim.techniques.parallel import context_parallel
from brim.techniques.parallel.context_parallel import Ring, attention, kernel_for


def largest_errors(ranks: int, folder: Path, *, dtype: torch.dtype, groups: int, scale: float | None) -> list[float]:
    """Of the output and the gradients of queries, keys and values, on the rank where they are largest."""
    store = str(folder / "store")
    processes.spawn(_work, (ranks, store, dtype, groups, scale), nprocs=ranks)
    found = [torch.load(f"{store}-{rank}") for rank in range(ranks)]
    return [max(row) for row in zip(*found, strict=True)]


def _work(rank: int, ranks: int, store: str, dtype: torch.dtype, groups: int, scale: float | None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    heads, tokens = 4, 6 * ranks
    shapes = [(2, heads, tokens, 16), *[(2, heads // groups, tokens, 16)] * 2]
    whole = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    gradient = torch.randn(2, tokens, heads, 16, dtype=dtype)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return context_parallel.own(tensor.transpose(1, 2), rank, ranks).transpose(1, 2)

    mine = [own(tensor).detach().clone().requires_grad_() for tensor in whole]
    query, key, value = whole
    repeated = [tensor.repeat_interleave(groups, 1) for tensor in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True, scale=scale)
    expected.backward(gradient.transpose(1, 2))
    kernel: Any = kernel_for(*mine)
    ring = Ring(group=dist.group.WORLD, rank=rank, ranks=ranks)  # type: ignore[arg-type]
    made = attention(*mine, ring, kernel, scale)
    made.backward(context_parallel.own(gradient, rank, ranks))
    pairs = [(made.transpose(1, 2), own(expected))]
    pairs += [(part.grad, own(tensor.grad)) for part, tensor in zip(mine, whole, strict=True)]
    torch.save([float((one - other).abs().max()) for one, other in pairs], f"{store}-{rank}")
    dist.destroy_process_group()
