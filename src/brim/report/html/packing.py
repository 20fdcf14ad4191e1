"""Encodings of numbers and texts in a page: small, and harmless whatever they say."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

LONGEST_TEXT = 500

# Control characters, lone surrogates, and characters that hide text or turn its direction. They are escaped: a name
# that reads otherwise than it is spelled would mislead people as a tag would mislead the browser.
_UNREADABLE = re.compile("[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def plain(text: str) -> str:
    """Return ``text`` as a readable line of at most ``LONGEST_TEXT`` characters."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT - 1]}…"
    return _UNREADABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\t", " ").replace("\n", " "))


def integers(values: ArrayLike) -> dict[str, Any]:
    """Return whole numbers as base64 of deflated bytes: differences of neighbours, all their lowest bytes first.

    Memory repeats itself, so most differences are small and their high bytes deflate to nothing.
    """
    column = np.asarray(values, dtype="<i8")
    differences = np.diff(column, prepend=np.int64(0)).astype("<i8")
    planes = np.ascontiguousarray(differences.view(np.uint8).reshape(-1, 8).T)
    return {"n": len(column), "z": _deflated(planes.tobytes())}


def texts(values: Sequence[str]) -> dict[str, Any]:
    """Return texts as base64 of deflated JSON."""
    return {"n": len(values), "t": _deflated(json.dumps([plain(text) for text in values]).encode())}


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


def script_json(document: Any) -> str:
    """Return JSON that ends no script element and opens no comment in one."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
