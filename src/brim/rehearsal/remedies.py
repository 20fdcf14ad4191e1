"""Remedies for rehearsed programs that fail because something is missing on this machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_REMEDIES = tuple((re.compile(entry["error"]), entry["remedy"]) for entry in _TABLE["known"])
_MODULE = re.compile(r"No module named '([\w.]+)'")


def remedy(message: str) -> str:
    """The remedy for a program's error ``message``; "" if the machine is not known to cause it."""
    for pattern, known in _REMEDIES:
        if pattern.search(message):
            return str(known)
    missing = _MODULE.search(message)
    return f"Install the package of {missing[1].partition('.')[0]} for the Python that rehearses." if missing else ""
