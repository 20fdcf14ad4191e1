"""``brim run``: a program that knows nothing of brim, run inside a budget.

Nothing heavy is imported here. PyTorch is watched for, and what plans is imported when the program has called its
first model.
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
    """Run ``program`` in this process and return 0, a refusal's exit code, or 3 for a program that took more than its
    budget.

    What else ends the program is passed on to the interpreter: ``SystemExit`` as it is; any other exception after its
    traceback was written to stderr as ``python`` writes it.
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
    """Outside of any ``except``: the program's own ``sys.excepthook`` finds nothing being handled."""
    refusal = None if watched.launched is None else watched.launched.refusal
    if refusal is not None and error is refusal:
        sys.stdout.flush()
        sys.stderr.write(f"Error: {error}\n")
        return refusal.exit_code
    end_as_python(error)
    watched.explain(error)
    raise error


class Watched:
    """A process that is being watched. ``launched`` is there once PyTorch has been imported."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.launched: Launched | None = None
        self._pid = os.getpid()
        self._ended = False

    def begin(self) -> None:
        """PyTorch has been imported."""
        from brim.run.script.model_watch import Launched

        self.launched = Launched(self.settings)
        self.launched.begin()

    @property
    def is_above_budget(self) -> bool:
        """Whether the program took more than its budget, once it has ended."""
        return self.launched is not None and self.launched.is_above_budget

    def explain(self, error: BaseException) -> None:
        """If ``error`` is an out-of-memory error, write what ``brim explain`` says of it to stderr."""
        if self.launched is not None:
            self.launched.explain(error)

    def end(self) -> None:
        """The program is over, and this is not a child of it that was forked off."""
        if os.getpid() != self._pid or self._ended:
            return
        self._ended = True
        if self.launched is not None:
            self.launched.end()
        elif self.settings.report is not None:
            from brim.run.script.report import write_report

            write_report(self.settings.report, self.settings, [], None)


_watched: list[Watched] = []  # at most one: it is the process that is watched


def watch(settings: Settings) -> Watched:
    """Watch this process from now on. Raises UsageError when it is watched already, and for a GPU that is hidden."""
    if _watched and _watched[0]._pid == os.getpid():
        raise UsageError(
            "Cannot set a budget for this process.",
            "It has one already: it was started by brim run, or imported brim.auto.",
            "Use one of the two.",
        )
    watched = Watched(settings)
    _watched[:] = [watched]
    if settings.index is not None:
        settings.show_alone(os.environ)  # before any CUDA is there to read it
    changes_devices = settings.device == "cpu" or settings.index is not None
    if settings.mode != "off" or changes_devices or settings.report is not None:
        when_imported(watched.begin)
    return watched


def is_watched() -> bool:
    """Whether this process has a budget from ``brim run`` or ``brim.auto``."""
    return bool(_watched) and _watched[0]._pid == os.getpid()
