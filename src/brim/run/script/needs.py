"""Bytes held by a program's models and the optimizers that train them, without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from brim.core.hardware import VRAM
from brim.errors import UnsupportedError
from brim.run.script.hooks import Call, living

NOT_TAKEN_APART = ("torch.nn.parallel", "torch.distributed", "deepspeed")  # wrappers that move weights themselves
STAND_IN = "brim_stand_in"  # marks an optimizer made for a prediction


def moves_itself(model: nn.Module) -> bool:
    """True if ``model`` moves its weights itself. ``DataParallel`` without a GPU only calls the wrapped module."""
    if isinstance(model, nn.DataParallel) and not model.device_ids:
        return False
    return type(model).__module__.startswith(NOT_TAKEN_APART)


def plain(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s wrapper, or ``model`` itself."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return model if inner is None else inner


def within_fraction(budget_bytes: Mapping[str, int], fraction: float, total_bytes: int) -> dict[str, int]:
    """``budget_bytes`` limited to the program's ``fraction`` of the device's ``total_bytes`` for PyTorch."""
    most = int(fraction * total_bytes)
    return {tier: min(count, most) if tier == VRAM else count for tier, count in budget_bytes.items()}


def living_optimizers(call: Call | None = None) -> list[torch.optim.Optimizer]:
    """All optimizers of the program, except wrappers around another one (accelerate's)."""
    optimizers = living(torch.optim.Optimizer) if call is None or call.optimizers is None else call.optimizers
    return [o for o in optimizers if "param_groups" in vars(o) and STAND_IN not in vars(o)]


def optimizers_of(
    model: nn.Module, among: Sequence[torch.optim.Optimizer] | None = None
) -> list[torch.optim.Optimizer]:
    """The optimizers that train parameters of ``model``. ``among``: all optimizers, if they are known."""
    mine = {id(p) for p in model.parameters()}
    candidates = living_optimizers() if among is None else among
    return [o for o in candidates if any(id(p) in mine for group in o.param_groups for p in group["params"])]


def held_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes that ``model`` holds from the second step on, without activations."""
    # imported late: a program with an ample budget does without
    from brim.techniques.optimizer_offload.state_blocks import state_blocks

    tensors = [*model.parameters(), *model.buffers()]
    total_bytes = sum(t.numel() * t.element_size() for t in tensors)
    trained = [p for p in model.parameters() if p.requires_grad]
    mine = {id(p) for p in trained}
    for optimizer in optimizers:
        count = sum(
            p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"] if id(p) in mine
        )
        try:
            blocks = state_blocks(model, optimizer)
            states = sum(block.state_bytes for block in blocks)
        except UnsupportedError:  # states are unknown; most optimizers have two for each parameter
            states = 2 * count
        total_bytes += count + states
    return total_bytes
