"""Texts for terminals and notebooks: names of any origin without control characters, and results as text."""

from __future__ import annotations

import contextlib
import html
import importlib
import io
import re
import sys
from typing import ClassVar

# Control characters of ASCII (except tab, line feed and CR LF) and Latin 1, Unicode's line ends and bidirectional
# controls ("Bidi_Control" in PropList.txt), and surrogates, which no terminal can show.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
_LINE_ENDS = re.compile("[\t\r\n]")


def printable(text: str, *, one_line: bool = False) -> str:
    """Escape control characters as JSON does (``\\u001b``); ``one_line`` escapes line ends too."""
    text = _CONTROLS.sub(_escaped, text)
    return _LINE_ENDS.sub(_escaped, text) if one_line else text


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def write_note(text: str, *, red: bool = False) -> None:
    """Write a line of brim's to the standard error of the user's program."""
    begin, end = ("\033[31m", "\033[0m") if red and sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{begin}brim: {printable(text)}{end}\n")


class Readable:
    """A result that reads in a terminal and in a notebook as the command line prints it.

    ``_PRINTER`` names the command's function: the command line is above every package, and loaded when it prints.
    ``_TITLE`` names the attribute that ``repr`` shows: a summary can take seconds.
    """

    _PRINTER: ClassVar[str]
    _TITLE: ClassVar[str] = "title"

    def summary(self) -> str:
        """Return the text that brim's command prints."""
        module, _, function = self._PRINTER.partition(":")
        with contextlib.redirect_stdout(io.StringIO()) as text:
            getattr(importlib.import_module(module), function)(self)
        return text.getvalue().rstrip()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {getattr(self, self._TITLE)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary())}</pre>"
