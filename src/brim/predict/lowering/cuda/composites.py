"""CUDA kernels that are made of other operators, where the CPU has a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_aten = torch.ops.aten
_ON_EVERY_DEVICE = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional


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


COMPOSITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten.isin.Tensor_Tensor: _isin,
    # PixelShuffle.cpp: the result is dense whatever the layout of what it is made of.
    _aten.pixel_shuffle.default: partial(_aten.pixel_shuffle.default._op_dk, _ON_EVERY_DEVICE),
    _aten.pixel_unshuffle.default: partial(_aten.pixel_unshuffle.default._op_dk, _ON_EVERY_DEVICE),
}
