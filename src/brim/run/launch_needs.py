"""What the models of a program hold, and which optimizers train them: found by looking, without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from brim.core.hardware import VRAM
from brim.errors import UnsupportedError
from brim.run.launch_hooks import living

NOT_TAKEN_APART = ("torch.nn.parallel", "torch.distributed", "deepspeed")  # they move their weights themselves
STAND_IN = "brim_stand_in"  # an optimizer that only predictions are made with


def plain(model: nn.Module) -> nn.Module:
    """What ``torch.compile``'s wrapper calls."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return model if inner is None else inner


def within_fraction(budget_bytes: Mapping[str, int], fraction: float, total_bytes: int) -> dict[str, int]:
    """``budget_bytes`` where the program lets PyTorch have ``fraction`` of the device's ``total_bytes`` only."""
    most = int(fraction * total_bytes)
    return {tier: min(count, most) if tier == VRAM else count for tier, count in budget_bytes.items()}


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that train parameters of ``model``; what wraps another one (accelerate's) is not counted."""
    mine = {id(p) for p in model.parameters()}
    found = [o for o in living(torch.optim.Optimizer) if "param_groups" in vars(o) and STAND_IN not in vars(o)]
    return [o for o in found if any(id(p) in mine for group in o.param_groups for p in group["params"])]


def held_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """What ``model`` holds from the second step on, activations apart."""
    from brim.techniques import optimizer_offload  # a program whose budget is ample does without

    tensors = [*model.parameters(), *model.buffers()]
    held = sum(t.numel() * t.element_size() for t in tensors)
    trained = [p for p in model.parameters() if p.requires_grad]
    mine = {id(p) for p in trained}
    for optimizer in optimizers:
        count = sum(
            p.numel() * p.element_size() for g in optimizer.param_groups for p in g["params"] if id(p) in mine
        )
        try:
            blocks = optimizer_offload.find_blocks(model, optimizer)
            states = sum(block.state_bytes for block in blocks)
        except UnsupportedError:  # it is not known what it keeps; most keep two of each
            states = 2 * count
        held += count + states
    return held
