"""Scratch memory of the CPU's fused attention (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""

from __future__ import annotations

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_KV_SPLIT = 512


def _splits(queries: int, keys: int) -> tuple[int, int]:
    """Rows of queries and of keys that one thread works on at once."""
    split = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(split, queries), min(_KV_SPLIT, keys)


def _forward(kernel: Kernel) -> None:
    query, value = kernel.args[0], kernel.args[2]
    rows, columns = _splits(query.size(2), value.size(2))
    threads = torch.get_num_threads()
    reduced = query.dtype in (torch.bfloat16, torch.float16)
    accumulate = 8 if query.dtype == torch.float64 else 4
    kernel.emit()
    kernel.temp(threads * (rows * columns + 2 * rows + rows * query.size(3)) * accumulate)
    if reduced:
        kernel.temp(threads * rows * columns * query.element_size())


def _backward(kernel: Kernel) -> None:
    grad, query, value = kernel.args[0], kernel.args[1], kernel.args[3]
    rows, columns = _splits(query.size(2), value.size(2))
    threads = torch.get_num_threads()
    accumulate = 8 if query.dtype == torch.float64 else 4
    kernel.emit()
    if not grad.transpose(1, 2).is_contiguous():
        kernel.temp(nbytes(grad))
    kernel.temp(threads * 2 * rows * columns * accumulate)
    if query.dtype in (torch.bfloat16, torch.float16):
        kernel.temp(threads * 2 * rows * columns * query.element_size())
    kernel.temp(rows * accumulate)


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}
