"""What the models of a program hold, and which optimizers train them, without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from brim.core.hardware import VRAM
from brim.errors import UnsupportedError
from brim.run.script.hooks import Call, living

NOT_TAKEN_APART = ("torch.nn.parallel", "torch.distributed", "deepspeed")  # they move their weights themselves
STAND_IN = "brim_stand_in"  # an optimizer that only predictions are made with


def moves_itself(model: nn.Module) -> bool:
    """Whether it moves its weights by itself. ``DataParallel`` without a GPU only calls what is in it."""
    if isinstance(model, nn.DataParallel) and not model.device_ids:
        return False
    return type(model).__module__.startswith(NOT_TAKEN_APART)


def plain(model: nn.Module) -> nn.Module:
    """What ``torch.compile``'s wrapper calls."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return model if inner is None else inner


def within_fraction(budget_bytes: Mapping[str, int], fraction: float, total_bytes: int) -> dict[str, int]:
    """``budget_bytes`` where the program lets PyTorch have ``fraction`` of the device's ``total_bytes`` only."""
    most = int(fraction * total_bytes)
    return {tier: min(count, most) if tier == VRAM else count for tier, count in budget_bytes.items()}


def living_optimizers(call: Call | None = None) -> list[torch.optim.Optimizer]:
    """Every optimizer of the program, except wrappers around another one (accelerate's)."""
    optimizers = living(torch.optim.Optimizer) if call is None or call.optimizers is None else call.optimizers
    return [o for o in optimizers if "param_groups" in vars(o) and STAND_IN not in vars(o)]


def optimizers_of(
    model: nn.Module, among: Sequence[torch.optim.Optimizer] | None = None
) -> list[torch.optim.Optimizer]:
    """The optimizers that train parameters of ``model``. ``among``: all optimizers, where they are known."""
    mine = {id(p) for p in model.parameters()}
    candidates = living_optimizers() if among is None else among
    return [o for o in candidates if any(id(p) in mine for group in o.param_groups for p in group["params"])]


def held_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """What ``model`` holds from the second step on, activations apart."""
    # a program whose budget is ample does without
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
        except UnsupportedError:  # its states are not known; most optimizers keep two for each parameter
            states = 2 * count
        total_bytes += count + states
    return total_bytes
