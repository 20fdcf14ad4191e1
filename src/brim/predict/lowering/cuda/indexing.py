"""Temporaries of indexing on CUDA.

Follows cuda/Indexing.cu, cuda/Nonzero.cu, cuda/EmbeddingBackwardKernel.cu and TensorAdvancedIndexing.cpp under
aten/src/ATen/native. To add up many values at one place their positions are sorted; a mask is made positions first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from brim.predict.lowering.cuda import cub as cuda_cub
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_INDEX_BYTES = 8
_UNSORTED_ROWS = 3072  # of an embedding, whose gradients are added up without sorting
_ROWS_PER_PART = 10
_OFTEN = 4  # parts of a row on average, and
_FEW_ROWS = 4  # for each multiprocessor, as PyTorch's CUDA build asks its allocator
_MASKS = (torch.bool, torch.uint8)


def _index_put_of(multiprocessors: int) -> Rule:
    def rule(kernel: Kernel) -> None:
        """A mask that takes one value is filled."""
        kernel.emit()
        target, values = kernel.args[0], kernel.arg("values")
        mask = _only_mask(kernel.arg("indices"))
        if mask is None:
            _put(kernel, [index for index in kernel.arg("indices") if index is not None])
        elif values.numel() > 1 and mask.numel():
            count = values.numel() * mask.numel() // max(target.numel(), 1)
            handles: list[int] = []
            _positions(kernel, mask, multiprocessors, _take(kernel, count * mask.dim() * _INDEX_BYTES, handles))
            _put(kernel, [mask.new_empty(count, dtype=torch.int64) for _ in range(mask.dim())])
            kernel.free(handles[0])

    return rule


def _index_of(multiprocessors: int) -> Rule:
    def rule(kernel: Kernel) -> None:
        """Several indices that lie differently once they are broadcast are all made dense."""
        source, mask = kernel.args[0], _only_mask(kernel.arg("indices"))
        handles: list[int] = []
        if mask is not None and source.numel():
            count = kernel.result.numel() * mask.numel() // source.numel()
            _positions(kernel, mask, multiprocessors, _take(kernel, count * mask.dim() * _INDEX_BYTES, handles))
        else:
            _broadcast_indices(kernel)
        kernel.emit()
        for handle in handles:
            kernel.free(handle)

    return rule


def _take(kernel: Kernel, bytes: int, handles: list[int]) -> Callable[[], None]:
    return lambda: handles.append(kernel.temp(bytes))


def _only_mask(indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given_indices = [index for index in indices if index is not None]
    return given_indices[0] if len(given_indices) == 1 and given_indices[0].dtype in _MASKS else None


def _broadcast_indices(kernel: Kernel) -> None:
    indices = [index for index in kernel.arg("indices") if index is not None and index.dtype.itemsize > 1]
    if len(indices) < 2:
        return
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    strides = [_broadcast_stride(index, shape) for index in indices]
    if len(set(strides)) == 1:
        return
    dense = torch._prims_common.make_contiguous_strides_for(shape)
    for index, stride in zip(indices, strides, strict=True):
        if any(own != wanted and size > 1 for own, wanted, size in zip(stride, dense, shape, strict=True)):
            kernel.temp(prod(shape) * index.element_size())


def _broadcast_stride(index: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    missing = len(shape) - index.dim()
    own = zip(index.shape, index.stride(), shape[missing:], strict=True)
    return (*(0 for _ in range(missing)), *(0 if size == 1 != wanted else step for size, step, wanted in own))


def _put(kernel: Kernel, indices: Sequence[torch.Tensor]) -> None:
    """``index_put_with_sort_kernel``, where values are added up."""
    target, values = kernel.args[0], kernel.arg("values")
    if not kernel.arg("accumulate") or not indices or any(index.dtype in _MASKS for index in indices):
        return
    count = prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    if not count or not target.numel():
        return
    if not _unsafe(kernel):
        for index in indices:  # the smallest and the largest index are looked at
            _checked(kernel, index.element_size())
    linear = _linear(kernel, len(indices), count)
    dims = _dims(kernel.arg("indices"), len(indices))
    before = prod(target.shape[: dims[0]]) if _adjacent(dims) else 1
    slices = prod(size for dim, size in enumerate(target.shape) if dim not in dims) // before
    wide = values.element_size() * count * before * slices
    temporaries = [] if values.is_contiguous() and nbytes(values) == wide else [kernel.temp(wide)]
    if not _adjacent(dims) or not target.is_contiguous():
        temporaries.append(kernel.temp(nbytes(target)))
    ordered = [kernel.temp(count * _INDEX_BYTES) for _ in range(3)]  # sorted, where each was, and a range
    bits = cuda_cub.bits_of(prod(target.size(dim) for dim in dims))
    kernel.free(kernel.temp(cuda_cub.sort_bytes(count, _INDEX_BYTES, _INDEX_BYTES, bits)))
    for handle in (*reversed(ordered), *reversed(temporaries), linear):
        kernel.free(handle)


def _unsafe(kernel: Kernel) -> bool:
    """Return True if indices are known to be within bounds: formulas of backward passes say so."""
    if kernel.func is _aten._unsafe_index_put.default:  # it says so of its name alone
        return False
    named = any(argument.name == "unsafe" for argument in kernel.func._schema.arguments)
    return bool(kernel.arg("unsafe")) if named else torch._C._current_graph_task_id() != -1


def _checked(kernel: Kernel, item_bytes: int) -> None:
    ends = [kernel.temp(item_bytes) for _ in range(2)]
    for _ in ends:
        kernel.free(kernel.temp(1))
    for handle in ends:
        kernel.free(handle)


def _linear(kernel: Kernel, indices: int, count: int) -> int:
    """Positions in the target's memory: each index is wrapped, and multiplied by what a step of it is."""
    combined = -1
    for number in range(indices):
        wrapped = kernel.temp(count * _INDEX_BYTES)
        scaled = kernel.temp(count * _INDEX_BYTES)
        kernel.free(wrapped)
        if number:
            kernel.free(scaled)
        else:
            combined = scaled
    return combined


