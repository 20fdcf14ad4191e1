"""Optimizers by name, the real ones, and what each keeps for a parameter.

Most are PyTorch's own. Lion is here; AdamW with moments of 8 bits is torchao's. What a smaller state costs is another
course of training: these are choices, not lossless techniques.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brim.errors import UnsupportedError, UsageError
from brim.predict.formulas.optimizers import MADE, optimizer_state

OPTIMIZERS = MADE
# Made as PyTorch's fused kernels, which take nothing beside the states. PyTorch has no fake kernels of others', and
# a plan is a prediction.
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


def make(name: str, parameters: Iterable[Any], lr: float | None = None, **known: Any) -> Optimizer:
    """An optimizer by its name in ``OPTIMIZERS``.

    ``parameters`` are tensors or PyTorch's groups (dictionaries); ``lr`` None is the library's default, and so is
    whatever is not among ``known`` (``weight_decay``, ``betas``, ``fused``, ...). Raises UsageError for an unknown
    name or option, UnsupportedError where ``adamw8bit`` is asked for without torchao.
    """
    maker = _maker(name)
    options = known if lr is None else {"lr": lr, **known}
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
    """Let the next step take ``lr``. Compiled optimizers (torchao's) keep theirs in a tensor, and want it filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def state_bytes(name: str, parameters: Iterable[torch.Tensor]) -> list[int]:
    """Bytes that the optimizer keeps for each of ``parameters`` once it has stepped, step counters included.

    PyTorch keeps its counters (4 bytes each) in RAM unless the optimizer is fused or capturable.
    """
    _check(name)
    return [
        int(optimizer_state(name, [tuple(p.shape)], dtype=str(p.dtype).removeprefix("torch.")).value)
        for p in parameters
    ]


def _maker(name: str) -> Callable[..., Optimizer]:
    _check(name)
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


def _check(name: str) -> None:
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=3, cutoff=0.0)
        raise UsageError(f"Unknown optimizer {name!r}.", todo=f"Nearest: {', '.join(near)}.")


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
