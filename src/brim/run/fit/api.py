"""``brim.fit``: fit any existing ``nn.Module`` into a budget, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from brim.errors import UsageError
from brim.planning.inference.forward_prediction import plan_forward
from brim.planning.inference.machine import (
    Device,
    budgets,
    forward_need,
    held_ram_bytes,
    held_vram_bytes,
    machine,
    on,
    put_in_force,
)
from brim.planning.strategy.step import Fitted
from brim.run.fit.training import fit_training
from brim.techniques.base import refuse_second, refuse_special_tensors
from brim.techniques.dry_run import as_arguments
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming


@overload
def fit(
    model: nn.Module,
    optimizer: None = None,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    activations: str | int | None = None,
) -> WeightStreaming: ...


@overload
def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    activations: str | int | None = None,
    plan: str | Path | None = None,
) -> Fitted: ...


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: torch.Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    activations: str | int | None = None,
    plan: str | Path | None = None,
) -> WeightStreaming | Fitted:
    """Fit a module that exists already into a memory budget, in place.

    Without ``optimizer``, for inference: blocks that do not fit are streamed while the model runs. With it, for
    training: gradients and the optimizer's states count towards the budget too, and the loop stays as it is:
    ``loss.backward(); optimizer.step(); optimizer.zero_grad()``. The budget covers the module's tensors and
    activations. On a machine without CUDA the model computes in RAM, and tensors that do not fit there rest in a
    scratch file (in the folder ``BRIM_SCRATCH``, else in the temporary one).

    Args:
        model: Any module with ordinary parameters of which no part is fitted already. A model on a GPU stays on that
            GPU.
        optimizer: The optimizer that trains it, of ``torch.optim`` or derived from it. None: inference.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"90%"`` of its capacity. None: nine tenths of the free memory
            and of what the model holds there already.
        ram: Budget of host memory, written alike. If the model computes in RAM, the smaller of the two budgets
            holds.
        device: ``"auto"`` (CUDA, else the CPU), ``"cuda"``, ``"xpu"``, ``"npu"``, ``"cuda:1"`` (a GPU by number),
            ``"cpu"``, or ``"emulated"``: a part of RAM plays VRAM, to try plans without a GPU.
        example: Inputs of the model: a tensor, a tuple or list of positional inputs, or a dictionary of named ones.
            Activations are predicted from it; nothing is run.
        activations: Bytes of a step's activations, instead of an example. With neither, an eighth of the budget is
            set aside.
        plan: For training: a file from ``brim plan --task train --output``. It is followed exactly, and the loop
            gives the model as many rows at once as the plan says.

    Returns:
        The handle, also at ``model.brim``: ``plan``, ``timeline()``, ``remove()``.

    Raises:
        BudgetError: Nothing fits; ``smallest_bytes`` is a sufficient budget.
        UsageError: An argument of another type, a value that is not allowed, or a model that is fitted already.
        UnsupportedError: Parameters with more state than their bytes: quantized by another library, sharded, sparse,
            or on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"Cannot fit a {type(model).__name__}.", "brim.fit takes an nn.Module.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"Cannot use a {type(optimizer).__name__} as the optimizer.", "brim.fit takes PyTorch's.")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper calls the module inside
    refuse_second(model)
    refuse_special_tensors(model)
    inputs = None if example is None else as_arguments(example)
    # Tensors created in inference mode could never be changed outside of it.
    with on(device, model) as kind, torch.inference_mode(False):
        hardware = machine(kind)
        owners = [model], [] if optimizer is None else [optimizer]
        held_vram, held_ram = held_vram_bytes(*owners, kind), held_ram_bytes(*owners)
        budget = budgets(hardware, vram, ram, kind, held_vram_bytes=held_vram, held_ram_bytes=held_ram)
        if optimizer is not None:
            return fit_training(model, optimizer, hardware, budget, kind, inputs, activations, plan)
        if plan is not None:
            raise UsageError(
                f"Cannot use the plan {plan} without an optimizer.", "Plans are for training.", "Give the optimizer."
            )
        need = forward_need(model, budget, hardware, inputs, activations)
        partition, forward_plan = plan_forward(model, hardware, budget, need, inputs, kind)
        return put_in_force(model, partition, forward_plan, hardware, Weights(), kind)
