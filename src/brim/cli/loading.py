"""How commands load PyTorch: what its modules make is kept out of every later search for garbage.

PyTorch and transformers make two million objects while they load, and nearly all of them stay to the end. Each full
collection looks at every one, and the interpreter makes several more as it exits: of a command of ten seconds two
and a half, for nothing found.
"""

from __future__ import annotations

import atexit
import gc
import importlib
from functools import cache

MODELS = "transformers.modeling_utils"  # what all models of transformers are made of


def load(*modules: str) -> None:
    """Import ``modules``, and let nothing that is there after it be looked at for garbage again.

    For commands whose process does nothing else. At its exit no more cycles are collected; what closes files and ends
    threads there runs as ever.
    """
    from rich.console import Console

    _freeze_at_exit()
    before = gc.isenabled()
    gc.disable()
    try:
        with Console(stderr=True).status("Loading PyTorch"):
            for name in modules:
                importlib.import_module(name)
    finally:
        gc.freeze()
        if before:
            gc.enable()


@cache
def _freeze_at_exit() -> None:
    """Once, and before PyTorch loads: what is registered first for the exit runs last."""
    atexit.register(gc.freeze)
