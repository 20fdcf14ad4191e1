"""Standard streams in any state: closed, full, or of a limited encoding.

A failed write to the standard output is an error, reported once. A failed write to the standard error is ignored:
there is nowhere to report it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from brim.printable import printable


class OutputError(Exception):
    """The standard output cannot be written."""


class _Output(io.FileIO):
    """The standard output; its failures are distinguished from those of other files, and reported once."""

    failed = False

    def write(self, data: Any) -> int:
        if self.failed:  # the buffer is written again as the process ends
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(error.strerror) from error


class _Terminal(io.TextIOWrapper):
    """A terminal that gets text without control characters: names, messages and a model's words can hold any.

    rich writes colours and bars directly to the terminal (``rich_proxied_file``); ``Console`` checks its texts. A
    leading carriage return comes from a library's progress bar.
    """

    def write(self, text: str) -> int:
        start = text[:1] if text.startswith("\r") and self.fileno() == 2 else ""
        super().write(start + printable(text.removeprefix(start)))
        return len(text)

    @property
    def rich_proxied_file(self) -> _Unfiltered:
        return _Unfiltered(self)


class _Unfiltered:
    """The terminal as rich writes to it."""

    def __init__(self, terminal: _Terminal) -> None:
        self._terminal = terminal

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._terminal, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


class _Notes(io.FileIO):
    """The standard error: failed writes are dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """While open, ``sys.stdout`` and ``sys.stderr`` accept any letter, written as ``\\xe9`` if their encoding lacks
    it.

    Raises OutputError, after reporting it, if the standard output could not be written.
    """
    _open_what_is_closed()
    before = sys.stdout, sys.stderr
    if not _is_file(sys.stdout, 1) or not _is_file(sys.stderr, 2):  # captured by a caller
        yield
        return
    replacements = [_replacement(stream, kind) for stream, kind in zip(before, (_Output, _Notes), strict=True)]
    sys.stdout, sys.stderr = replacements
    try:
        yield
        replacements[0].flush()
    except OutputError as error:
        replacements[1].write(f"Error: Cannot write the output: {error}.\n")
        raise
    finally:  # handlers of logs may keep the streams
        with contextlib.suppress(OutputError, OSError):
            replacements[0].flush()
        sys.stdout, sys.stderr = before


def _open_what_is_closed() -> None:
    """Open closed streams: the next file would get a closed stream's number, and libraries would write to it.

    As usual, a closed output is opened so that writing fails, and a closed input so that it is at its end.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  # for good


def _is_file(stream: object, number: int) -> bool:
    try:
        return type(stream) is io.TextIOWrapper and stream.fileno() == number
    except (OSError, ValueError):
        return False


def _replacement(stream: Any, kind: type[io.FileIO]) -> io.TextIOWrapper:
    stream.flush()
    raw = kind(stream.fileno(), "w", closefd=False)
    buffered = stream.line_buffering or stream.isatty() or kind is _Notes
    wrapper = _Terminal if stream.isatty() else io.TextIOWrapper
    return wrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=buffered
    )
