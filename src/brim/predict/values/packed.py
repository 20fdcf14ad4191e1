"""Packed sequences: PyTorch's C++ reads their lengths in memory, which fake tensors do not have.

Follows aten/src/ATen/native/PackedSequence.cpp with the values that are known.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch

from brim.predict import failures
from brim.predict.values.known import known

_aten = torch.ops.aten


def sizes_of(batch_sizes: torch.Tensor) -> list[int]:
    """Return the number of sequences at each step."""
    source = known(batch_sizes)
    if source is None:
        raise failures.data_dependent(_aten._pack_padded_sequence.default)
    return [int(size) for size in source.value.tolist()]


def pack(source: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, list[int]]:
    """Return the rows of all sequences, step by step, and the number of rows of each step."""
    counts = sizes_of(lengths)
    sizes = [sum(count > step for count in counts) for step in range(max(counts))]
    data: torch.Tensor = _Pack.apply(source.transpose(0, 1) if batch_first else source, sizes)  # type: ignore[no-untyped-call]
    return data, sizes


def pad(
    data: torch.Tensor, sizes: list[int], batch_first: bool, padding: float, total: int
) -> tuple[torch.Tensor, list[int]]:
    """The padded batch, and the length of each sequence."""
    steps = max(total, len(sizes)) if total > 0 else len(sizes)
    padded = data.new_full((steps, sizes[0], *data.shape[1:]), padding)
    at = row = 0
    for size, group in groupby(sizes):
        count = len(list(group))
        part = data[row : row + count * size].view(count, size, *data.shape[1:])
        padded[at : at + count, :size].copy_(part)
        at, row = at + count, row + count * size
    lengths = [sum(size > index for size in sizes) for index in range(sizes[0])]
    return (padded.transpose(0, 1) if batch_first else padded), lengths


class _Pack(torch.autograd.Function):
    """Steps of equal size are copied together, then joined; the gradient is written into zeros step by step."""

    @staticmethod
    def forward(context: Any, source: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        context.sizes, context.shape = sizes, source.shape
        at, parts = 0, []
        for size, group in groupby(sizes):
            count = len(list(group))
            part = source[at : at + count, :size].contiguous()
            parts.append(part.view(count * size, *source.shape[2:]))
            at += count
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        padded, row = gradient.new_zeros(context.shape), 0
        for at, size in enumerate(context.sizes):
            padded[at, :size].copy_(gradient[row : row + size])
            row += size
        return padded, None
