"""Temporaries of indexing and sorting on CUDA.

Follows cuda/Indexing.cu, cuda/Nonzero.cu, cuda/EmbeddingBackwardKernel.cu, cuda/Sort.cpp, cuda/SortStable.cu,
cuda/TensorTopK.cu and TensorAdvancedIndexing.cpp under aten/src/ATen/native. To add up many values at one place their
positions are sorted; a mask is made positions first.

The device-wide algorithms of CUB ask for temporary storage (cub/device/dispatch). Each reads its input in tiles.
Sorting by radix has passes of eight bits; where there are several it writes to a second copy of keys and values.
Everything lies at multiples of 256 bytes, and 255 more are asked for to find the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import ceil, prod

import torch
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

from brim.predict.lowering.cuda.build_answers import ask
from brim.predict.lowering.cuda.reductions import multiprocessors_of
from brim.predict.lowering.kernel import Kernel, Rule, contiguous_before, nbytes

_aten = torch.ops.aten
_INDEX_BYTES = 8
_UNSORTED_ROWS = 3072  # of an embedding, whose gradients are added up without sorting
_ROWS_PER_PART = 10
_OFTEN = 4  # parts of a row on average, and
_FEW_ROWS = 4  # for each multiprocessor, as PyTorch's CUDA build asks its allocator
_SMALL_ROW = 4096  # Sort.cu, should_use_small_sort: rows up to this are sorted in place
_LONG_ROW = 1_000_000
_FEW_SORTED_ROWS = 128
_MASKS = (torch.bool, torch.uint8)
_ALIGNMENT = 256
_SLACK = 255
_DIGITS = 256
_LARGEST_SINGLE_TILE = 256 * 19 * 4  # bytes of keys or values, whichever are wider, that one block of threads sorts
_REDUCED_BY_ONE_BLOCK = 4096
_BLOCKS_PER_MULTIPROCESSOR = 5 * 8  # of a reduction in two steps
_SELECTED_PER_TILE = 4096
# TensorTopK.cu, should_use_multiblock: up to so many rows, the shortest that several blocks of threads look through.
_LONG_ROWS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
_LONG_ROW_OF_MANY = 400
_SCANNED_BY_KEY_PER_TILE = {(8, 0): 256 * 15, (9, 0): 448 * 9, (10, 0): 448 * 10, (12, 0): 448 * 10}
_DIGIT_BLOCKS = 6  # of a multiprocessor, by their registers


def _aligned(bytes: int) -> int:
    return ceil(bytes / _ALIGNMENT) * _ALIGNMENT


def sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int) -> int:
    """``DeviceRadixSort`` of keys, with values where ``value_bytes`` is not 0, by their lowest ``bits``."""
    if count <= max(_LARGEST_SINGLE_TILE // max(key_bytes, value_bytes, 4) // 256, 1) * 256:
        return 1
    passes = ceil(bits / 8)
    tiles = ceil(count / _sorted_per_tile(key_bytes, value_bytes))
    total_bytes = _aligned(passes * _DIGITS * 8) + _aligned(tiles * _DIGITS * 4) + _aligned(passes * 4)
    if passes > 1:
        total_bytes += _aligned(count * key_bytes) + _aligned(count * value_bytes)
    return total_bytes + _SLACK


def merge_sort_bytes(count: int) -> int:
    """``DeviceMergeSort`` of keys and values of 8 bytes, which Thrust takes where it is given a comparison: second
    copies, and where each tile's part of the other begins."""
    parts = _aligned((ceil(count / (256 * 8)) + 1) * 8)
    return 2 * _aligned(count * 8) + parts + _SLACK


