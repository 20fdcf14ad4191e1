"""Leave large weights that a program creates on the CPU untouched, so that they take no RAM.

They read as zeros. On the device large floats are made up anyway; without this, a model of 8 billion parameters that
is created on the CPU and moved to the GPU would take 32 GB of RAM of the machine that rehearses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

LARGE_BYTES = 8 << 20  # as in values.cpp
_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
    "kaiming_normal_", "orthogonal_", "sparse_",
)  # fmt: skip


class HostWeights:
    """Replaces initialisers once PyTorch is imported. ``left_bytes``: bytes of the untouched weights."""

    def __init__(self) -> None:
        from torch.nn import init

        self.left_bytes = 0
        for name in _INITIALISERS:
            setattr(init, name, self._around(getattr(init, name)))

    def _around(self, initialise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(initialise)
        def _initialise(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if not self._is_left(tensor):
                return initialise(tensor, *arguments, **named)
            self.left_bytes += tensor.nbytes
            return tensor

        return _initialise

    @staticmethod
    def _is_left(tensor: Any) -> bool:
        import torch

        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        if not plain or not tensor.is_floating_point() or tensor.nbytes < LARGE_BYTES:
            return False
        return bool(torch.ops.brim_rehearsal.left_zero(tensor.detach()))
