"""Defer moves of models to the GPU before their first call: parameters beyond the budget wait on the host.

``module.cuda()`` and ``module.to("cuda")`` move every parameter with a call that a ``TorchFunctionMode`` intercepts.
While a plan may follow, parameters beyond the budget stay on the host; the model's first call decides where each
goes. Buffers and plain tensors move as usual.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode


class DeferredMoves(TorchFunctionMode):
    """Lets ``limit_bytes`` of parameters move to a device of ``kind``; the rest waits for ``finish`` or a plan.

    ``limit_bytes`` is called at the first move: a share of the device's memory is unknown before CUDA is initialized.
    """

    def __init__(self, limit_bytes: Callable[[], int], kind: str = "cuda") -> None:
        super().__init__()
        self._limit_bytes, self._kind = functools.cache(limit_bytes), kind
        self._moved_bytes = 0
        self._waiting: dict[int, tuple[weakref.ref[torch.Tensor], torch.device]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is torch.Tensor.to or func is torch.Tensor.cuda) and isinstance(args[0], nn.Parameter):
            return self._move(func, args, kwargs)
        return func(*args, **kwargs)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        parameter = args[0]
        if func is torch.Tensor.cuda:
            device, dtype = torch.device(self._kind), None
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
        if device is None or device.type != self._kind or parameter.device.type == self._kind:
            return func(*args, **kwargs)
        count = parameter.numel() * parameter.element_size()
        if self._moved_bytes + count <= self._limit_bytes():
            self._moved_bytes += count
            return func(*args, **kwargs)
        self._waiting[id(parameter)] = (weakref.ref(parameter), device)
        return parameter if dtype is None else parameter.to(dtype)

    def begin(self) -> None:
        """Begin in this thread. A second call does nothing."""
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            _push_mode(self)

    def end(self) -> None:
        """End, whatever modes the program has entered since."""
        leave(self)

    def finish(self, model: nn.Module) -> None:
        """Move the waiting parameters of ``model`` to the device that the program chose."""
        for parameter in model.parameters():
            reference, device = self._waiting.pop(id(parameter), (None, None))
            if reference is not None and reference() is parameter:
                parameter.data = parameter.data.to(device)


def leave(mode: TorchFunctionMode) -> None:
    """Remove ``mode`` from the stack of this thread, wherever in the stack it is."""
    stack = [_pop_mode() for _ in _get_current_function_mode_stack()]
    for other in reversed(stack):
        if other is not mode:
            _push_mode(other)
