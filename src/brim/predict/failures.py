"""Errors of steps that cannot be traced, with the line of the user's program that caused them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from torch._ops import OpOverload

from brim.errors import ModelError, OperationError, UnsupportedError

# brim's files that intercept the program's calls of PyTorch and its backward passes.
_HANDLERS = ("__torch_function__", "__torch_dispatch__", "_run_backward", "attention")
_NO_DATA = "its data is not allocated yet"  # PyTorch's C++ code, when it reads a fake tensor
# PyTorch's C++ code, when it has no memory to read, no object of that kind, or no CUDA.
_FAKE = (
    _NO_DATA,
    "python object of type FakeTensor",
    "ATen_cuda library",
    "Cannot access data pointer",
    "unknown parameter type",
)
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = (_TORCH, str(Path(__file__).parents[1]) + os.sep)
_CALL = torch.nn.Module._call_impl.__code__


def data_dependent(func: OpOverload) -> UnsupportedError:
    return UnsupportedError(
        f"{func} needs the values of a tensor, and a trace has none.",
        f"Asked at {_place()}.",
        "Make the step's shapes and branches independent of values (or pass the value as a Python number).",
    )


def decision() -> UnsupportedError:
    return UnsupportedError(
        "A branch or a shape depends on a value that item() read from a tensor, and a trace has none.",
        f"Asked at {_place()}.",
        "Make the step's branches and shapes independent of values, or trace without strict.",
    )


def no_numpy() -> UnsupportedError:
    return UnsupportedError(
        "numpy() needs the values of a tensor, and a trace has none.",
        f"Asked at {_place()}.",
        "Leave NumPy computations out of the step (metrics take no GPU memory).",
    )


def not_traced(what: str, instead: str) -> UnsupportedError:
    """Return the error for a call of PyTorch that cannot be traced."""
    return UnsupportedError(f"{what} cannot be traced.", f"Asked at {_place()}.", instead)


def no_fake_kernel(func: OpOverload) -> UnsupportedError:
    return UnsupportedError(
        f"{func} has no fake kernel, so its result is unknown without running it.",
        f"Called at {_place()}.",
        f"Register one with torch.library.register_fake({func.name()!r}).",
    )


def no_cuda_kernel(func: OpOverload) -> UnsupportedError:
    return UnsupportedError(
        f"{func} runs on the CPU only: PyTorch has no CUDA kernel of it.",
        f"Called at {_place()}.",
        "Move its inputs to the CPU, or use other operations.",
    )


def of_operation(error: Exception) -> OperationError | None:
    """Return the error of an operation with its line; None where other code of the program raised it.

    A program may expect an operation's error, so it gets PyTorch's own; this error is for those that it does not
    catch.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [number for number, frame in enumerate(frames) if not frame.filename.startswith((*_OWN, "<frozen"))]
    asked = outside[-1] + 1 if outside else 0
    refused = any(text in str(error) for text in _FAKE)  # a fake tensor, by C++
    failed = bool(frames) and "_subclasses" in frames[-1].filename  # PyTorch's fake tensors
    if not (any(frame.name in _HANDLERS for frame in frames[asked:]) or refused or failed):
        return None
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if _NO_DATA in what:
        what = "it reads the values of a tensor, and a trace has none."
    return OperationError(
        f"An operation failed in a trace: {what}",
        f"Called at {_shown(list(frames[:asked]))}.",
        "Correct the line if it fails on a GPU as well. If it does not, brim cannot trace it.",
    )


def of_model(error: BaseException) -> ModelError | None:
    """Return the error of a model's own code with its line; None where other code raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = next((number for number, frame in enumerate(frames) if frame.f_code is _CALL), None)
    files = [frame.f_code.co_filename for frame in frames[called:]] if called is not None else []
    own = [file for file in files if not file.startswith((_TORCH, "<frozen"))]
    if not own or own[-1].startswith(_OWN):
        return None
    stack = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    return ModelError(
        f"The model cannot be called: {type(error).__name__}: {' '.join(str(error).split()):.400}",
        f"It fails at {_shown(stack)}.",
        "Correct its code or its configuration, or install a version of its library that can call it.",
    )


def line() -> str:
    """Return file and number of the user's running line, or of a library's if there is none."""
    return Path(place()).name


def place() -> str:
    """Return the same line as ``line``, with the full path of its file."""
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN, "<frozen")):
            here = f"{file}:{frame.f_lineno}"
            if "site-packages" not in file:
                return here
            library = library or here
        frame = frame.f_back
    return library or "a line inside PyTorch"


def asking_module() -> str:
    """Return the name of the running module outside of brim and PyTorch (PyTorch's optimizers count)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS) or not file.startswith((*_OWN, "<frozen")):
            return str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return ""


def _place() -> str:
    """The innermost line outside of PyTorch and brim; where that is in a library, the user's own line as well."""
    return _shown(traceback.extract_stack())


def _shown(stack: Sequence[traceback.FrameSummary]) -> str:
    frames = [frame for frame in stack if not frame.filename.startswith((*_OWN, "<frozen"))]
    if not frames:
        return "a line inside PyTorch"
    inner = frames[-1]
    own = next((f for f in reversed(frames) if "site-packages" not in f.filename), inner)
    text = f"{inner.filename}:{inner.lineno}: {inner.line}"
    if own is not inner:
        text += f" (called from {own.filename}:{own.lineno}: {own.line})"
    return text
