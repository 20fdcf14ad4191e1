"""FlexAttention as its compiled kernel takes memory: results, and one sum per query row for the backward pass.

What a score function or a block mask computes inside of the kernel takes none. Run as it is written, without a
compiler, FlexAttention makes the whole matrix of scores; the trace says which of the two it stands for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention as OPERATION

NOTE = "flex_attention: as its compiled kernel"
__all__ = ["NOTE", "OPERATION", "attention"]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, heads, tokens, head size) attended; logarithms of sums; the maxima that nobody asked for."""
    return _Flex.apply(query, key, value)  # type: ignore[no-any-return,no-untyped-call]


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        rows = query.shape[:-1]
        output = query.new_empty((*rows, value.size(-1)))
        sums = query.new_empty(rows, dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums)
        nothing = query.new_empty((0,), dtype=torch.float32)
        context.mark_non_differentiable(nothing)
        context.set_materialize_grads(False)
        return output, sums, nothing

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, *others: Any) -> Any:
        query, key, value, output, _ = context.saved_tensors
        # The sum of output times gradient in each row.
        row_sums = output.new_empty(output.shape[:-1], dtype=torch.float32)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del row_sums
        return gradients
