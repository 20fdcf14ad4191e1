"""A number and the sum that gave it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fractions import Fraction

from brim.errors import UsageError

_BITS = {
    "float64": 64,
    "int64": 64,
    "float32": 32,
    "int32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
    "int4": 4,
    "nf4": 4,
}
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """``value`` in ``unit`` (``B``, ``parameters``, ``FLOP``), and the sum as a person would write it.

    ``arithmetic`` reads ``2 x 32 layers x 8 heads x 128 x 2 B = 131,072 B per token``; ``source`` names the paper.
    """

    value: int
    unit: str
    arithmetic: str
    source: str = ""


def result(value: Fraction | int, unit: str, sum_text: str, *, source: str = "", per: str = "") -> Result:
    """A Result whose arithmetic is ``sum_text = value unit per``; a fraction is rounded to the nearest whole."""
    whole = round(value)
    per = f" {per}" if per else ""
    return Result(value=whole, unit=unit, arithmetic=f"{sum_text} = {whole:,} {unit}{per}", source=source)


def bits(dtype: str) -> int:
    """Bits of one element of ``dtype``: PyTorch's names, their short forms (``bf16``), ``int4`` and ``nf4``.

    Raises UsageError naming the nearest ones.
    """
    name = dtype.removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in _BITS:
        near = difflib.get_close_matches(name, [*_BITS, *_SHORT], n=3, cutoff=0.0)
        raise UsageError(f"Unknown dtype {dtype!r}.", todo=f"Nearest: {near}.")
    return _BITS[name]


def item_bytes(dtype: str) -> Fraction:
    """Bytes of one element; half a byte for ``int4``."""
    return Fraction(bits(dtype), 8)


def written_bytes(dtype: str) -> str:
    """``"2 B"``, or ``"0.5 B"`` for four bits."""
    return f"{float(item_bytes(dtype)):g} B"


def at_least_one(**sizes: int) -> None:
    """Raises UsageError for a size below 1, by its name."""
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} = {value} was given.", "It must be at least 1.")
