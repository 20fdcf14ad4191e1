"""How commands load PyTorch, and how they show that weights are loaded.

What PyTorch's modules make is kept out of every later search for garbage. PyTorch and transformers make two million
objects while they load, and nearly all of them stay to the end. Each full collection looks at every one, and the
interpreter makes several more as it exits: of a command of ten seconds two and a half, for nothing found.
"""

from __future__ import annotations

import atexit
import gc
import importlib
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from brim.units import format_bytes

if TYPE_CHECKING:
    from rich.status import Status

MODELS = "transformers.modeling_utils"  # what all models of transformers are made of


def load(*modules: str) -> None:
    """Import ``modules``, and let nothing that is there after it be looked at for garbage again.

    For commands whose process does nothing else. At its exit no more cycles are collected; what closes files and ends
    threads there runs as ever.
    """
    from brim.cli.console import Console

    _freeze_at_exit()
    gc.collect()  # a frozen cycle is never freed: of a caller in this process it may hold memory, files and threads
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


def loading_bar(status: Status, *, told: bool = True) -> Callable[[int, int], None]:
    """What hears how many bytes of weights have been loaded, of how many: ``status`` shows them as a bar.

    On a terminal only; not where nothing is to be ``told`` but JSON.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def show(done: int, total: int) -> None:
        if not told:
            return
        if not status.console.is_terminal:
            status.update(f"loading weights, {format_bytes(done)} of {format_bytes(total)}")
            return
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=total or 1, completed=done, width=30)
        row.add_row("loading weights", bar, f"{format_bytes(done)} of {format_bytes(total)}")
        status.update(row)

    return show


@cache
def _freeze_at_exit() -> None:
    """Once, and before PyTorch loads: what is registered first for the exit runs last."""
    atexit.register(gc.freeze)
