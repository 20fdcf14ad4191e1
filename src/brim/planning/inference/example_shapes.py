"""Inputs without their values, but for those that say what a step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brim.model_inputs import map_tensors

_MOST_TOLD = 1 << 14  # elements


def speaks(tensor: torch.Tensor) -> bool:
    """Whether the values of an input are told to a prediction: whole numbers (a mask, lengths), if few."""
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return whole and not tensor.is_meta and 0 < tensor.numel() <= _MOST_TOLD


def as_shapes(example: Any, make: Callable[..., torch.Tensor], **options: Any) -> Any:
    """``example`` with tensors that ``make`` makes of a shape and a dtype; those that speak are copied."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if speaks(tensor) else make(tensor.shape, dtype=tensor.dtype, **options)

    return map_tensors(example, like)


def on_host(example: Any) -> Any:
    """``example`` with those that speak on the CPU: in a trace nothing can be read from a device."""
    return map_tensors(example, lambda tensor: tensor.cpu() if speaks(tensor) else tensor)


def without_values(example: Any) -> Any:
    """Inputs like ``example``, made where this is called: in a trace those that speak are known there.

    There they have to lie on the CPU (``on_host``).
    """
    return map_tensors(example, _without_values)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if speaks(tensor):
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
