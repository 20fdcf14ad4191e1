"""Micro-batches: pieces of a batch whose gradients add up to those of the batch, and the largest piece that fits.

The loss of a batch is a mean over its counted items (tokens with a label, or rows). It is the sum of the pieces'
means, each times its share of the items: exact up to the order of summation, except for batch norm, which sees one
piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from brim.errors import BudgetError, UsageError
from brim.units import format_bytes

IGNORED_LABEL = -100  # the label that losses of PyTorch and transformers ignore


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A piece of a batch, in the same structure. Its mean loss times ``weight`` is its part of the batch's loss."""

    inputs: Any
    weight: float


def split(
    batch: Any, micro_batch: int, *, labels: str | int | None = None, causal: bool | None = None
) -> list[MicroBatch]:
    """Split ``batch`` (a tensor, or dictionaries, tuples and lists of them) into pieces of ``micro_batch`` rows.

    ``labels`` is the key or position of the tensor of labels, where integers other than -100 are counted. By default
    it is the entry "labels" of a dictionary or the last one of a tuple; without integer labels rows are counted.
    ``causal``: the labels are those of a causal language model, whose first position is not counted (transformers
    shifts them); by default this holds for two-dimensional labels in a dictionary.

    Tensors that are one-dimensional or have one row, and not the batch's number of rows, go to every piece as they
    are. Pieces without counted items are left out. Raises UsageError for a batch that cannot be split.
    """
    if type(micro_batch) is not int or micro_batch < 1:
        raise UsageError(f"Cannot make micro-batches of {micro_batch!r} rows.", "The number must be 1 or more.")
    counted = _labels(batch, labels)
    rows = _rows(batch) if counted is None else counted.shape[0]
    if causal is None:
        causal = isinstance(batch, Mapping) and counted is not None and counted.dim() == 2
    counts = _counts(counted, rows, causal)
    total = sum(counts)
    pieces = []
    for start in range(0, rows, micro_batch):
        end = min(start + micro_batch, rows)
        weight = sum(counts[start:end]) / total if total else (end - start) / rows
        if weight:
            pieces.append(MicroBatch(inputs=_piece(batch, start, end, rows), weight=weight))
    return pieces


def largest(predict: Callable[[int], int], budget_bytes: int, upper: int) -> int:
    """The largest size from 1 to ``upper`` whose ``predict``-ed bytes are within the budget.

    ``predict`` must not fall as the size grows. It is called rarely, as a prediction takes seconds: four times at
    most where bytes are linear in the size. Raises BudgetError with the bytes of size 1 if not even that fits.
    """
    if upper < 1:
        raise UsageError(f"Cannot search micro-batches up to {upper}.", "The limit must be 1 or more.")
    fits, least = 1, predict(1)
    if least > budget_bytes:
        raise BudgetError(
            f"No micro-batch fits {format_bytes(budget_bytes)}.",
            f"One row needs {format_bytes(least)}.",
            "Give more memory, or save more: checkpointing, offload, a shorter sequence.",
            smallest_bytes={"": least},
        )
    if upper == 1:
        return 1
    fails, most = upper, predict(upper)
    if most <= budget_bytes:
        return upper
    turn = 0
    while fails - fits > 1:
        guess = fits + int((budget_bytes - least) / (most - least) * (fails - fits))
        if turn % 2 and turn > 1:  # where bytes do not grow linearly, halving bounds the calls
            guess = (fits + fails) // 2
        guess, turn = min(max(guess, fits + 1), fails - 1), turn + 1
        needed_bytes = predict(guess)
        if needed_bytes <= budget_bytes:
            fits, least = guess, needed_bytes
        else:
            fails, most = guess, needed_bytes
    return fits


def _labels(batch: Any, labels: str | int | None) -> torch.Tensor | None:
    """The tensor of integer labels, or None."""
    if labels is not None:
        try:
            candidate = batch[labels]
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(f"Cannot use labels={labels!r}.", f"The batch has no such entry ({error}).") from error
    elif isinstance(batch, Mapping):
        candidate = batch.get("labels")
    else:
        candidate = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    has_labels = isinstance(candidate, torch.Tensor) and not candidate.is_floating_point() and candidate.dim() > 0
    return candidate if has_labels else None


def _counts(labels: torch.Tensor | None, rows: int, causal: bool) -> list[int]:
    """The number of counted items in each row."""
    if labels is None or isinstance(labels, FakeTensor):  # no values: rows count, and memory does not depend on them
        return [1] * rows
    shown = labels[:, 1:] if causal else labels
    counts: list[int] = (shown != IGNORED_LABEL).reshape(rows, -1).sum(1).tolist()
    return counts


def _rows(batch: Any) -> int:
    for tensor in torch.utils._pytree.tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.dim():
            return tensor.shape[0]
    raise UsageError(f"Cannot split a batch of type {type(batch).__name__}.", "It has no tensor with rows.")


def _piece(value: Any, start: int, end: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() and value.shape[0] == rows:
            return value[start:end]
        if value.dim() < 2 or value.shape[0] == 1:
            return value
        raise UsageError(
            f"Cannot split a tensor of shape {tuple(value.shape)} by rows.",
            f"The batch has {rows} rows, and the first dimension of this tensor differs.",
            "Leave it out of the batch, or put its rows first.",
        )
    if isinstance(value, Mapping):
        return {name: _piece(item, start, end, rows) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_piece(item, start, end, rows) for item in value))
    if isinstance(value, (tuple, list)):
        if value and len(value) == rows and not any(isinstance(item, torch.Tensor) for item in value):
            return value[start:end]  # one entry per row: texts, file names
        return type(value)(_piece(item, start, end, rows) for item in value)
    return value