def segmented_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceSegmentedRadixSort``: second copies."""
    return _aligned(count * key_bytes) + _aligned(count * value_bytes) + _SLACK


def _sorted_per_tile(key_bytes: int, value_bytes: int) -> int:
    if key_bytes <= 2:
        return 512 * 11
    if not value_bytes:
        return 384 * 15
    if key_bytes == 8:
        return 384 * 12
    return 384 * (14 if value_bytes == 8 else 17)


def scan_bytes(count: int, item_bytes: int, *, in_words: bool = True) -> int:
    """``DeviceScan``: the state of every tile, and 32 more: a word each or, of types that C++ lacks, three parts."""
    tiles = ceil(count / (128 * min(60 // item_bytes, 30))) + 32
    words = _aligned(tiles * max(2 * item_bytes, 4))
    return (words if in_words else _aligned(tiles * 4) + 2 * _aligned(tiles * item_bytes)) + _ALIGNMENT + _SLACK


def unique_by_key_bytes(count: int, item_bytes: int) -> int:
    """``DeviceSelect::UniqueByKey``: the state of every tile, and 32 more."""
    tile = 448 * 11 if item_bytes == 8 else 512 * 14
    return _aligned((ceil(count / tile) + 32) * 16) + _ALIGNMENT + _SLACK


def thrust_unique_by_key_bytes(count: int) -> int:
    """``thrust::unique_by_key`` of 64-bit keys: of every tile whether it is done, its sum and the one up to it."""
    tiles = ceil(count / (448 * 11)) + 32
    return _aligned(tiles * 4) + 2 * _aligned(tiles * 8) + _SLACK


def scan_by_key_bytes(count: int, capability: tuple[int, int]) -> int:
    """``DeviceScan::InclusiveSumByKey`` of 32-bit numbers: the state of every tile, and 32 more, and its last key."""
    tiles = ceil(count / _SCANNED_BY_KEY_PER_TILE.get(capability, 256 * 9))
    return _aligned((tiles + 32) * 16) + _aligned((tiles + 1) * 4) + _SLACK


def select_bytes(count: int) -> int:
    """``DeviceSelect``."""
    return _aligned((ceil(count / _SELECTED_PER_TILE) + 32) * 8) + _ALIGNMENT + _SLACK


def count_bytes(count: int, multiprocessors: int) -> int:
    """``DeviceReduce`` that counts in 32 bits."""
    if count <= _REDUCED_BY_ONE_BLOCK:
        return 1
    return _aligned(multiprocessors * _BLOCKS_PER_MULTIPROCESSOR * 4) + _SLACK


def bits_of(number: int) -> int:
    """How many bits numbers up to this one have (cuda::get_num_bits)."""
    return max(number.bit_length(), 1)


def _index_put(kernel: Kernel) -> None:
    """A mask that takes one value is filled."""
    kernel.emit()
    target, values, indices = kernel.args[0], kernel.arg("values"), kernel.arg("indices")
    mask = _only_mask(indices)
    if mask is None:
        _add_up(kernel, indices)
    elif values.numel() > 1 and mask.numel():
        count = values.numel() * mask.numel() // max(target.numel(), 1)
        places = _places_of(kernel, mask, count)
        before = takewhile(lambda index: index is None, indices)
        _add_up(kernel, [*before, *(mask.new_empty(count, dtype=torch.int64) for _ in range(mask.dim()))])
        kernel.free(places)


def _index(kernel: Kernel) -> None:
    """Several indices that lie differently once they are broadcast are all made dense."""
    source, mask = kernel.args[0], _only_mask(kernel.arg("indices"))
    if mask is not None and source.numel():
        places = _places_of(kernel, mask, kernel.result.numel() * mask.numel() // source.numel())
        kernel.emit()
        kernel.free(places)
        return
    indices = [index for index in kernel.arg("indices") if index is not None and index.dtype not in _MASKS]
    broadcast = torch.broadcast_tensors(*indices) if indices else ()
    if len({index.stride() for index in broadcast}) > 1:
        for index in broadcast:
            kernel.contiguous(index)
    kernel.emit()


def _only_mask(indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given_indices = [index for index in indices if index is not None]
    return given_indices[0] if len(given_indices) == 1 and given_indices[0].dtype in _MASKS else None


def _add_up(kernel: Kernel, indices: Sequence[torch.Tensor | None]) -> None:
    """``index_put_with_sort_kernel``, where values are added up."""
    target, values = kernel.args[0], kernel.arg("values")
    given_indices = [index for index in indices if index is not None]
    if not kernel.arg("accumulate") or not given_indices:
        return
    masked = any(index.dtype in _MASKS for index in given_indices)
    call = (target, indices, values, True, _unsafe(kernel))
    if not masked and ask(kernel, _aten._index_put_impl_.default, call):
        return
    if masked:
        kernel.name()
        return
    count = prod(torch.broadcast_shapes(*(index.shape for index in given_indices)))
    if not count or not target.numel():
        return
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    indexed, adjacent = prod(target.size(dim) for dim in dims), dims[-1] - dims[0] < len(dims)
    linear = kernel.temp(count * _INDEX_BYTES)  # positions in the target's memory
    wide = values.element_size() * count * (target.numel() // indexed)
    temporaries = [kernel.temp(0 if values.is_contiguous() and nbytes(values) == wide else wide)]
    temporaries.append(kernel.temp(0 if adjacent and target.is_contiguous() else nbytes(target)))
    temporaries += [kernel.temp(count * _INDEX_BYTES) for _ in range(3)]  # sorted, where each was, and a range
    steps = prod(target.shape[: dims[-1] + 1]) if adjacent else indexed  # that positions count
    kernel.passing(sort_bytes(count, _INDEX_BYTES, _INDEX_BYTES, bits_of(steps)))
    kernel.free(*reversed(temporaries), linear)


def _unsafe(kernel: Kernel) -> bool:
    """Return True if indices are known to be within bounds: formulas of backward passes say so."""
    if kernel.func is _aten._unsafe_index_put.default:  # it says so of its name alone
        return False
    named = any(argument.name == "unsafe" for argument in kernel.func._schema.arguments)
    return bool(kernel.arg("unsafe")) if named else torch._C._current_graph_task_id() != -1


def _places_of(kernel: Kernel, mask: torch.Tensor, count: int) -> int:
    """Make ``count`` places of a mask; returns the handle of their positions."""
    places: list[int] = []
    _positions(kernel, mask, lambda: places.append(kernel.temp(count * mask.dim() * _INDEX_BYTES)))
    return places[0]


def _nonzero(kernel: Kernel) -> None:
    """Their number is counted, then their positions are written."""
    _positions(kernel, kernel.arg("self"), kernel.emit)


def _positions(kernel: Kernel, source: torch.Tensor, write: Callable[[], None]) -> None:
    """Take the temporaries of ``nonzero``; ``write`` allocates its result."""
    dense, number = kernel.contiguous(source), kernel.temp(4)
    kernel.passing(count_bytes(source.numel(), multiprocessors_of(kernel.capability)[0]))
    write()
    if source.dim():
        kernel.passing(select_bytes(source.numel()))
    kernel.free(number, dense)


def _embedding_backward(kernel: Kernel) -> None:
    """Above 3,072 indices are sorted, and gradients of one row are summed in parts of ten."""
    gradient, indices, rows = kernel.args[:3]
    if kernel.arg("scale_grad_by_freq"):
        kernel.name()
        return
    dense = kernel.contiguous(gradient)
    kernel.contiguous(indices)
    if indices.numel() <= _UNSORTED_ROWS:
        kernel.emit()
        return
    count, width, bytes = indices.numel(), gradient.size(-1), indices.element_size()
    sorted_indices, places, order = (kernel.temp(count * bytes) for _ in range(3))
    kernel.passing(sort_bytes(count, bytes, bytes, bits_of(rows)))
    kernel.free(order)
    kernel.emit()
    begins, number, seen = kernel.temp(count * bytes), kernel.temp(8), kernel.temp(count * bytes)
    kernel.passing(unique_by_key_bytes(count, bytes))
    kernel.free(seen)
    segments = min(count, rows)
    parts, firsts = kernel.temp(segments * bytes), kernel.temp(segments * bytes)
    kernel.passing(scan_bytes(segments, bytes))
    total, most = kernel.temp(8), count // _ROWS_PER_PART + segments
    # Where a row of few is read often, parts are added to it directly, by where each belongs; in float32.
    often = rows < _FEW_ROWS * multiprocessors_of(kernel.capability)[0] and most > _OFTEN * rows
    temporaries = [kernel.temp(most * bytes), kernel.temp(most * (bytes if often else width * 4))]
    if often and gradient.element_size() < 4:
        temporaries.append(kernel.temp(rows * width * 4))
    kernel.free(*reversed(temporaries), total, firsts, parts, number, begins, places, sorted_indices, dense)


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
        kernel.temp(sort_bytes(row, key_bytes, _INDEX_BYTES, bits))
    elif rows < _FEW_SORTED_ROWS:  # all as one by value, then by row
        for _ in range(2):
            kernel.temp(count * _INDEX_BYTES)
        by_value = kernel.temp(count * key_bytes)
        kernel.passing(sort_bytes(count, key_bytes, _INDEX_BYTES, bits))
        kernel.free(by_value)
        kernel.temp(sort_bytes(count, _INDEX_BYTES, 0, bits_of(rows)))
    else:  # row by row in one launch
        kernel.temp(count * _INDEX_BYTES)
        kernel.temp(segmented_sort_bytes(count, key_bytes, _INDEX_BYTES))


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
        kernel.temp(scan_bytes(source.numel(), dtype.itemsize, in_words=in_words))


def _topk(kernel: Kernel) -> None:
    """cuda/TensorTopK.cu, ``mbtopk``: several blocks of threads look through a long row, digit by digit."""
    source, count, dim = kernel.arg("self"), kernel.arg("k"), kernel.arg("dim")
    kernel.emit()
    kernel.contiguous(source)
    if not source.dim() or not source.numel() or not count:
        return
    row = source.size(dim)
    rows = source.numel() // row
    if kernel.arg("sorted") and count > _SMALL_ROW:
        kernel.name()
    if row < next((least for most, least in _LONG_ROWS if rows <= most), _LONG_ROW_OF_MANY):
        return
    threads = multiprocessors_of(kernel.capability)[0] * _DIGIT_BLOCKS * _DIGITS
    blocks = rows * ceil(row / (_DIGITS * max(4, min(ceil(source.numel() / threads), 64))))
    size = source.element_size()
    for bytes in (size * rows, 8 * rows, 2 * max(size, 4) * rows, 2 * _DIGITS * blocks, 4 * _DIGITS * rows):
        kernel.temp(bytes)
    for _ in range(2):
        kernel.temp(4 * blocks)
    for _ in range(2):
        kernel.passing(scan_by_key_bytes(blocks, kernel.capability))


# Values decide how many places a mask has: nobody can be asked for the whole kernel.
RULES: dict[OpOverload, Rule] = {
    _aten.index.Tensor: _index,
    _aten._unsafe_index.Tensor: _index,
    _aten._unsafe_index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten.index_put.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
    _aten.nonzero.default: _nonzero,
}
ASKED: dict[OpOverload, Rule] = {
    _aten.sort.default: _sort,
    _aten.sort.stable: _sort,
    _aten.topk.default: _topk,
    _aten.cumsum.default: _scan,
    _aten.cumprod.default: _scan,
    _aten.embedding.default: contiguous_before("indices"),
    _aten.embedding_dense_backward.default: _embedding_backward,
}
