"""Copies of a model and its optimizer for tracing: same shapes and wiring, no values."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brim.techniques.optimizer_offload.step_context import narrowed
from brim.techniques.optimizer_offload.trial import without_states


def meta_copy(model: nn.Module, *, absent: Collection[str], device: torch.device | None) -> nn.Module:
    """Copy ``model``, with parameters and buffers allocated by the caller's context.

    Parameters in ``absent`` are empty, as when their values are in files, or about to be moved to memory of brim's
    own. Tensors that are not on the CPU are put on ``device``.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name in absent:
            data = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
        else:
            data = _like(parameter, device)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer, device)
    for value in (value for part in model.modules() for value in vars(part).values()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:  # weight_norm and prune compute weights
            memo[id(value)] = _like(value, device)
    return copy.deepcopy(model, memo)


def _like(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    where = None if tensor.device.type == "cpu" else device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)


def meta_copy_optimizer(other: nn.Module, model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Copy ``optimizer`` of ``model`` for ``other``, the model's copy: without states, and without attachments (a
    scheduler's wrapper around ``step``, hooks), which belong to the optimizer that really steps."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    twins = {id(parameter): of_twin for parameter, of_twin in pairs}
    groups = [{**group, "params": [twins.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups]
    copied, plain = without_states(optimizer, groups), vars(Optimizer([torch.zeros(())], {}))
    vars(copied).update({name: value for name, value in plain.items() if name.endswith("_hooks")})
    return copied


def make_states(optimizer: Optimizer, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give the optimizer the states that its first step leaves, which later steps start from.

    ``dtype``: that of states of real parameters. None: the parameter's. Parameters are stepped one at a time. Where
    two alike (of one group, shape and dtype) get states alike, the third and all further ones get copies.
    """
    samples_of: dict[tuple[Any, ...], list[dict[Any, Any]]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in [p for p in group["params"] if p.requires_grad]:
            samples = samples_of[number, parameter.shape, parameter.dtype]
            copied = _copied(samples) if len(samples) > 1 else None
            if copied is None:
                _step_alone(optimizer, parameter, device, dtype)
                samples.append(optimizer.state.get(parameter, {}))
            elif copied:
                optimizer.state[parameter] = copied


def _step_alone(
    optimizer: Optimizer, parameter: torch.Tensor, device: torch.device, dtype: torch.dtype | None
) -> None:
    data = parameter.data
    dtype = dtype if dtype and parameter.is_floating_point() else parameter.dtype
    parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
    parameter.grad = torch.empty_like(parameter)
    with narrowed(optimizer, [parameter]):
        optimizer.step()
    parameter.grad, parameter.data = None, data


def _copied(samples: Sequence[Mapping[Any, Any]]) -> dict[Any, Any] | None:
    """A state like the first two of ``samples``; None where these differ, share memory, or hold more than numbers."""
    first, second = samples[:2]
    if first.keys() != second.keys():
        return None
    with torch.no_grad():
        state = {key: _copy_of(value, second[key]) for key, value in first.items()}
    return None if any(value is _UNLIKE for value in state.values()) else state


_UNLIKE = object()
_NUMBERS = (int, float, bool, str, type(None))


def _copy_of(first: Any, second: Any) -> Any:
    # What wraps other tensors (torchao's states of 8 bits) knows its own operations only, and may have no copy.
    if isinstance(first, torch.Tensor) and type(first) is type(second) and not is_traceable_wrapper_subclass(first):
        alike = _facts(first) == _facts(second) and first.untyped_storage()._cdata != second.untyped_storage()._cdata
        return first.clone() if alike else _UNLIKE
    return first if type(first) is type(second) and isinstance(first, _NUMBERS) and first == second else _UNLIKE


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()
