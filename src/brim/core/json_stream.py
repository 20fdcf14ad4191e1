"""Read JSON documents larger than memory, one array element or a batch of numbers at a time.

The standard library's scanner, which is written in C, parses the values; this module feeds it text. The text in
memory is bounded for any file: a single value may take ``LIMIT`` characters.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from brim.core.files import regular
from brim.errors import FormatError

CHUNK = 1 << 18  # characters that are read at once
PIECE = 1 << 15  # characters of an array of numbers that are read at once
LIMIT = 1 << 20  # characters of one value; an event with a deep Python stack takes a tenth of it
EXPANSION = 200  # a gzip file that grows by more is not a trace (they grow 10 to 40 times) but an attack
_GZIP = b"\x1f\x8b"
# Not strict: some writers do not escape control characters in names.
_scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
_space = re.compile(r"[ \t\n\r]*").match
_between = re.compile(r"[ \t\n\r,]*").match
# Possessive: otherwise the matcher stores a position to backtrack to for every character.
_token = re.compile(r'[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL).match


class JsonStream:
    """A cursor in the text of a file. All methods raise FormatError if the text is not JSON."""

    def __init__(self, source: Path | BinaryIO, request: str) -> None:
        """``source``: a file or a seekable stream; ``request``: the first line of errors."""
        self._request = request
        self._text, self._at, self._ended = "", 0, False
        try:
            self._raw: BinaryIO = regular(source).open("rb") if isinstance(source, Path) else source
            self._size = self._raw.seek(0, io.SEEK_END)
            self._raw.seek(0)
            packed = self._raw.read(2) == _GZIP
            self._raw.seek(0)
        except OSError as error:
            raise FormatError(request, f"{error}.") from error
        unpacked: Any = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
        self._limit = EXPANSION * self._size + CHUNK if packed else None
        self._file = io.TextIOWrapper(unpacked, encoding="utf-8", errors="replace", newline="")
        self._read = 0

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def refuse(self, reason: str) -> FormatError:
        return FormatError(self._request, reason)

    def peek(self) -> str:
        """Return the next character that is not a space; "" at the end."""
        while True:
            self._at = _space(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, expected: str) -> str:
        """Consume the next character, which must be one of ``expected``."""
        character = self.peek()
        if not character or character not in expected:
            raise self.refuse(
                f"Found {character!r} where one of {expected!r} belongs." if character else "It is cut off."
            )
        self._at += 1
        return character

    def value(self) -> Any:
        """Read the next value."""
        self.peek()
        while True:
            try:
                value, end = _scan(self._text, self._at)
            except (StopIteration, ValueError, RecursionError) as error:
                self._need_more(error)
                continue
            if end == len(self._text) and self._more():
                continue  # a number may continue in the next chunk
            self._at = end
            return value

    def skip(self) -> None:
        """Skip the next value: an array or object of any size, in which no text takes more than ``LIMIT``."""
        if self.peek() not in ("{", "["):
            self.value()
            return
        depth = 0
        while True:
            match = _token(self._text, self._at)
            if match is None:  # an incomplete text, or the end
                self._need_more(None)
                continue
            self._at = match.end()
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
            if depth == 0:
                return

    def elements(self) -> Iterator[Any]:
        """Iterate over the values of the array that begins here."""
        self.take("[")
        while True:
            text, at = self._text, self._at
            try:
                while True:
                    at = _between(text, at).end()  # type: ignore[union-attr]
                    element, at = _scan(text, at)
                    self._at = at
                    yield element
            except (StopIteration, ValueError, RecursionError) as error:
                self._at = _between(text, self._at).end()  # type: ignore[union-attr]
                if text.startswith("]", self._at):
                    self._at += 1
                    return
                self._need_more(error)

    def fields(self) -> Iterator[str]:
        """Iterate over the keys of the object that begins here; read or skip each value before the next key."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self.refuse(f"Found {str(key)[:80]!r} where a key belongs.")
            self.take(":")
            yield key
            if self.take(",}") == "}":
                return

    def numbers(self) -> Iterator[list[Any]]:
        """Iterate over the array of numbers that begins here, in batches. Other values are not refused."""
        self.take("[")
        may_end = True
        while True:
            self.peek()
            limit = self._at + PIECE
            end = self._text.find("]", self._at, limit)
            stop = end if end >= 0 else self._text.rfind(",", self._at, limit)
            if stop < 0:
                if len(self._text) > limit:
                    raise self.refuse(f"A number of more than {PIECE} characters.")
                self._need_more(None)
                continue
            piece = self._text[self._at : stop]
            self._at = stop + 1
            try:
                numbers = json.loads(f"[{piece}]")
            except (ValueError, RecursionError) as error:
                raise self.refuse(f"An array of numbers is invalid: {_why(error)}") from error
            if end >= 0 and not numbers and not may_end:
                raise self.refuse("An array ends with a comma.")
            yield numbers
            if end >= 0:
                return
            may_end = False

    def _need_more(self, error: BaseException | None) -> None:
        """Read more text, as a value is incomplete. ``error``: the scanner's."""
        if len(self._text) - self._at > LIMIT:
            raise self.refuse(f"A value of more than {LIMIT} characters, or not JSON: {_why(error)}") from error
        if not self._more():
            raise self.refuse(f"It is cut off, or not JSON: {_why(error)}") from error

    def _more(self) -> bool:
        if self._ended:
            return False
        try:
            chunk = self._file.read(max(CHUNK, len(self._text) - self._at))
        except (OSError, EOFError, zlib.error) as error:
            raise self.refuse(f"It cannot be unpacked: {error}.") from error
        self._read += len(chunk)
        if self._limit is not None and self._read > self._limit:
            raise self.refuse(f"It grows to more than {EXPANSION} times its size when unpacked.")
        self._text, self._at = self._text[self._at :] + chunk, 0
        self._ended = not chunk
        return bool(chunk)


def _why(error: BaseException | None) -> str:
    if error is None or isinstance(error, StopIteration):
        return "no value begins or ends there."
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    return f"{str(error)[:100]}."
