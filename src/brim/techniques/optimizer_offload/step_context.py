"""Contexts and checks for a step that updates some of an optimizer's parameters only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from brim.errors import UnsupportedError
from brim.techniques.optimizer_offload.state_blocks import StateBlock
from brim.techniques.optimizer_offload.trial import raw_step


@contextlib.contextmanager
def narrowed(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor], stand_ins: Sequence[torch.Tensor] | None = None
) -> Iterator[None]:
    """Restrict ``optimizer`` to these parameters, in their groups (the same dictionaries), within.

    ``stand_ins`` are put in the place of the parameters.
    """
    pairs = zip(parameters, parameters if stand_ins is None else stand_ins, strict=True)
    stand_in_of = {id(parameter): stand_in for parameter, stand_in in pairs}
    groups = optimizer.param_groups
    all_params = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [stand_in_of[id(p)] for p in group["params"] if id(p) in stand_in_of]
        optimizer.param_groups = [group for group in groups if group["params"]]
        place_counters(optimizer)
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, all_params, strict=True):
            group["params"] = params


def place_counters(optimizer: Optimizer) -> None:
    """Move the step counters of fused and capturable optimizers to the device of their parameters, where kernels need
    them. It is the rule of ``Optimizer.load_state_dict``.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if type(value) is torch.Tensor and value.dim() == 0 and value.device != parameter.device:
                    state[key] = value.to(parameter.device)


def stepping(
    optimizer: Optimizer, scheduled: bool, replacement: Callable[..., Any], is_removed: Callable[[], bool]
) -> Callable[..., Any]:
    """A ``step`` for ``optimizer`` that runs ``replacement`` within PyTorch's hooks, or after ``is_removed`` the own
    step.

    It is a function to be bound, as learning rate schedulers wrap ``optimizer.step.__func__``, and read a mark on it
    and ``_opt_called`` (torch/optim/lr_scheduler.py). ``scheduled``: a scheduler has wrapped it.
    """
    raw = raw_step(optimizer)

    @functools.wraps(raw)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if scheduled:
            self._opt_called = True  # type: ignore[attr-defined]
        if is_removed():
            return raw(self, *args, **kwargs)
        return replacement(*args, **kwargs)

    hooked_step: Any = type(optimizer).profile_hook_step(step)
    if scheduled:
        hooked_step._wrapped_by_lr_sched = True
    return cast(Callable[..., Any], hooked_step)


def root_task() -> int:
    """The number of the next backward pass of the process; passes within it get other numbers.

    Autograd counts passes (torch/csrc/autograd/graph_task.h), so a tiny pass shows the last number. If another thread
    starts a pass in between, no pass has the number, and no block is updated early.
    """
    task_ids: list[int] = []
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        leaf.register_hook(lambda gradient: task_ids.append(torch._C._current_graph_task_id()))
        torch.autograd.backward([leaf * 1], [torch.ones(())])
    return task_ids[0] + 1


class Recomputation:
    """Refuses to recompute a module in a backward pass that has updated its weights already.

    A weight's gradient is complete when all operations with it have been differentiated, and a checkpointed part is
    recomputed before the first of its operations. So it cannot happen where gradients flow, but could where a result
    depends on a weight without a gradient (``detach``, a mask).
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(module)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def forbid(self, block: StateBlock) -> None:
        """Forbid to recompute the modules of ``block`` until ``allow``."""
        owners = {id(m): m for p in block.parameters for m in self._owners.get(id(p), ())}
        for module in owners.values():
            self._hooks.append(module.register_forward_pre_hook(partial(_refuse, block.name)))

    def allow(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _refuse(name: str, module: nn.Module, args: object) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise UnsupportedError(
            f"Cannot run {type(module).__name__} again during backward, after {name} was updated.",
            "It would compute with the new weights, not with those of the forward pass.",
            "Leave out final() for this model: step() alone is safe.",
        )
