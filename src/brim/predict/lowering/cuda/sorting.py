"""Temporaries of sorting on CUDA (aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu).

CUB's radix sorts read from one buffer and write to another and may not overwrite the first, so each takes a second
copy of keys and values as temporary storage (cub/device/dispatch/dispatch_radix_sort.cuh).
"""

from __future__ import annotations

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

from brim.predict.lowering.cuda import cub as cuda_cub
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_SMALL_ROW = 4096  # Sort.cu, should_use_small_sort: rows up to this are sorted in place
_LONG_ROW = 1_000_000
_FEW_ROWS = 128
_INDEX_BYTES = 8


def _sort(kernel: Kernel) -> None:
    source = kernel.arg("self")
    kernel.emit()
    if source.dim() == 0 or source.numel() == 0:
        return
    row = source.size(kernel.arg("dim"))
    if row <= _SMALL_ROW:
        kernel.temp(row * _INDEX_BYTES)  # the positions, before they are laid out in every row
        return
    if source.stride(kernel.arg("dim")) != 1 or not is_dense(source):
        kernel.temp(nbytes(source))  # rows are laid out one after the other, and so are both results
        kernel.temp(nbytes(source))
        kernel.temp(source.numel() * _INDEX_BYTES)
    _radix_sort(kernel, source.numel(), row, source.element_size())


def _radix_sort(kernel: Kernel, count: int, row: int, key_bytes: int) -> None:
    rows, bits = count // row, 8 * key_bytes
    if rows == 1 or row >= _LONG_ROW:  # one row after the other
        kernel.temp(row * _INDEX_BYTES)
        kernel.temp(cuda_cub.sort_bytes(row, key_bytes, _INDEX_BYTES, bits))
    elif rows < _FEW_ROWS:  # all as one by value, then by row
        for _ in range(2):
            kernel.temp(count * _INDEX_BYTES)
        by_value = kernel.temp(count * key_bytes)
        kernel.passing(cuda_cub.sort_bytes(count, key_bytes, _INDEX_BYTES, bits))
        kernel.free(by_value)
        kernel.temp(cuda_cub.sort_bytes(count, _INDEX_BYTES, 0, cuda_cub.bits_of(rows)))
    else:  # row by row in one launch
        kernel.temp(count * _INDEX_BYTES)
        kernel.temp(cuda_cub.segmented_sort_bytes(count, key_bytes, _INDEX_BYTES))


def _scan(kernel: Kernel) -> None:
    """ReduceOps.cpp converts to the result's dtype; cuda/ScanUtils.cuh: rows are dense, and one row is CUB's."""
    kernel.emit()
    source, dtype = kernel.arg("self"), kernel.result.dtype
    if not source.dim() or not source.numel():
        return
    if source.dtype is not dtype:
        source = torch.empty_like(source, dtype=dtype)
        kernel.temp(nbytes(source))
    kernel.contiguous(source)
    if source.numel() == source.size(kernel.arg("dim")):
        in_words = not dtype.is_complex and dtype not in (torch.bfloat16, torch.float16)
        kernel.temp(cuda_cub.scan_bytes(source.numel(), dtype.itemsize, in_words=in_words))


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.sort.default: _sort,
    _aten.sort.stable: _sort,
    _aten.cumsum.default: _scan,
    _aten.cumprod.default: _scan,
}
