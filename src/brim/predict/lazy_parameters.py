"""Parameters and buffers of ``torch.nn.Lazy*`` modules, which get their shapes from the first batch.

PyTorch makes them instances of a class of their own, and turns them into plain ones once their shapes are known. A
fake tensor can be neither, so it carries a mark while it has no shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import parameter
from torch.nn.modules import lazy

_ParameterMeta: Any = type(torch.nn.Parameter)
_MARK = "_brim_uninitialized"


@contextmanager
def lazy_parameters() -> Iterator[None]:
    """While open, lazy modules create fake tensors without shapes."""
    is_instance: Callable[..., bool] = _ParameterMeta.__instancecheck__

    def instance_check(kind: type, instance: object) -> bool:
        return (kind is parameter.UninitializedParameter and is_lazy(instance)) or is_instance(kind, instance)

    with ExitStack() as stack:
        for kind, make in ((parameter.UninitializedParameter, _parameter), (parameter.UninitializedBuffer, _buffer)):
            stack.enter_context(mock.patch.object(kind, "__new__", make))
        for module in (parameter, lazy):
            stack.enter_context(mock.patch.object(module, "is_lazy", is_lazy))
        stack.enter_context(mock.patch.object(_ParameterMeta, "__instancecheck__", instance_check))
        yield


def is_lazy(value: object) -> bool:
    return hasattr(value, _MARK)


def carried(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``result``, made from ``source``; marked as without a shape if ``source`` is."""
    return _marked(result) if is_lazy(source) and not is_lazy(result) else result


def _parameter(kind: type, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> torch.Tensor:
    return _marked(torch.nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad))


def _buffer(
    kind: type, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True
) -> torch.Tensor:
    return _marked(torch.empty(0, device=device, dtype=dtype).requires_grad_(requires_grad))


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    setattr(tensor, _MARK, True)
    tensor.materialize = partial(_materialize, tensor)  # type: ignore[attr-defined]
    return tensor


def _materialize(tensor: torch.Tensor, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """``UninitializedTensorMixin.materialize``."""
    with torch.no_grad():
        tensor.data = torch.empty(shape, device=device or tensor.data.device, dtype=dtype or tensor.data.dtype)
    delattr(tensor, _MARK)
    del tensor.materialize  # type: ignore[attr-defined]
