"""Why a step could not be traced, said with the line of the user's program that asked for it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from brim.errors import UnsupportedError

_OWN = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)


def data_dependent(func: torch._ops.OpOverload) -> UnsupportedError:
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
        "Leave what is computed with NumPy out of the step (metrics take no GPU memory).",
    )


def not_traced(what: str, instead: str) -> UnsupportedError:
    """For what a program asks of PyTorch that a trace cannot stand for."""
    return UnsupportedError(f"{what} cannot be traced.", f"Asked at {_place()}.", instead)


def no_fake_kernel(func: torch._ops.OpOverload) -> UnsupportedError:
    return UnsupportedError(
        f"{func} has no fake kernel, so what it returns cannot be told without running it.",
        f"Called at {_place()}.",
        f"Register one with torch.library.register_fake({func.name()!r}).",
    )


def line() -> str:
    """The file and number of the user's own line that is running; of a library's where there is none."""
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN, "<frozen")):
            here = f"{Path(file).name}:{frame.f_lineno}"
            if "site-packages" not in file:
                return here
            library = library or here
        frame = frame.f_back
    return library or "a line inside PyTorch"


def _place() -> str:
    """The innermost line outside of PyTorch and brim; where that is in a library, the user's own line as well."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((*_OWN, "<frozen"))]
    if not frames:
        return "a line inside PyTorch"
    inner = frames[-1]
    own = next((f for f in reversed(frames) if "site-packages" not in f.filename), inner)
    text = f"{inner.filename}:{inner.lineno}: {inner.line}"
    if own is not inner:
        text += f" (called from {own.filename}:{own.lineno}: {own.line})"
    return text
