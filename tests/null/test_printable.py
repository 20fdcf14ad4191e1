"""Text of any origin has no orders for a terminal in it."""

from __future__ import annotations

import json
import unicodedata

from brim.errors import BrimError
from brim.printable import printable


def test_every_control_character_but_tabs_and_line_ends_is_written_out() -> None:
    for code in range(0x3000):
        letter = chr(code)
        is_order = unicodedata.category(letter) == "Cc" and letter not in "\t\n"
        is_order |= letter in "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
        assert printable(letter) == (f"\\u{code:04x}" if is_order else letter)


def test_half_a_letter_is_written_out() -> None:
    assert printable("a\ud800b") == "a\\ud800b"


def test_text_stays_as_it_is() -> None:
    for text in ("plain", "line\nline\r\n\ttab", "größer 漢字 עברית 👩‍👩‍👧"):
        assert printable(text) is text
    assert printable("a\rb\nc", one_line=True) == "a\\u000db\\u000ac"


def test_json_stays_json() -> None:
    document = {"name": "\x1b]52;c;aGk=\x07\x9b2J\u202ex"}
    for ascii_only in (True, False):
        assert json.loads(printable(json.dumps(document, ensure_ascii=ascii_only))) == document


def test_errors_are_printable_and_keep_what_they_were_given() -> None:
    error = BrimError("Cannot read \x1b[2J.", "It is\x07 gone.\nReally.", "")
    assert str(error) == "Cannot read \\u001b[2J.\nIt is\\u0007 gone.\nReally."
    assert error.request == "Cannot read \x1b[2J."