def _dims(indices: Sequence[torch.Tensor | None], count: int) -> list[int]:
    """Return the indexed dimensions; a mask takes as many as it has."""
    first = [dim for dim, index in enumerate(indices) if index is not None]
    return first if len(first) == count else list(range(first[0], first[0] + count))


def _adjacent(dims: Sequence[int]) -> bool:
    return dims[-1] - dims[0] + 1 == len(dims)


def _nonzero_of(multiprocessors: int) -> Rule:
    def rule(kernel: Kernel) -> None:
        """How many there are is counted, then where they are is written down."""
        _positions(kernel, kernel.arg("self"), multiprocessors, kernel.emit)

    return rule


def _positions(kernel: Kernel, source: torch.Tensor, multiprocessors: int, write: Callable[[], None]) -> None:
    """Take the temporaries of ``nonzero``; ``write`` allocates its result."""
    dense = kernel.temp(0 if source.is_contiguous() else source.numel() * source.element_size())
    number = kernel.temp(4)
    kernel.free(kernel.temp(cuda_cub.count_bytes(source.numel(), multiprocessors)))
    write()
    if source.dim():
        kernel.free(kernel.temp(cuda_cub.select_bytes(source.numel())))
    kernel.free(number)
    kernel.free(dense)


def _embedding(kernel: Kernel) -> None:
    """Embedding.cpp: rows are selected by indices in one dimension."""
    kernel.contiguous(kernel.arg("indices"))
    kernel.emit()


def _embedding_backward(kernel: Kernel, multiprocessors: int) -> None:
    """Above 3,072 indices are sorted, and gradients of one row are summed in parts of ten."""
    gradient, indices, rows = kernel.args[0], kernel.args[1], kernel.args[2]
    dense = None if gradient.is_contiguous() else kernel.temp(nbytes(gradient))
    kernel.contiguous(indices)
    if indices.numel() <= _UNSORTED_ROWS and not kernel.arg("scale_grad_by_freq"):
        kernel.emit()
        return
    few = rows < _FEW_ROWS * multiprocessors
    _sorted_embedding_backward(kernel, gradient, indices, rows, added_directly=few)
    if dense is not None:
        kernel.free(dense)


def _sorted_embedding_backward(
    kernel: Kernel, gradient: torch.Tensor, indices: torch.Tensor, rows: int, *, added_directly: bool
) -> None:
    """``added_directly``: whether parts of rows that are read often go to their rows, not to memory."""
    count, width, bytes = indices.numel(), gradient.size(-1), indices.element_size()
    sorted_indices, places, order = (kernel.temp(count * bytes) for _ in range(3))
    kernel.free(kernel.temp(cuda_cub.sort_bytes(count, bytes, bytes, cuda_cub.bits_of(rows))))
    kernel.free(order)
    times = None
    if kernel.arg("scale_grad_by_freq"):  # how often each row is read, scanned forwards and backwards
        times = kernel.temp(count * bytes)
        for _ in range(2):
            kernel.free(kernel.temp(cuda_cub.scan_by_key_bytes(count, bytes)))
    kernel.emit()
    begins, number, seen = kernel.temp(count * bytes), kernel.temp(8), kernel.temp(count * bytes)
    kernel.free(kernel.temp(cuda_cub.unique_by_key_bytes(count, bytes)))
    kernel.free(seen)
    segments = min(count, rows)
    parts, firsts = kernel.temp(segments * bytes), kernel.temp(segments * bytes)
    kernel.free(kernel.temp(cuda_cub.scan_bytes(segments, bytes)))
    total, most = kernel.temp(8), count // _ROWS_PER_PART + segments
    # Where a row is read often, parts are added to it directly, by where each belongs; in float32.
    often = added_directly and most > _OFTEN * rows
    temporaries = [kernel.temp(most * bytes), kernel.temp(most * (bytes if often else width * 4))]
    if often and gradient.element_size() < 4:
        temporaries.append(kernel.temp(rows * width * 4))
    for handle in (*reversed(temporaries), total, firsts, parts, number, begins, places, sorted_indices):
        kernel.free(handle)
    if times is not None:
        kernel.free(times)


def rules(multiprocessors: int) -> dict[torch._ops.OpOverload, Rule]:
    return {
        _aten.index.Tensor: _index_of(multiprocessors),
        _aten._unsafe_index.Tensor: _index_of(multiprocessors),
        _aten._unsafe_index_put.default: _index_put_of(multiprocessors),
        _aten.index_put_.default: _index_put_of(multiprocessors),
        _aten.index_put.default: _index_put_of(multiprocessors),
        _aten._index_put_impl_.default: _index_put_of(multiprocessors),
        _aten.nonzero.default: _nonzero_of(multiprocessors),
    }


def embeddings(multiprocessors: int) -> dict[torch._ops.OpOverload, Rule]:
    return {
        _aten.embedding.default: _embedding,
        _aten.embedding_dense_backward.default: lambda kernel: _embedding_backward(kernel, multiprocessors),
    }
