"""Differentiable collectives: gather the rows of all ranks, and scatter their sums.

Each is the other's backward pass. PyTorch sends (``_c10d_functional``), over whatever process group there is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the rows (the first dimension) of all ranks, in their order."""
    result: torch.Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the rows over ranks, and return this rank's part."""
    result: torch.Tensor = _Scatter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce_scatter(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gather(gradient, ctx.group), None


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the rows of all ranks, without autograd."""
    ops = torch.ops._c10d_functional
    sent = ops.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name)
    received: torch.Tensor = ops.wait_tensor(sent)
    return received


def reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the rows over ranks, and return this rank's part, without autograd."""
    ops = torch.ops._c10d_functional
    sent = ops.reduce_scatter_tensor(tensor.contiguous(), "sum", group.size(), group.group_name)
    received: torch.Tensor = ops.wait_tensor(sent)
    return received
