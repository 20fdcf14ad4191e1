"""The files that ``brim explain`` reads: their kind is recognised by content, never by name."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from brim.core.timeline import Timeline
from brim.errors import FormatError, UsageError

SNAPSHOT, TIMELINE, PROFILE, LOG = "snapshot", "timeline", "profile", "oom"
_FIRST_BYTES_WITHIN_S = 5.0
HEAD_BYTES = 1 << 16  # enough to recognise a file
_ARTEFACTS = ("Hardware", "Trace", "Plan")  # files of brim without a run


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to explain. Messages call it ``name``; it can be read at ``path``."""

    name: str
    kind: str
    path: Path
    stream: BinaryIO | None = None  # a log from a pipe, to be read once


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open ``path``, or the standard input for "-". A pipe is copied to a temporary file, unless it holds a log.

    Raises FormatError if it cannot be read, UsageError for a file of brim without a run.
    """
    if str(path) == "-":
        with _piped(sys.stdin.buffer, "the standard input", path) as source:
            yield source
    elif _is_pipe(path):  # as in brim explain <(zcat log.gz)
        with _open(path) as stream, _piped(stream, str(path), path) as source:
            yield source
    else:
        yield Source(name=str(path), kind=kind_of(_head(path), str(path)), path=path)


@contextmanager
def _piped(stream: BinaryIO, name: str, path: Path) -> Iterator[Source]:
    """Open a stream that can be read only once: a log is read as it comes, anything else is copied to a file."""
    head = stream.read(HEAD_BYTES)
    if (kind := kind_of(head, name)) == LOG:
        yield Source(name=name, kind=kind, path=path, stream=io.BufferedReader(_Rejoined(head, stream)))
        return
    with tempfile.NamedTemporaryFile(prefix="brim_explain_") as file:
        file.write(head)
        while block := stream.read(1 << 20):
            file.write(block)
        file.flush()
        try:
            yield Source(name=name, kind=kind, path=Path(file.name))
        except FormatError as error:  # names the copy
            raise FormatError(
                *(text.replace(file.name, name) for text in (error.request, error.reason, error.todo))
            ) from error


def kind_of(head: bytes, name: str) -> str:
    """Return the kind of a file by its first bytes."""
    from brim.profiles import profiler

    if head.startswith(b"\x80"):  # a pickle of protocol 2 or later
        return SNAPSHOT
    start = head.lstrip()
    if start.startswith(b"{"):
        text = start[:4096].decode("utf-8", "replace").replace(" ", "")
        if '"kind":"Timeline"' in text:
            return TIMELINE
        for artefact in _ARTEFACTS:
            if f'"kind":"{artefact}"' in text:
                raise UsageError(f"Cannot explain {name}.", f"It is a {artefact}, which does not record a run.")
    return PROFILE if profiler.is_trace(head) else LOG


def timeline_of(source: Source) -> Timeline:
    """Read the Timeline in a file. Raises FormatError for anything else."""
    return Timeline.read(source.path, source.name)


@contextmanager
def log_of(source: Source) -> Iterator[BinaryIO]:
    """Open a log for reading."""
    if source.stream is not None:
        yield source.stream
    else:
        with source.path.open("rb") as file:
            yield file


def _is_pipe(path: Path) -> bool:
    """Return whether ``path`` is neither a file nor a folder; False if unknown, as opening it says why."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _open(path: Path) -> BinaryIO:
    """Open a file or pipe. Raises FormatError if that fails."""
    try:
        if not path.is_fifo():
            return path.open("rb")
        descriptor = _waiting_open(path)
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    except OSError as error:
        raise FormatError(f"Cannot explain {path}.", f"{error}.") from error


def _waiting_open(path: Path) -> int:
    """Open a named pipe, and wait a few seconds for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not path.resolve().is_fifo():
        return descriptor  # a shell's own, by its number, has a writer
    if not select.select([descriptor], [], [], _FIRST_BYTES_WITHIN_S)[0]:
        os.close(descriptor)
        raise TimeoutError(errno.ETIMEDOUT, f"It is a pipe, and no data arrived within {_FIRST_BYTES_WITHIN_S:.0f} s")
    return descriptor


def _head(path: Path) -> bytes:
    try:
        with _open(path) as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise FormatError(f"Cannot explain {path}.", f"{error}.") from error


class _Rejoined(io.RawIOBase):
    """The first bytes of a stream, which were read before, then the rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        part = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
