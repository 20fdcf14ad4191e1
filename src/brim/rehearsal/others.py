"""Count the processes started by a rehearsed program that use CUDA; nothing else about them is recorded.

Each has its own device here, where on a machine with GPUs they would share one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from brim.core.files import open_to_write
from brim.run.script.import_hook import when_imported

VARIABLE = "BRIM_REHEARSAL_OTHERS"  # path of a file with a line for each process
_WATCHED = "BRIM_REHEARSAL_RUN"  # set in the program's first process only


def record_use_of_cuda() -> None:
    """Record this process, which has just started, as soon as it uses CUDA."""
    if _WATCHED not in os.environ:
        when_imported("torch", lambda torch: torch.cuda._lazy_call(record))


def record() -> None:
    """Record that this process uses CUDA. Errors are ignored: the rehearsal may have ended."""
    with contextlib.suppress(OSError, KeyError):
        file = os.fdopen(open_to_write(os.environ[VARIABLE], append=True), "a", encoding="utf-8")
        with file:
            file.write(f"{os.getpid()}\n")


def count(path: Path) -> int:
    """Number of recorded processes."""
    return len(set(path.read_text(encoding="utf-8").split())) if path.exists() else 0
