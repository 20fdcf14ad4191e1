"""The tensors of a model's inputs, and copies of the inputs with every tensor replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_T = TypeVar("_T")


def map_tensors(inputs: _T, change: Callable[[torch.Tensor], torch.Tensor]) -> _T:
    """Copy ``inputs`` deeply with ``change`` applied to every tensor, also inside objects and modules.

    The copy is deep because a model writes to its inputs, such as a KV cache. Raises what ``copy.deepcopy`` raises.
    """
    copies: dict[int, Any] = {}
    # No torch function mode sees the copying of these tensors while a trace disables torch functions, nor ever that
    # of ``nn.Parameter``, which has its own ``__deepcopy__``.
    for leaf in tree_leaves(inputs):
        for tensor in leaf.parameters() if isinstance(leaf, nn.Module) else [leaf]:
            if isinstance(tensor, nn.Parameter):
                copies[id(tensor)] = nn.Parameter(change(tensor), tensor.requires_grad)
            elif isinstance(tensor, torch.Tensor) and id(tensor) not in copies:
                copies[id(tensor)] = change(tensor)
    with Changing(change):
        return copy.deepcopy(inputs, copies)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Changing(TorchFunctionMode):
    """Within this mode ``copy.deepcopy`` copies a tensor, but no parameter, by ``change``."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, copies = args
        copies[id(tensor)] = changed = self._change(tensor)
        return changed
