"""Backward passes that read values of plain tensors in PyTorch's C++.

For a tensor subclass, such as a traced tensor, C++ does not check whether a factor is zero and takes a general
formula, which is much longer. The formulas here are those of torch/csrc/autograd/FunctionsManual.cpp for factors
without zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Product(torch.autograd.Function):
    """``prod_backward``; ``dim`` None: of all elements."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        result = torch.prod(source) if dim is None else torch.prod(source, dim, keepdim)
        ctx.save_for_backward(source, result)
        ctx.dim = None if keepdim else dim
        ctx.flat = dim is None
        ctx.summed = dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, result = ctx.saved_tensors
        if ctx.flat:
            zeros = (source == 0).nonzero()
        else:
            if ctx.dim is not None:
                gradient, result = gradient.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
            mask = source == 0
            zeros = mask.sum(ctx.summed, True)
            zeros.sum()
        return gradient * (result / source).conj(), None, None


class _RunningProduct(torch.autograd.Function):
    """``cumprod_backward``."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int) -> torch.Tensor:
        result = torch.cumprod(source, dim)
        ctx.save_for_backward(source, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, result = ctx.saved_tensors
        weighted = result.conj() * gradient
        zeros = source == 0
        zeros.any()
        return _reversed_sums(weighted, ctx.dim).div(source.conj()), None


def _reversed_sums(source: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = source.flip(dim)
    sums = flipped.cumsum(dim)  # C++ frees both at the end of its statement
    return sums.flip(dim)


def _looks_at_values(source: torch.Tensor) -> bool:
    """Return True if C++ would read values in the backward pass; transforms have formulas of their own."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    floating = source.is_floating_point() or source.is_complex()
    return floating and source.dim() > 0 and source.requires_grad and torch.is_grad_enabled() and not inside


def _prod(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    dim = args[0] if args else kwargs.get("dim")
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    plain = set(kwargs) <= {"dim", "keepdim"} and len(args) <= 2 and isinstance(dim, int | None)
    if not plain or isinstance(dim, bool) or not _looks_at_values(source):
        return torch.prod(source, *args, **kwargs)
    return _Product.apply(source, dim, bool(keepdim))  # type: ignore[no-any-return,no-untyped-call]


def _cumprod(source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    dim = args[0] if args else kwargs.get("dim")
    plain = set(kwargs) <= {"dim", "dtype"} and len(args) <= 1 and kwargs.get("dtype") in (None, source.dtype)
    if (
        not plain
        or not isinstance(dim, int)
        or not _looks_at_values(source)
        or source.numel() <= 1
        or source.shape[dim] == 1
    ):
        return torch.cumprod(source, *args, **kwargs)
    return _RunningProduct.apply(source, dim)  # type: ignore[no-any-return,no-untyped-call]


def _vander(source: torch.Tensor, *, N: int | None = None) -> torch.Tensor:
    """LinearAlgebra.cpp, ``linalg_vander``: a column of ones, and running products."""
    columns = source.shape[-1] if N is None else N
    if columns <= 1 or not _looks_at_values(source):
        return torch.linalg.vander(source, N=N)  # type: ignore[no-any-return]
    shape = (*source.shape, columns - 1)
    powers = _cumprod(source.unsqueeze(-1).expand(shape), -1)
    return torch.cat((powers.new_ones((*source.shape, 1)), powers), -1)


BY_VALUES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vander: _vander,
    torch.prod: _prod, torch.Tensor.prod: _prod, torch.cumprod: _cumprod, torch.Tensor.cumprod: _cumprod,
}  # fmt: skip
"""PyTorch's functions whose backward passes look at values, and what stands in their place."""
