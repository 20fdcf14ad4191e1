"""``torch.compile`` in a trace: what is compiled runs as it is written, and the trace says that it did.

What a compiler fuses, recomputes and reuses is its own choice, made with values, shapes and a GPU that are not here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from brim.predict.recorder import Recorder

NOTE = "torch.compile: run as it is written"
_FRAMES = "torch._dynamo.eval_frame"  # torch/_dynamo/eval_frame.py decides before every compiled call what to do
_DECISION = "_callback_from_stance"


_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """While open, a graph is made of what runs."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_captured() -> bool:
    """Whether a graph is being made of what runs: a tensor made now is part of it, and of nothing else."""
    return _capturing.get()


def is_traced() -> bool:
    """Whether a trace is being made."""
    return any(hasattr(mode, "recorder") for mode in _get_current_dispatch_mode_stack())


def note_not_compiled(module: nn.Module, why: str) -> None:
    """Write into the trace that is being made that a module runs as it is written."""
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "recorder"):
            mode.recorder.not_modelled.add(f"{NOTE}: {type(module).__name__} ({why.splitlines()[0][:120]})")


@contextmanager
def as_written(recorder: Recorder) -> Iterator[None]:
    """Compile nothing during one trace, neither what was wrapped before it nor what is wrapped within it."""

    def eagerly(callback: Any) -> None:
        if callback not in (None, False):
            recorder.not_modelled.add(NOTE)

    def compile(model: Any = None, **options: Any) -> Any:
        recorder.not_modelled.add(NOTE)
        if model is None:  # as a decorator with options
            return lambda function: function
        if isinstance(model, torch.nn.Module):  # where programs look for the module that was compiled
            object.__setattr__(model, "_orig_mod", model)
        return model

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compile))
        frames = sys.modules.get(_FRAMES)
        if hasattr(frames, _DECISION):
            stack.enter_context(mock.patch.object(frames, _DECISION, eagerly))
        yield
