"""``brim run``: run an unmodified program inside a budget.

Nothing heavy is imported here: the planner is imported when the program, having imported PyTorch, first calls a
model.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from brim.errors import ABOVE_BUDGET, UsageError
from brim.run.script.import_hook import when_imported
from brim.run.script.script import Program, end_as_python, execute
from brim.run.script.settings import Settings

if TYPE_CHECKING:
    from brim.run.script.model_watch import Launched


def run(program: Program, settings: Settings) -> int:
    """Run ``program`` in this process and return 0, the exit code of a refusal, or 3 if the program took more than
    its budget.

    ``SystemExit`` is passed on to the interpreter; so is any other exception, after its traceback was written to
    stderr as ``python`` writes it.
    """
    watched = watch(settings)
    try:
        error = _error_of(program)
        code = 0 if error is None else _tell(error, watched)
    except SystemExit as ended:
        watched.end()
        if ended.code in (None, 0) and watched.is_above_budget:
            return ABOVE_BUDGET
        raise
    finally:
        watched.end()
    return ABOVE_BUDGET if code == 0 and watched.is_above_budget else code


def _error_of(program: Program) -> BaseException | None:
    try:
        execute(program)
    except SystemExit:
        raise
    except BaseException as error:
        return error
    return None


def _tell(error: BaseException, watched: Watched) -> int:
    """Called outside of any ``except``, so that the program's ``sys.excepthook`` finds no exception being handled."""
    refusal = None if watched.launched is None else watched.launched.refusal
    if refusal is not None and error is refusal:
        sys.stdout.flush()
        sys.stderr.write(f"Error: {error}\n")
        return refusal.exit_code
    end_as_python(error)
    watched.explain(error)
    raise error


class Watched:
    """A watched process. ``launched`` is set once PyTorch has been imported."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.launched: Launched | None = None
        self._pid = os.getpid()
        self._ended = False

    def begin(self) -> None:
        """Called when PyTorch has been imported."""
        from brim.run.script.model_watch import Launched

        self.launched = Launched(self.settings)
        self.launched.begin()

    @property
    def is_above_budget(self) -> bool:
        """True if the program took more than its budget; known once it has ended."""
        return self.launched is not None and self.launched.is_above_budget

    def explain(self, error: BaseException) -> None:
        """Write the explanation of ``brim explain`` to stderr if ``error`` is an out-of-memory error."""
        if self.launched is not None:
            self.launched.explain(error)

    def end(self) -> None:
        """End the watch with the program, except in a forked child."""
        if os.getpid() != self._pid or self._ended:
            return
        self._ended = True
        if self.launched is not None:
            self.launched.end()
        elif self.settings.report is not None:
            from brim.run.script.report import write_report

            write_report(self.settings.report, self.settings, [], None)


_watched: list[Watched] = []  # at most one entry: the process


def watch(settings: Settings) -> Watched:
    """Watch this process from now on. Raises UsageError if it is watched already, and for a GPU that is hidden."""
    if _watched and _watched[0]._pid == os.getpid():
        raise UsageError(
            "Cannot set a budget for this process.",
            "It has one already: it was started by brim run, or imported brim.auto.",
            "Use one of the two.",
        )
    watched = Watched(settings)
    _watched[:] = [watched]
    if settings.index is not None:
        settings.show_alone(os.environ)  # before CUDA reads it
    changes_devices = settings.device == "cpu" or settings.index is not None
    if settings.mode != "off" or changes_devices or settings.report is not None:
        when_imported("torch", lambda _: watched.begin())
    return watched


def is_watched() -> bool:
    """True if this process has a budget from ``brim run`` or ``brim.auto``."""
    return bool(_watched) and _watched[0]._pid == os.getpid()
