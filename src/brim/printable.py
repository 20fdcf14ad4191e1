"""Escape control characters in names, paths and messages of any origin, which a terminal would obey."""

from __future__ import annotations

import re
import sys

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
