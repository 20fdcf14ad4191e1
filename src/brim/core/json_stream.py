"""Reads a JSON document that may be far larger than memory, one element of one array, or some numbers, at a time.

The values are made by the standard library's scanner, which is written in C; what is done here is to hand it enough
text. The text that is held is bounded, whatever the file: a single value may take ``LIMIT`` characters.
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
LIMIT = 1 << 20  # the most that one value may take: an event with a deep Python stack takes a tenth
EXPANSION = 200  # a gzip file that grows by more is not a trace (they grow 10 to 40 times) but an attack
_GZIP = b"\x1f\x8b"
# Not strict: control characters in names were written as they are.
_scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
_space = re.compile(r"[ \t\n\r]*").match
_between = re.compile(r"[ \t\n\r,]*").match
# Possessive: the matcher would keep a place to go back to for every character.
_token = re.compile(r'[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL).match


class JsonStream:
    """The text of one file and a place in it. All methods raise FormatError where the text is not JSON."""

    def __init__(self, source: Path | BinaryIO, asked: str) -> None:
        """``source``: a file, or what can be sought in; ``asked``: what the errors say was asked."""
        self._asked = asked
        self._text, self._at, self._ended = "", 0, False
        try:
            self._raw: BinaryIO = regular(source).open("rb") if isinstance(source, Path) else source
            self._size = self._raw.seek(0, io.SEEK_END)
            self._raw.seek(0)
            packed = self._raw.read(2) == _GZIP
            self._raw.seek(0)
        except OSError as error:
            raise FormatError(asked, f"{error}.") from error
        unpacked: Any = gzip.GzipFile(fileobj=self._raw) if packed else self._raw
        self._most = EXPANSION * self._size + CHUNK if packed else None
        self._file = io.TextIOWrapper(unpacked, encoding="utf-8", errors="replace", newline="")
        self._read = 0

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def refuse(self, found: str) -> FormatError:
        return FormatError(self._asked, found)

    def peek(self) -> str:
        """The next character that is not a space; "" at the end."""
        while True:
            self._at = _space(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, wanted: str) -> str:
        """Pass over the next character, which must be one of ``wanted``."""
        character = self.peek()
        if not character or character not in wanted:
            raise self.refuse(
                f"Found {character!r} where one of {wanted!r} belongs." if character else "It is cut off."
            )
        self._at += 1
        return character

    def value(self) -> Any:
        """The next value, whole."""
        self.peek()
        while True:
            try:
                value, end = _scan(self._text, self._at)
            except (StopIteration, ValueError, RecursionError) as error:
                self._need_more(error)
                continue
            if end == len(self._text) and self._more():
                continue  # a number may go on in what is read next
            self._at = end
            return value

    def skip(self) -> None:
        """Pass over the next value: an array or object of any size, in which no text takes more than ``LIMIT``."""
        if self.peek() not in ("{", "["):
            self.value()
            return
        depth = 0
        while True:
            match = _token(self._text, self._at)
            if match is None:  # a text that does not end here, or the end
                self._need_more(None)
                continue
            self._at = match.end()
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
            if depth == 0:
                return

    def elements(self) -> Iterator[Any]:
        """The values of the array that begins here."""
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
        """The keys of the object that begins here; read or skip the value of each before the next is asked for."""
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
        """The values of the array of numbers that begins here, some at a time. Other values are given as well."""
        self.take("[")
        whole = True  # whether nothing has to follow
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
            if end >= 0 and not numbers and not whole:
                raise self.refuse("An array ends with a comma.")
            yield numbers
            if end >= 0:
                return
            whole = False

    def _need_more(self, error: BaseException | None) -> None:
        """Read more text, because a value is not complete yet. ``error``: the scanner's."""
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
        if self._most is not None and self._read > self._most:
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
