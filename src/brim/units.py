"""Read and write bytes and seconds with units."""

from __future__ import annotations

import re
from fractions import Fraction

from brim.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 10**3,
    "m": MIB,
    "mib": MIB,
    "mb": 10**6,
    "g": GIB,
    "gib": GIB,
    "gb": 10**9,
    "t": TIB,
    "tib": TIB,
    "tb": 10**12,
}
_PATTERN = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([a-zA-Z]*|%)\s*")


def is_share(text: str | int) -> bool:
    """True for a percentage such as ``"80%"``."""
    return isinstance(text, str) and text.rstrip().endswith("%")


def parse_bytes(text: str | int, total_bytes: int | None = None) -> int:
    """Parse ``"8GiB"``, ``"512 MB"``, ``"3g"`` (binary) or a plain number of bytes; rounds down.

    ``"80%"`` is that share of ``total_bytes``. Raises UsageError for anything else, for negative numbers, for more
    than 100 % or a share of an unknown total, and for less than 1 MiB without a unit, which was probably forgotten.
    """
    if isinstance(text, int):
        if text < 0:
            raise UsageError(f"Cannot use {text} as a number of bytes.", "It is negative.")
        return text
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is not None and match[2] == "%":
        return _share(text, Fraction(match[1]) / 100, total_bytes)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"Cannot read {text!r} as an amount of memory.",
            todo="Write a number and a unit: 8GiB, 512MiB, 1.5GB, or plain bytes.",
        )
    count = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if not match[2] and 0 < count < MIB:
        number = match[1]
        raise UsageError(
            f"Cannot use {number} as an amount of memory.",
            f"Without a unit it is {format_bytes(count)}.",
            f"Write {number}MiB or {number}GiB; {number}B if that many bytes are meant.",
        )
    return count


def _share(text: str, share: Fraction, total_bytes: int | None) -> int:
    if share > 1:
        raise UsageError(
            f"Cannot use {text} as an amount of memory.", "It is more than the total.", "Give 100% or less."
        )
    if total_bytes is None:
        raise UsageError(
            f"Cannot use {text} as an amount of memory.", "The total is unknown.", "Give bytes, such as 8GiB."
        )
    return int(share * total_bytes)


def exact_bytes(amount: str | int) -> str:
    """Bytes in the largest unit that says them exactly: ``"12GiB"``. A share stays as it was written."""
    if is_share(amount):
        return str(amount)
    count = parse_bytes(amount)
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def format_bytes(count: int | float) -> str:
    """Write bytes with a binary unit and at most three digits: ``"2.61 GiB"``."""
    size = float(count)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    unit = units[0]
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Write seconds in the unit that keeps one to three digits before the point: ``"12.3 ms"``."""
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
