"""Optimizers by name, and the bytes of their states.

Most are PyTorch's own. Lion is here; AdamW with moments of 8 bits is torchao's. An optimizer with smaller states
trains differently: it is a choice, not a lossless technique.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.errors import UnsupportedError, UsageError
from brim.predict import optimizer_states

# Run as PyTorch's fused kernels, which need no temporary memory. Those of other optimizers have no fake kernels,
# which a prediction needs.
FUSED = ("adamw", "adam")


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2, one loop."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                update = average.clone().mul_(first).add_(parameter.grad, alpha=1 - first).sign_()
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - second)
        return loss


def make(name: str, parameters: Iterable[Any], lr: float | None = None, **settings: Any) -> Optimizer:
    """An optimizer by its name in ``optimizer_states.OPTIMIZERS``.

    ``parameters`` are tensors or PyTorch's groups (dictionaries); with ``lr`` None, and for options that are not
    given (``weight_decay``, ``betas``, ``fused``, ...), the library's default holds. Raises UsageError for an unknown
    name or option, UnsupportedError for ``adamw8bit`` without torchao.
    """
    maker = _maker(name)
    options = settings if lr is None else {"lr": lr, **settings}
    allowed = [option for option in inspect.signature(maker).parameters if option not in ("self", "params")]
    fixed = _FIXED.get(name, {})
    for option in options:
        if option not in allowed or option in fixed:
            raise UsageError(
                f"The optimizer {name} has no option {option}.",
                f"Its options are {', '.join(sorted(set(allowed) - set(fixed)))}.",
            )
    optimizer: Optimizer = maker(list(parameters), **fixed, **options)
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate, also in compiled optimizers (torchao's), which have it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def state_bytes(name: str, parameters: Iterable[torch.Tensor]) -> int:
    """The bytes of the optimizer's states of ``parameters`` after a step, step counters included.

    PyTorch keeps its counters (4 bytes each) in RAM unless the optimizer is fused or capturable.
    """
    return sum(optimizer_states.state_bytes(name, p.shape, p.dtype.itemsize) for p in parameters)


def _maker(name: str) -> Callable[..., Optimizer]:
    optimizer_states.check_name(name)
    if name != "adamw8bit":
        return _MAKERS[name]
    try:
        maker: Callable[..., Optimizer] = importlib.import_module("torchao.optim").AdamW8bit
    except ImportError as error:
        raise UnsupportedError(
            "Cannot use the optimizer adamw8bit.",
            f"It needs torchao, which cannot be imported: {error}.",
            "Install torchao, or use adafactor or lion, whose states are small as well.",
        ) from error
    return maker


_MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
}
_FIXED: dict[str, dict[str, Any]] = {"sgd-momentum": {"momentum": 0.9}}
