"""CUDA kernels that are made of other operators, where the CPU has a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _isin(
    elements: torch.Tensor, wanted: torch.Tensor, *, assume_unique: bool = False, invert: bool = False
) -> torch.Tensor:
    """TensorCompare.cpp: few are compared one by one (cuda/TensorCompare.cpp), many are sorted together."""
    result = elements.new_empty(elements.shape, dtype=torch.bool)
    if not elements.numel():
        return result
    if wanted.numel() < int(10 * elements.numel() ** 0.145):
        result.fill_(invert)
        each, others = elements.unsqueeze(-1), wanted.view((1,) * elements.dim() + (-1,))
        return result.copy_(each.ne(others).all(-1) if invert else each.eq(others).any(-1))
    if assume_unique:
        first, second = elements.ravel(), wanted.ravel()
    else:
        first, order = _aten._unique.default(elements, False, True)
        second = _aten._unique.default(wanted, False)[0]
    joined = torch.cat((first, second))  # kept to the end, as its parts are not
    del first, second
    values, places = joined.sort(stable=True, dim=0, descending=False)
    repeated = torch.empty_like(values, dtype=torch.bool)
    repeated[:-1].copy_(values[1:].ne(values[:-1]) if invert else values[1:].eq(values[:-1]))
    repeated[-1].fill_(invert)
    mask = torch.empty_like(repeated).index_copy_(0, places, repeated)
    return result.copy_(mask[: elements.numel()].view(elements.shape) if assume_unique else mask[order])


def _pixel_shuffle(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """PixelShuffle.cpp, ``math_pixel_shuffle``: the result is dense whatever the layout of what it is made of."""
    *batch, channels, height, width = tensor.shape
    parts = tensor.reshape(*batch, channels // factor**2, factor, factor, height, width)
    lead, at = range(len(batch)), len(batch)
    moved = parts.permute(*lead, at, at + 3, at + 1, at + 4, at + 2).clone(memory_format=torch.contiguous_format)
    return moved.view(*batch, channels // factor**2, height * factor, width * factor)


def _pixel_unshuffle(tensor: torch.Tensor, factor: int) -> torch.Tensor:
    """PixelShuffle.cpp, ``math_pixel_unshuffle``."""
    *batch, channels, height, width = tensor.shape
    parts = tensor.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    lead, at = range(len(batch)), len(batch)
    moved = parts.permute(*lead, at, at + 2, at + 4, at + 1, at + 3).clone(memory_format=torch.contiguous_format)
    return moved.view(*batch, channels * factor**2, height // factor, width // factor)


COMPOSITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten.isin.Tensor_Tensor: _isin,
    _aten.pixel_shuffle.default: _pixel_shuffle,
    _aten.pixel_unshuffle.default: _pixel_unshuffle,
}
