"""Make example inputs without data, except for values that decide control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brim.model_inputs import map_tensors

_MOST_ELEMENTS = 1 << 14


def keeps_values(tensor: torch.Tensor) -> bool:
    """True for inputs whose values a prediction needs: small integer tensors, such as masks and lengths."""
    is_integer = not tensor.is_floating_point() and not tensor.is_complex()
    return is_integer and not tensor.is_meta and 0 < tensor.numel() <= _MOST_ELEMENTS


def as_shapes(example: Any, make: Callable[..., torch.Tensor], **options: Any) -> Any:
    """Replace tensors of ``example`` by ``make(shape, dtype=...)``; small integer tensors are copied instead."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if keeps_values(tensor) else make(tensor.shape, dtype=tensor.dtype, **options)

    return map_tensors(example, like)


def on_host(example: Any) -> Any:
    """Move small integer tensors of ``example`` to the CPU: a trace cannot read values from a device."""
    return map_tensors(example, lambda tensor: tensor.cpu() if keeps_values(tensor) else tensor)


def without_values(example: Any) -> Any:
    """Create inputs like ``example``; in a trace, the values of small integer tensors are known.

    Those must be on the CPU (``on_host``).
    """
    return map_tensors(example, _without_values)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if keeps_values(tensor):
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype)
