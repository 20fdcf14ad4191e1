"""``brim run``: a program that knows nothing of brim, run inside a budget.

Nothing heavy is imported here. PyTorch is watched for, and what plans is imported when the program has called its
first model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import UsageError
from brim.run.launch_script import Program, end_as_python, execute
from brim.run.launch_torch import when_imported
from brim.units import parse_bytes

if TYPE_CHECKING:
    from brim.run.launch_watch import Launched

MODES = ("auto", "stream", "unified", "off")
DEVICES = ("auto", "cuda", "cpu")
REPORTS = (".html", ".json")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``brim run`` was told. None for a budget: what is free less a tenth.

    ``managed``: in unified mode, managed memory instead of page-locked host memory; ``insist``: also more of it than
    the device has free, which can hang a driver. ``report``: where to write what became of the program's modules.
    """

    vram: str | int | None = None
    ram: str | int | None = None
    mode: str = "auto"
    device: str = "auto"
    report: Path | None = None
    managed: bool = False
    insist: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("mode", self.mode, MODES), ("device", self.device, DEVICES)):
            if value not in known:
                raise UsageError(f"{name}={value!r} was asked of brim run.", f"Known are {', '.join(known)}.")
        for amount in (self.vram, self.ram):
            if amount is not None:
                parse_bytes(amount, 1)  # of a share, only whether it is one
        if self.report is not None and self.report.suffix not in REPORTS:
            raise UsageError(
                f"A report was to be written to {self.report}.",
                f"Its name ends with {self.report.suffix or 'nothing'}.",
                f"Known are {' and '.join(REPORTS)}.",
            )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Settings:
        """From ``BRIM_VRAM``, ``BRIM_RAM``, ``BRIM_MODE``, ``BRIM_DEVICE``, ``BRIM_REPORT``; an empty one is none."""
        found: dict[str, Any] = {}
        for name in ("vram", "ram", "mode", "device", "report"):
            value = environment.get(f"BRIM_{name.upper()}", "")
            if value:
                found[name] = Path(value) if name == "report" else value
        return cls(**found)


def run(program: Program, settings: Settings) -> int:
    """Run ``program`` in this process and return 0, or a refusal's exit code.

    What else ends the program goes on to the interpreter: ``SystemExit`` as it is; any other exception when it was
    told of on stderr as ``python`` tells of it.
    """
    watched = watch(settings)
    try:
        error = _error_of(program)
        return 0 if error is None else _tell(error, watched)
    finally:
        watched.end()


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

    def begin(self) -> None:
        """PyTorch is there."""
        from brim.run.launch_watch import Launched

        self.launched = Launched(self.settings)
        self.launched.begin()

    def explain(self, error: BaseException) -> None:
        """Where ``error`` is for want of memory: say on stderr what ``brim explain`` says of it."""
        if self.launched is not None:
            self.launched.explain(error)

    def end(self) -> None:
        """The program is over, and this is not a child of it that was forked off."""
        if os.getpid() != self._pid:
            return
        if self.launched is not None:
            self.launched.end()
        elif self.settings.report is not None:
            from brim.run.launch_report import write_report

            write_report(self.settings.report, self.settings, [], None)


_watched: list[Watched] = []  # at most one: it is the process that is watched


def watch(settings: Settings) -> Watched:
    """Watch this process from now on. Raises UsageError when it is watched already."""
    if _watched and _watched[0]._pid == os.getpid():
        raise UsageError(
            "A budget was to be put on this process.",
            "It has one already: it was started by brim run, or imported brim.auto.",
            "Use one of the two.",
        )
    made = Watched(settings)
    _watched[:] = [made]
    if settings.mode != "off" or settings.device == "cpu" or settings.report is not None:
        when_imported(made.begin)
    return made


def is_watched() -> bool:
    """Whether this process has a budget from ``brim run`` or ``brim.auto``."""
    return bool(_watched) and _watched[0]._pid == os.getpid()
