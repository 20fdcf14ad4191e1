"""The optimizers that ``brim estimate`` knows by name, as their libraries make them by default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.techniques.optimizers import make

_BLOCK = 256  # elements that share one scale in bitsandbytes' blockwise quantization
_SMALLEST_QUANTIZED = 4096  # bitsandbytes' min_8bit_size


class AdamW8bit(Optimizer):
    """The memory of bitsandbytes' ``AdamW8bit`` (bitsandbytes/optim/optimizer.py, ``Optimizer2State``), for traces.

    Two moments of one byte with a float32 scale per 256 elements; parameters under 4,096 elements keep float32
    moments; one table of 256 float32 for each moment. Its one fused kernel per parameter needs nothing else. The
    arithmetic of the update is left out: this never steps real parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3):
        super().__init__(params, {"lr": lr})
        self._tables: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "traces step without a closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._allocate(parameter)
                parameter.add_(
                    parameter.grad, alpha=-group["lr"]
                )  # stands for the fused kernel: nothing is allocated

    def _allocate(self, parameter: nn.Parameter) -> None:
        state, quantized = self.state[parameter], parameter.numel() >= _SMALLEST_QUANTIZED
        for moment in ("1", "2"):
            dtype = torch.uint8 if quantized else torch.float32
            state[f"state{moment}"] = torch.zeros_like(parameter, dtype=dtype)
            if quantized:
                blocks = -(-parameter.numel() // _BLOCK)
                if moment not in self._tables:
                    self._tables[moment] = torch.zeros(256, device=parameter.device)
                state[f"qmap{moment}"] = self._tables[moment]
                state[f"absmax{moment}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer by its name in ``workload.OPTIMIZERS``, its library's defaults everywhere else."""
    return AdamW8bit(parameters) if name == "adamw8bit" else make(name, parameters)
