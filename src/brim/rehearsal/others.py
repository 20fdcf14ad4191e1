"""Processes that a rehearsed program starts: those that use CUDA are counted, as nothing else is known of them.

Each has a device of its own here, where on a machine with GPUs they would share one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from brim.core.files import open_to_write
from brim.run.script.import_hook import when_imported

VARIABLE = "BRIM_REHEARSAL_OTHERS"  # the file that names them, a line each
_WATCHED = "BRIM_REHEARSAL_RUN"  # the environment of the program's first process has this one, too


def tell_when_cuda_is_used() -> None:
    """In a process that Python has just started."""
    if _WATCHED not in os.environ:
        when_imported(lambda: sys.modules["torch"].cuda._lazy_call(tell))


def tell() -> None:
    """That this process uses CUDA. Where the rehearsal has ended, nobody wants to know."""
    with contextlib.suppress(OSError, KeyError):
        named = os.fdopen(open_to_write(os.environ[VARIABLE], append=True), "a", encoding="utf-8")
        with named:
            named.write(f"{os.getpid()}\n")


def count(path: Path) -> int:
    """How many there were."""
    return len(set(path.read_text(encoding="utf-8").split())) if path.exists() else 0
