"""The errors that brim raises on purpose."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path

from brim.printable import printable

_OWN = str(Path(__file__).parent) + os.sep


class BrimError(Exception):
    """Base of all errors that brim raises on purpose.

    Attributes:
        request: The request that failed.
        reason: The reason.
        todo: The remedy.
        exit_code: The exit code of the command line.
    """

    exit_code = 1

    def __init__(self, request: str, reason: str = "", todo: str = "") -> None:
        self.request, self.reason, self.todo = request, reason, todo
        super().__init__(request, reason, todo)

    def __str__(self) -> str:
        return printable("\n".join(part for part in (self.request, self.reason, self.todo) if part))


class UsageError(BrimError, ValueError):
    """The request is wrong: an unknown name, a value that is not allowed. Also a ValueError."""

    exit_code = 2


class ModelError(BrimError):
    """The model's files are missing, damaged, or not what they claim to be."""

    exit_code = 2


class BudgetError(BrimError):
    """No plan fits the given budget.

    Attributes:
        smallest_bytes: The smallest budget that suffices, by tier; empty if unknown.
    """

    exit_code = 3

    def __init__(
        self, request: str, reason: str = "", todo: str = "", *, smallest_bytes: dict[str, int] | None = None
    ) -> None:
        super().__init__(request, reason, todo)
        self.smallest_bytes = smallest_bytes or {}


def failed_import(error: Exception) -> UnsupportedError | None:
    """Return the error for an import that failed in another library (missing, old or broken), else None."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [number for number, frame in enumerate(frames) if frame.f_code.co_filename.startswith(_OWN)]
    after = frames[own[-1] + 1 :] if own else []
    inside = [frame for frame in after if "importlib" not in frame.f_globals.get("__name__", "")]
    if isinstance(error, ImportError) and not inside:  # the library is missing, or lacks the name
        name = error.name or ""
    elif inside and (inside[0] is not after[0] or inside[0].f_code.co_name == "<module>"):  # Python hides importlib's
        bodies = [frame for frame in inside if frame.f_code.co_name == "<module>"]  # the last one raised
        name = str((bodies or inside[:1])[-1].f_globals.get("__name__", ""))
    else:
        return None
    package = name.partition(".")[0]
    if not package or package == "brim":
        return None
    return UnsupportedError(
        f"Cannot import {package}, which this needs.",
        f"{type(error).__name__}: {' '.join(str(error).split()):.400}",
        f"""Install it anew: pip install --upgrade {'"brim[mcp]"' if package == "mcp" else package}""",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# Messages of PyTorch's allocators, RMM, the C library, and libraries that allocate by themselves.
_MEMORY_RAN_OUT = (
    "out of memory", "not enough memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc",
    "_ALLOC_FAILED",
)  # fmt: skip
# The error of cuBLAS and cuDNN when no handle can be created: memory ran out, or the device does not work.
_NOT_INITIALIZED = "_STATUS_NOT_INITIALIZED"
_HANDLE_BYTES = 64 << 20  # a handle takes some tens of MiB outside of PyTorch's allocator


def is_out_of_memory(error: BaseException) -> bool:
    """True if ``error`` says that memory ran out: from PyTorch, Python, the C library or a pool of brim."""
    if isinstance(error, (MemoryError, BudgetError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # PyTorch's; not imported here
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(text in message for text in _MEMORY_RAN_OUT) or (
        _NOT_INITIALIZED in message and _lacks_room_for_handle()
    )


def _lacks_room_for_handle() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        free_bytes, _ = torch.cuda.mem_get_info()
    except RuntimeError:  # the device no longer answers, which says nothing about its memory
        return False
    return bool(free_bytes < _HANDLE_BYTES)


ABOVE_BUDGET = 3  # the exit code of a run that was measured above its budget


class TransferError(BrimError):
    """Bytes could not be moved: a disk read failed, a file shrank, the disk is full."""


class UnsupportedError(BrimError):
    """The request is valid, but brim cannot do it with this model or on this machine."""

    exit_code = 2


class OperationError(UnsupportedError):
    """An operation of a traced program failed. Its cause is PyTorch's own error."""


class FormatError(BrimError, ValueError):
    """A file (plan, trace, snapshot, log) has a form that its reader does not accept. Also a ValueError."""

    exit_code = 2
