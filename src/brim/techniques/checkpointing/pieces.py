"""A batch that a block takes in pieces of some rows: its weights are loaded once, its activations are a piece's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, tree_unflatten

_LEAST_DIMS = 3  # (rows, tokens, channels) or (rows, channels, ...): with less, rows may be tokens of one sequence
_ROUNDING = 0.05  # of the largest value: kernels of another number of rows round otherwise, also in bfloat16


def rows_of(arguments: Any) -> int:
    """The rows of a block's first tensor; 0 where another dimension is as long, so that it does not tell the rows."""
    first = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() < _LEAST_DIMS or first.shape[0] in first.shape[1:]:
        return 0
    return first.shape[0]


def parts(arguments: Any, size: int, rows: int) -> list[Any]:
    """The arguments of each ``size`` rows: parts of each tensor with ``rows`` rows; other values are in all parts."""
    count = -(-rows // size)
    columns = [
        leaf.split(size)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        else [leaf] * count
        for leaf in tree_leaves(arguments)
    ]
    structure = tree_structure(arguments)
    return [tree_unflatten(list(values), structure) for values in zip(*columns, strict=True)]


def joined(outputs: list[Any]) -> Any:
    """The output of a block from those of its pieces; None where they have values that no concatenation gives."""
    columns = list(zip(*map(tree_leaves, outputs), strict=True))
    if not all(first is None or (isinstance(first, torch.Tensor) and first.dim()) for first, *_ in columns):
        return None
    together = [None if column[0] is None else torch.cat(column) for column in columns]
    return tree_unflatten(together, tree_structure(outputs[0]))


def mixes_rows(block: nn.Module) -> bool:
    """Return whether a part of ``block`` is known to compute with several rows at once: batch norm, or a capacity of
    experts over the batch.
    """
    return any(
        (isinstance(part, _BatchNorm) and (part.training or part.running_mean is None))
        or any("capacity" in name for name in vars(part))
        for part in block.modules()
    )


def computes_alike(block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, rows: int) -> bool:
    """Return whether ``forward`` of ``block`` gives two rows what it gives each alone, apart from rounding."""
    training = [part for part in block.modules() if part.training]
    try:
        block.eval()  # without dropout, which differs from call to call
        with torch.no_grad():
            calls = [*parts((args, kwargs), 1, rows)[:2], parts((args, kwargs), 2, rows)[0]]
            calls = tree_map_only(torch.Tensor, torch.clone, calls)
            *singles, pair = [forward(*its_args, **its_kwargs) for its_args, its_kwargs in calls]
            if any(isinstance(leaf, torch.Tensor) and leaf._version for leaf in tree_leaves(calls)):
                return False  # autograd lets no part of a split tensor be changed in place
            together = joined(singles)
            return together is not None and all(map(_is_close, tree_leaves(pair), tree_leaves(together)))
    finally:
        for part in training:
            part.training = True


def _is_close(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None or left.shape != right.shape:
        return left is right
    if not left.is_floating_point():
        return torch.equal(left, right)
    return bool((left - right).abs().max() <= _ROUNDING * left.abs().max())
