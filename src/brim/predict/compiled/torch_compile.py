"""``torch.compile`` in a trace: what is compiled runs as it is written, and the trace says that it did.

What a compiler fuses, recomputes and reuses is its own choice, made with values, shapes and a GPU that are not here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NOTE = "torch.compile: run as it is written"
_FRAMES = "torch._dynamo.eval_frame"  # torch/_dynamo/eval_frame.py decides before every compiled call what to do
_DECISION = "_callback_from_stance"
_FUSES = "inductor"  # of the backends, the one that writes kernels

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)
_fusing: ContextVar[bool] = ContextVar("fusing", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """While open, the running operations are captured in a graph."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_captured() -> bool:
    """Return True while a graph is captured: a tensor made now belongs to that graph alone."""
    return _capturing.get()


def is_fused() -> bool:
    """Return True if the code would be compiled to kernels of its own, which the backend ``eager`` does not do."""
    return is_captured() or _fusing.get() or _wrapped_before()


def _wrapped_before() -> bool:
    """Return True while a function runs that was compiled before the trace began, in PyTorch's own wrapper."""
    frames = sys.modules.get(_FRAMES)
    frame = sys._getframe() if frames is not None else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals is vars(frames):
            backend = frame.f_locals["self"].callback
            while hasattr(backend, "_torchdynamo_orig_backend"):
                backend = backend._torchdynamo_orig_backend
            if isinstance(backend, torch._TorchCompileInductorWrapper):
                return True
        frame = frame.f_back
    return False


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _fusing.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _fusing.reset(token)

    return run


def is_traced() -> bool:
    """Return True while a trace is recorded."""
    return any(hasattr(mode, "recorder") for mode in _get_current_dispatch_mode_stack())


def note_not_compiled(module: nn.Module, why: str) -> None:
    """Write into the trace that is being made that a module runs as it is written."""
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "recorder"):
            mode.recorder.not_modelled.add(f"{NOTE}: {type(module).__name__} ({why.splitlines()[0][:120]})")


@contextmanager
def as_written(not_modelled: set[str]) -> Iterator[None]:
    """Compile nothing during one trace, neither functions wrapped before it nor within it.

    A note is added to ``not_modelled`` where something would be compiled.
    """

    def eagerly(callback: Any) -> None:
        if callback not in (None, False):
            not_modelled.add(NOTE)

    def compile(model: Any = None, *, backend: Any = _FUSES, **options: Any) -> Any:
        if model is None:  # as a decorator with options
            return lambda function: compile(function, backend=backend)
        if getattr(backend, "__name__", backend) != "eager":
            not_modelled.add(NOTE)
        fuses = backend == _FUSES
        if not isinstance(model, torch.nn.Module):
            return _fused(model) if fuses else model
        object.__setattr__(model, "_orig_mod", model)  # where programs look for the module that was compiled
        if fuses:
            model._compiled_call_impl = _fused(model._call_impl)
        return model

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compile))
        frames = sys.modules.get(_FRAMES)
        if hasattr(frames, _DECISION):
            stack.enter_context(mock.patch.object(frames, _DECISION, eagerly))
        yield
