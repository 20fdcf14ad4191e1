"""Every error that brim raises on purpose: what was asked, what was found, what to do."""

from __future__ import annotations

import errno
import sys


class BrimError(Exception):
    """All failures that brim raises on purpose are of this family.

    Attributes:
        asked: What was asked for.
        found: What was found instead.
        todo: What to do.
        exit_code: What the command line ends with.
    """

    exit_code = 1

    def __init__(self, asked: str, found: str = "", todo: str = "") -> None:
        self.asked, self.found, self.todo = asked, found, todo
        super().__init__(asked, found, todo)

    def __str__(self) -> str:
        return "\n".join(part for part in (self.asked, self.found, self.todo) if part)


class UsageError(BrimError, ValueError):
    """The request itself is wrong: an unknown name, a value that is not allowed. Also a ValueError."""

    exit_code = 2


class ModelError(BrimError):
    """The model's files are missing, damaged, or not what they claim to be."""

    exit_code = 2


class BudgetError(BrimError):
    """Nothing fits the budget that was given.

    Attributes:
        smallest_bytes: The smallest budget that would do, by tier; empty where it is not known.
    """

    exit_code = 2

    def __init__(
        self, asked: str, found: str = "", todo: str = "", *, smallest_bytes: dict[str, int] | None = None
    ) -> None:
        super().__init__(asked, found, todo)
        self.smallest_bytes = smallest_bytes or {}


# Of PyTorch's allocators, of RMM's (under unified memory), of the C library, and of libraries that allocate by
# themselves.
_MEMORY_RAN_OUT = (
    "out of memory", "not enough memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc",
    "_ALLOC_FAILED",
)  # fmt: skip
# What cuBLAS and cuDNN say when their handle could not be made: for lack of memory, or of a device that works.
_NOT_INITIALIZED = "_STATUS_NOT_INITIALIZED"
_HANDLE_BYTES = (
    64 << 20
)  # cuBLAS's and cuDNN's handles take some tens of MiB of the driver's, beside PyTorch's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: PyTorch's, Python's, the C library's, or one of brim's pools."""
    if isinstance(error, (MemoryError, BudgetError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    ):  # PyTorch's, which is not imported here
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    return any(text in said for text in _MEMORY_RAN_OUT) or (_NOT_INITIALIZED in said and _has_no_room_on_gpu())


def _has_no_room_on_gpu() -> bool:
    """Whether the GPU in use has less free than a library's handle takes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        free_bytes, _ = torch.cuda.mem_get_info()
    except RuntimeError:  # a device that answers nothing any more is not full
        return False
    return bool(free_bytes < _HANDLE_BYTES)


class TransferError(BrimError):
    """Bytes could not be moved: a disk read failed, a file shrank, the disk is full."""


class UnsupportedError(BrimError):
    """The request is sound, but brim cannot do it with this model or on this machine."""

    exit_code = 2


class OperationError(UnsupportedError):
    """An operation of a program that is traced failed. Its cause is PyTorch's own error."""


class FormatError(BrimError, ValueError):
    """A file (plan, trace, snapshot, log) is not of the form that its reader accepts. Also a ValueError."""

    exit_code = 2
