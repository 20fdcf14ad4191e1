"""Weights placed by a budget for tensors alone: small models take less than what a GPU reserves beside them."""

from __future__ import annotations

from typing import Any

from torch import nn

from brim.errors import BudgetError
from brim.planning.inference.choosing import make_plan
from brim.planning.inference.forward_prediction import forward_need
from brim.planning.inference.machine import budgets, machine, on, put_in_force
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming


def place(model: nn.Module, vram: Any, ram: Any = "1GiB", device: str = "cuda", **more: Any) -> WeightStreaming:
    """As ``brim.fit`` does, but for what PyTorch and cuBLAS hold. It takes ``example`` and ``activations``, too."""
    with on(device, model) as kind:
        hardware = machine(kind)
        budget = budgets(hardware, vram, ram, kind)
        need = forward_need(model, budget, hardware, more.get("example"), more.get("activations"))
        partition, plan = make_plan(model, hardware, budget, need, Weights(), task="forward")
        return put_in_force(model, partition, plan, hardware, Weights(), kind)


def place_least(model: nn.Module, **more: Any) -> WeightStreaming:
    """As much as can be is streamed: the smallest budget that fits."""
    try:
        return place(model, 1, **{"activations": "256KiB", **more})
    except BudgetError as error:
        return place(model, error.smallest_bytes["vram"], **{"activations": "256KiB", **more})
