"""Load PyTorch in commands, and show the loading of weights.

PyTorch's and transformers' imports create two million objects, and nearly all of them stay to the end. Each full
garbage collection visits every object, and the interpreter collects several more times as it exits: two and a half
seconds of a command of ten, without any result. So these objects are excluded from later collections.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import click

from brim.units import format_bytes

if TYPE_CHECKING:
    from rich.status import Status

MODELS = "transformers.modeling_utils"  # the base of all models of transformers


def load(*modules: str) -> None:
    """Import ``modules``, and exclude all objects that exist then from garbage collection.

    For commands whose process does nothing else. At its exit no more cycles are collected; handlers that close files
    and end threads there run as ever.
    """
    from brim.cli.console import Console

    _freeze_at_exit()
    gc.collect()  # a frozen cycle is never freed: a caller's may hold memory, files and threads
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


def loading_bar(status: Status, *, enabled: bool = True) -> Callable[[int, int], None]:
    """Return a function that shows the loaded and the total bytes of weights as a bar of ``status``.

    Elsewhere than on a terminal it shows a line; it shows nothing unless ``enabled``, as with --json.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def show(done: int, total: int) -> None:
        if not enabled:
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
    """Register once, before PyTorch loads: handlers registered first run last at exit."""
    atexit.register(gc.freeze)


def confirmed(what: str) -> bool:
    """Ask the user whether ``what`` may be downloaded. False without a terminal."""
    return sys.stdin.isatty() and click.confirm(f"{what}\nDownload it?", err=True)
