"""Bytes of optimizer state, to the byte: moments, factored moments, quantized moments and step counters."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from brim.errors import UsageError
from brim.predict.formulas.result import Result, item_bytes, result, written_bytes

BLOCK = 256  # elements that share one scale, with torchao as with bitsandbytes
SMALLEST_QUANTIZED = 4096  # elements; smaller parameters are not quantized by either
CODE_BOOK_BYTES = 256 * 4  # a table of 256 float32 per moment: for each parameter (torchao), for all (bitsandbytes)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """``copies``: tensors of the parameter's size; ``counters``: float32 scalars per parameter."""

    copies: int
    counters: int
    source: str


_TORCH = "torch/optim"
_KINDS = {
    "adamw": _Kind(copies=2, counters=1, source=f"{_TORCH}/adam.py: exp_avg, exp_avg_sq, step"),
    "adam": _Kind(copies=2, counters=1, source=f"{_TORCH}/adam.py: exp_avg, exp_avg_sq, step"),
    "sgd": _Kind(copies=0, counters=0, source=f"{_TORCH}/sgd.py"),
    "sgd-momentum": _Kind(copies=1, counters=0, source=f"{_TORCH}/sgd.py: momentum_buffer"),
    "adafactor": _Kind(copies=0, counters=1, source=f"{_TORCH}/_adafactor.py: row_var, col_var, step"),
    "rmsprop": _Kind(copies=1, counters=1, source=f"{_TORCH}/rmsprop.py: square_avg, step"),
    "adagrad": _Kind(copies=1, counters=1, source=f"{_TORCH}/adagrad.py: sum, step"),
    "lion": _Kind(copies=1, counters=0, source="Chen et al., arXiv 2302.06675: exp_avg"),
    "adamw8bit": _Kind(
        copies=2, counters=1, source="torchao/optim/adam.py and subclass_8bit.py: codes, scale, qmap, step"
    ),
}
OPTIMIZERS = tuple(_KINDS)


def optimizer_state(optimizer: str, shapes: Sequence[Sequence[int]], *, dtype: str = "float32") -> Result:
    """Bytes of the state for parameters of these ``shapes``, step counters included.

    The state has the parameters' ``dtype``. PyTorch keeps the counters in RAM unless the optimizer is fused or
    capturable. Raises UsageError naming the nearest optimizers.
    """
    kind = kind_of(optimizer)
    if optimizer == "adamw8bit":
        return _torchao(shapes, dtype, kind)
    if optimizer == "adafactor":
        return _factored(shapes, dtype, kind)
    elements = sum(math.prod(shape) for shape in shapes)
    text = f"{kind.copies} x {elements:,} x {written_bytes(dtype)}" if kind.copies else "nothing per parameter"
    counters = kind.counters * len(shapes)
    text += f" + {counters:,} counters x 4 B" if counters else ""
    return result(kind.copies * elements * item_bytes(dtype) + 4 * counters, "B", text, source=kind.source)


def kind_of(optimizer: str) -> _Kind:
    """Raise UsageError with the nearest names where ``optimizer`` is none."""
    if optimizer not in _KINDS:
        near = difflib.get_close_matches(optimizer, _KINDS, n=3, cutoff=0.0)
        raise UsageError(f"Unknown optimizer {optimizer!r}.", todo=f"Nearest: {', '.join(near)}.")
    return _KINDS[optimizer]


def _factored(shapes: Sequence[Sequence[int]], dtype: str, kind: _Kind) -> Result:
    """Shazeer and Stern, arXiv 1804.04235: rows and columns of the last two dimensions; the moments of vectors are
    not factored."""
    rows = columns = whole = 0
    for shape in shapes:
        if len(shape) < 2:
            whole += math.prod(shape)
            continue
        rest = math.prod(shape[:-2])
        rows += rest * shape[-2]
        columns += rest * shape[-1]
    counters = kind.counters * len(shapes)
    text = f"({rows:,} rows + {columns:,} columns + {whole:,} of vectors) x {written_bytes(dtype)}"
    text += f" + {counters:,} counters x 4 B"
    return result((rows + columns + whole) * item_bytes(dtype) + 4 * counters, "B", text, source=kind.source)


def _torchao(shapes: Sequence[Sequence[int]], dtype: str, kind: _Kind) -> Result:
    """Two moments of 8 bits, a float32 scale per 256, a table each; sizes that 256 does not divide keep their
    dtype."""
    sizes = [math.prod(shape) for shape in shapes]
    quantized = [size for size in sizes if size >= SMALLEST_QUANTIZED and size % BLOCK == 0]
    whole = sum(sizes) - sum(quantized)
    blocks, tables = sum(quantized) // BLOCK, len(quantized) * CODE_BOOK_BYTES
    text = f"2 x ({sum(quantized):,} x 1 B + {blocks:,} scales x 4 B + {tables:,} B of tables"
    text += f" + {whole:,} of tensors kept whole x {written_bytes(dtype)}) + {len(sizes):,} counters x 4 B"
    value = 2 * (sum(quantized) + 4 * blocks + tables + whole * item_bytes(dtype)) + 4 * len(sizes)
    return result(value, "B", text, source=kind.source)
