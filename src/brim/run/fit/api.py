"""``brim.fit``: any ``nn.Module`` that exists already, in place, inside a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from brim.errors import UsageError
from brim.run.fit.forward_prediction import plan_forward
from brim.run.fit.machine import (
    Device,
    budgets,
    forward_need,
    held_vram_bytes,
    machine,
    on,
    put_in_force,
)
from brim.run.fit.step import Fitted
from brim.run.fit.training import fit_training
from brim.techniques.base import refuse_second, refuse_special_tensors
from brim.techniques.dry_run import as_arguments
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming

_Example = torch.Tensor | Mapping[str, Any] | Sequence[Any]


@overload
def fit(
    model: nn.Module,
    optimizer: None = None,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    example: _Example | None = None,
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
    example: _Example | None = None,
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
    example: _Example | None = None,
    activations: str | int | None = None,
    plan: str | Path | None = None,
) -> WeightStreaming | Fitted:
    """Fit ``model`` into ``vram`` (the compute device) and ``ram``: amounts such as ``"8GiB"``.

    Without ``optimizer`` for inference; with it, training steps fit too, gradients and the optimizer's states
    included, and a training loop stays as it is: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``.

    A budget that is not given is what is free, and what the model holds of it already, less a tenth. ``device`` is
    "auto", "cuda", "cpu", "emulated" or one GPU of several ("cuda:1"); a model that is on a GPU stays on that one.
    On a machine without CUDA the compute tier is RAM, and what does not fit rests in a scratch file (``BRIM_SCRATCH``
    or the temporary folder). The budget counts the module's tensors and its activations. ``example`` is what the
    model is called with: a tensor, a tuple of positional inputs, or a dictionary of named ones; a step's activations
    are predicted from it without running anything. ``activations`` gives them instead; with neither, an eighth of the
    budget is set aside. ``device="emulated"`` lets a pool in RAM play VRAM, for trying out plans without a GPU.
    ``plan`` is a file of ``brim plan --task train``: just that is done, and the loop gives the model as many rows at
    once as the plan says.

    The returned handle has ``plan``, ``timeline()`` and ``remove()``, and is also at ``model.brim``. Raises
    BudgetError when nothing fits (with the smallest budget that does), UsageError when it is fitted already, and
    UnsupportedError for parameters that are not their bytes: quantized by others, sharded, sparse, or on meta.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"brim.fit was given a {type(model).__name__}.", "It takes an nn.Module.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"brim.fit was given a {type(optimizer).__name__} as the optimizer.", "It takes torch's.")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper calls the module inside
    refuse_second(model)
    refuse_special_tensors(model)
    inputs = None if example is None else as_arguments(example)
    with on(device, model) as kind:
        hardware = machine(kind)
        budget = budgets(hardware, vram, ram, kind, held_vram_bytes=held_vram_bytes(model, optimizer))
        if optimizer is not None:
            return fit_training(model, optimizer, hardware, budget, kind, inputs, activations, plan)
        if plan is not None:
            raise UsageError(
                f"brim.fit was given the plan {plan}.", "Plans are for training.", "Give the optimizer too."
            )
        need = forward_need(model, budget, hardware, inputs, activations)
        partition, made = plan_forward(model, hardware, budget, need, inputs, kind)
        return put_in_force(model, partition, made, hardware, Weights(), kind)
