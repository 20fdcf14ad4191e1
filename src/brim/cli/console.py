"""Print tables, bars and styled lines; text of any origin is stripped of terminal commands."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import IO, Any, Literal, Self

import rich.console
from rich import box
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from brim import threads
from brim.errors import UsageError
from brim.printable import printable
from brim.units import format_seconds

EVERY = "BRIM_LOG_EVERY_S"  # the variable with the seconds between lines without a terminal
_EVERY_S = 10.0


class Console(rich.console.Console):
    """rich's console, with texts taken literally: no markup, and no control characters."""

    def __init__(self, *, stderr: bool = False, highlight: bool = True, soft_wrap: bool = False) -> None:
        plain: dict[str, Any] = {"markup": False, "emoji": False, "force_jupyter": False}
        super().__init__(stderr=stderr, highlight=highlight, soft_wrap=soft_wrap, **plain)

    @property
    def file(self) -> IO[str]:
        """The stream to write to: below rich's proxy, which a status puts there, and the terminal's filter."""
        stream = super().file
        return getattr(stream, "rich_proxied_file", stream)

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of text without control characters; rich's own control segments as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def status(self, status: RenderableType, **options: Any) -> WorkStatus:
        """rich's status, whose first text is no markup either."""
        return WorkStatus(status, console=self, **options)

    def print_table(
        self,
        columns: Sequence[str],
        rows: Iterable[Iterable[str]],
        *,
        first: Literal["left", "right"] = "left",
        left: Collection[str] = (),
    ) -> None:
        """Print a table without lines; columns with a head that is not in ``left`` are aligned right."""
        table = Table(box=box.SIMPLE, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify=first if index == 0 else "left" if column in ("", *left) else "right")
        for row in rows:
            table.add_row(*row)
        self.print(table)


class WorkStatus(Status):
    """The work in progress: at the bottom of a terminal, elsewhere a line of the log every ten seconds."""

    def __init__(self, status: RenderableType, *, console: Console, **options: Any) -> None:
        super().__init__(_text(status), console=console, **options)
        self._work, self._line = status, ""
        self._every_s = _every_s()
        self._began_s = self._written_s = time.monotonic()
        self._ended: threading.Event | None = None
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        if self.console.is_terminal:
            super().start()
        elif self._ended is None:
            self._ended = threading.Event()
            threads.start(threading.Thread(target=self._log, args=(self._ended,), name="brim-log", daemon=True))

    def stop(self) -> None:
        if self.console.is_terminal:
            super().stop()
        elif self._ended is not None:
            self._ended.set()
            self._ended = None

    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        if status is not None:
            self._work = status
        super().update(None if status is None else _text(status), **options)

    def line(self, text: str) -> None:
        """Print a line of a long series: every line on a terminal, elsewhere one in ten seconds."""
        if self.console.is_terminal:
            self.console.print(text, highlight=False)
            return
        with self._writing:
            self._line = text
        self._write_if_due()

    def _log(self, ended: threading.Event) -> None:
        while not ended.wait(self._every_s / 10):
            self._write_if_due()

    def _write_if_due(self) -> None:
        with self._writing:
            now_s = time.monotonic()
            if now_s < self._written_s + self._every_s:
                return
            text = self._line or f"{self._work}, {format_seconds(now_s - self._began_s)}"
            self._line, self._written_s = "", now_s
        self.console.print(text, highlight=False, soft_wrap=True)


def _every_s() -> float:
    asked = os.environ.get(EVERY, "")
    try:
        every_s = float(asked or _EVERY_S)
    except ValueError:
        every_s = 0.0
    if not 0 < every_s < threading.TIMEOUT_MAX:
        raise UsageError(f"{EVERY}={asked} was given.", "It is not a number of seconds.", f"Example: {EVERY}=60")
    return every_s


def _text(status: RenderableType) -> RenderableType:
    return Text(status) if isinstance(status, str) else status
