"""The optimizers that ``brim estimate`` knows by name, with their libraries' defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.predict.optimizer_states import BLOCK, CODE_BOOK_BYTES, is_quantized
from brim.techniques.optimizers import make

_LOOPED = 2 * 32  # blocks a multiprocessor from which on Inductor loops over them (torch/_inductor/ir.py, num_splits)


class AdamW8bit(Optimizer):
    """The memory of torchao's ``AdamW8bit`` (torchao/optim/adam.py) with its compiled step, for traces.

    Two moments of one byte with a float32 scale per 256 elements and a table of 256 float32 each, per parameter;
    parameters under 4,096 elements or that 256 does not divide keep two of their own dtype. Step counters and the
    learning rate are in RAM. torchao compiles the update of each parameter separately, and Inductor's code for it
    on CUDA (torch 2.13) decides the temporary memory of the step:

    * with few blocks, one kernel that keeps a block in registers (a persistent reduction): nothing, or the new
      scales if rows are not multiples of a block;
    * from 64 blocks a multiprocessor on, a loop over each block and a second kernel after it: both moments in
      float32 and their new scales, for one parameter at a time.

    The arithmetic of the update is left out: this never steps real parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "traces step without a closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self._allocate(parameter)
                temporaries = _beside_the_state(parameter)
                parameter.add_(parameter.grad, alpha=-group["lr"])  # stands for the kernels
                del temporaries

    def _allocate(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            if not is_quantized(parameter.numel()):
                state[moment] = torch.zeros_like(parameter)
                continue
            state[f"{moment}.codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{moment}.scale"] = _scales(parameter)
            state[f"{moment}.qmap"] = torch.zeros(CODE_BOOK_BYTES // 4, device=parameter.device)


def _scales(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros(parameter.numel() // BLOCK, dtype=torch.float32, device=parameter.device)


def _beside_the_state(parameter: nn.Parameter) -> list[torch.Tensor]:
    """Temporary tensors of the compiled update of one parameter."""
    if not is_quantized(parameter.numel()):
        return []
    multiprocessors = torch.cuda.get_device_properties(parameter.device).multi_processor_count
    looped = parameter.numel() // BLOCK >= _LOOPED * multiprocessors
    temporaries = []
    if looped or (parameter.dim() > 1 and parameter.shape[-1] % BLOCK):
        temporaries += [_scales(parameter) for _ in range(2)]
    if looped:
        temporaries += [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
    return temporaries


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """Build an optimizer by its name in ``workload.OPTIMIZERS``, with its library's defaults."""
    return AdamW8bit(parameters) if name == "adamw8bit" else make(name, parameters)
