"""Temporaries of memory-efficient attention.

Follows transformers/cuda/attention.cu and attention_backward.cu under aten/src/ATen/native, and kernel_backward.h
under mem_eff_attention there. Of the kernels that mem_eff_attention/kernels/generate_kernels.py lists, the first that
takes the head's size and fits the shared memory of the GPU runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEADS = (32, 64, 128, 1 << 16)  # of a kernel, by the head's size
_SMALL_SHARED_MEMORY = ((7, 0), (7, 5), (8, 6), (8, 9), (12, 0))  # 64 to 99 KiB for a block of threads
_MOST_PARTS = 200  # of a key's gradient that is added up in memory, over all heads
_MANY_BLOCKS = 256
_BIAS_ALIGNMENT = 16


@dataclass(frozen=True)
class _Backward:
    """Rows of queries and of keys that one block of threads works on, and what it keeps in registers."""

    queries: int
    keys: int
    in_registers: bool

    @classmethod
    def of(cls, size: int, half: bool, capability: tuple[int, int]) -> _Backward:
        largest = next(head_size for head_size in _LARGEST_HEADS if size <= head_size)
        queries = 128 if largest > 64 and capability not in _SMALL_SHARED_MEMORY else 64
        in_registers = half and largest <= queries
        return cls(queries, 128 if in_registers and largest > 64 and capability >= (8, 0) else 64, in_registers)


def _forward(kernel: Kernel) -> None:
    """The seed and the offset of dropout lie in RAM. Half-precision results that are wider than a block of keys are
    added up in float32."""
    for output in kernel.result[2:4]:
        kernel.drop(output)
    kernel.emit()
    query, value = kernel.arg("query"), kernel.arg("value")
    if query.dtype in _HALF and value.size(-1) > _LARGEST_HEADS[-2]:
        kernel.passing(query.size(0) * query.size(1) * query.size(2) * value.size(-1) * 4)


def fake_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
    *args: object, shared_storage_dqdkdv: bool = False, **named: object,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """attention_backward.cu: gradients are dense, or lie in one storage; a bias's rows are of a multiple of 16."""
    gradients: list[torch.Tensor | None]
    if shared_storage_dqdkdv:
        *outer, heads, size = query.shape
        gradients = list(torch.empty(*outer, 3, heads, size, dtype=query.dtype).unbind(-3))
    else:
        gradients = [torch.empty(input.shape, dtype=input.dtype) for input in (query, key, value)]
    if bias is None:
        return (*gradients, None)
    padded = ceil(bias.size(-1) / _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    return (*gradients, torch.empty(*bias.shape[:-1], padded, dtype=bias.dtype)[..., : bias.size(-1)])


def _backward(kernel: Kernel) -> None:
    gradient, query = kernel.arg("grad_out_"), kernel.arg("query")
    batch, heads, rows, _ = query.shape
    dense = kernel.contiguous(gradient.transpose(1, 2))
    kernel.emit()
    sums_bytes = batch * heads * rows * 4
    if query.dtype in _HALF:  # the kernel makes them
        sums = kernel.temp(sums_bytes)
    else:  # the gradient times the result, summed, laid out head by head
        product, sums = kernel.temp(nbytes(gradient)), kernel.temp(sums_bytes)
        if heads > 1 and rows > 1:
            by_row, sums = sums, kernel.temp(sums_bytes)
            kernel.free(by_row)
        kernel.free(product)
    workspace = kernel.temp(_workspace_bytes(query, kernel.arg("key"), kernel.arg("value"), kernel.capability))
    kernel.free(sums, workspace, dense)


def _workspace_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: tuple[int, int]) -> int:
    """Parts of the query's gradient, each with a lock; those of the keys' and values' where registers are too few."""
    (batch, heads, rows, size), columns, value_size = query.shape, key.size(2), value.size(-1)
    half = query.dtype in _HALF
    block = _Backward.of(max(size, value_size), half, capability)
    floats = ceil(rows / block.queries) * ceil(size / block.keys) * (4 + block.queries * block.keys)
    if half and not block.in_registers:
        splits = ceil(columns / block.keys)
        if splits * heads * batch >= _MANY_BLOCKS and columns <= 2 * block.keys:
            splits = 1
        splits = max(min(splits, _MOST_PARTS // (batch * heads)), 1)
        if torch.are_deterministic_algorithms_enabled():
            splits = 1
        wide = sum(ceil(width / block.queries) * block.queries for width in (size, value_size))
        floats += splits * block.keys * wide
    return batch * heads * ceil(floats / 4) * 4 * 4


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten._scaled_dot_product_efficient_attention.default: _forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _backward,
}
