"""Workspaces of reductions on CUDA (aten/src/ATen/native/cuda/Reduce.cuh).

Where few outputs have many inputs each, several blocks of threads work on one output. They write partial results to
global memory, with a counter for each output block. The number of blocks follows from the GPU's multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import torch

from brim.core.trace import Reduction
from brim.predict.lowering.cuda.build_answers import ask
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_MOST_THREADS, _WARP, _VECTOR = 512, 32, 4
_CONVERTS = (_aten.sum, _aten.prod, _aten.mean)  # make_reduction: other types than floats are converted first
_COUNTS, _TRUTHS = (_aten.count_nonzero,), (_aten.any, _aten.all)
_KNOWN_IN_PARTS = (_aten.sum, _aten.mean, _aten.max, _aten.min, _aten.amax, _aten.amin, _aten.argmax, _aten.argmin)
_MOST_INDEXED_BYTES = (1 << 31) - 1
_LARGEST_BYTES = 1 << 42  # no GPU holds a larger tensor, so its parts need not all be listed
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread
# Multiprocessors of the largest common card of each capability, and threads of each.
_MULTIPROCESSORS = {(7, 0): (80, 2048), (7, 5): (40, 1024), (8, 0): (108, 2048), (8, 6): (84, 1536),
                    (8, 9): (142, 1536), (9, 0): (132, 2048), (10, 0): (148, 2048), (12, 0): (170, 1536)}  # fmt: skip


@cache
def workspace_bytes(reduction: Reduction) -> int:
    """Bytes of the partial results, or of the counters, by ``setReduceConfig``; 0 where one block is enough."""
    reduced, outer = reduction.reduced, reduction.outer
    inputs, outputs = prod(size for size, _ in reduced), prod(size for size, _ in outer)
    if not reduced or not inputs or not outputs:
        return 0
    fastest = not outer or reduced[0][1] < outer[0][1]
    first, second = (inputs, outputs) if fastest else (outputs, inputs)
    vector = 1
    if fastest and reduced[0][1] == 1 and first > 128 and len(reduced) + len(outer) == 1:
        first //= _VECTOR
    elif not fastest and outer[0][1] == 1:
        vector = _output_vector(outer, reduced)
        first //= vector
    most = _MOST_THREADS // vector
    width, height = min(_power(first, most), _WARP), 0
    height = min(_power(second, most), most // width)
    width = min(_power(first, most), most // height)
    step_input, step_output = (width, 1) if fastest else (1, width)
    across_warps = -(-inputs // step_input) >= min(height * _LEAST_VALUES, _MOST_VALUES)
    if not across_warps:
        return 0
    step_input *= height
    grid = -(-(outputs // vector) // step_output)
    values = -(-inputs // step_input)
    target = reduction.multiprocessors * (reduction.threads // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if blocks <= 1:
        return 0
    if reduction.counters:
        return 4 * grid
    size = reduction.part_bytes * outputs * blocks
    return size if fastest else size * width * vector


def _joined(shape: tuple[int, ...], stride: tuple[int, ...], dims: list[int]) -> tuple[tuple[int, int], ...]:
    """Dimensions as in TensorIterator: from the smallest stride up, adjacent ones joined."""
    dimensions: list[tuple[int, int]] = []
    for size, step in sorted(((shape[d], stride[d]) for d in dims if shape[d] != 1), key=lambda pair: pair[1]):
        if dimensions and dimensions[-1][0] * dimensions[-1][1] == step:
            dimensions[-1] = (dimensions[-1][0] * size, dimensions[-1][1])
        else:
            dimensions.append((size, step))
    return tuple(dimensions)


def _output_vector(outputs: tuple[tuple[int, int], ...], reduced: tuple[tuple[int, int], ...]) -> int:
    vector = _VECTOR
    for number in (outputs[0][0], *(step for _, step in (*reduced, *outputs[1:]))):
        while number % vector:
            vector //= 2
    return vector


def _power(number: int, most: int) -> int:
    """The largest power of two up to ``number``, at most ``most``."""
    return most if number >= most else 1 << (max(number, 1).bit_length() - 1)


def _part_bytes(kernel: Kernel, dtype: torch.dtype) -> int:
    packet = kernel.func.overloadpacket
    if packet in (_aten.argmax, _aten.argmin):
        return 16  # the value and its position
    if packet in (_aten.max, _aten.min) and len(kernel.outputs) > 1:
        return 16
    if packet in (_aten.var, _aten.std, _aten.var_mean, _aten.std_mean):
        return 16  # mean, squares, and two counts
    exact = dtype.is_floating_point and packet not in (_aten.amax, _aten.amin)
    return max(dtype.itemsize, 4) if exact else dtype.itemsize


def multiprocessors_of(capability: tuple[int, int]) -> tuple[int, int]:
    """The GPU's number of multiprocessors, and of threads of each."""
    return _MULTIPROCESSORS.get(capability, (108, 2048))


def take_workspaces(kernel: Kernel, source: torch.Tensor, dims: Sequence[int], part_bytes: int) -> None:
    """Take and free the partial results and the counters of a reduction over ``dims``."""
    multiprocessors, threads = multiprocessors_of(kernel.capability)
    shape, stride = tuple(source.shape), tuple(source.stride())
    parts = Reduction(
        reduced=_joined(shape, stride, [d for d in range(len(shape)) if d in dims]),
        outer=_joined(shape, stride, [d for d in range(len(shape)) if d not in dims]),
        part_bytes=part_bytes, multiprocessors=multiprocessors, threads=threads, counters=False,
    )  # fmt: skip
    too_large = _last_byte(zip(shape, stride, strict=True), source) > _LARGEST_BYTES
    for part in _indexed_parts(parts, source, set() if too_large else None) if parts.reduced else ():
        counters = replace(part, counters=True)
        # How many parts there are depends on the size, so they are not followed to another.
        take = kernel.workspace if part is parts else lambda bytes, _: kernel.temp(bytes)
        workspace = take(workspace_bytes(part), part)
        kernel.free(take(workspace_bytes(counters), counters), workspace)


def _reduce(kernel: Kernel) -> None:
    """Follow the workspace to other sizes. TensorIterator cuts what 32 bits cannot index into parts, each with a
    workspace of its own; what the result's dtype cannot hold is added up in a buffer."""
    source, packet = kernel.args[0], kernel.func.overloadpacket
    in_parts = _last_byte(zip(source.shape, source.stride(), strict=True), source) > _MOST_INDEXED_BYTES
    if in_parts and ask(kernel):
        return
    if packet in _COUNTS and source.dtype is not torch.bool:  # TensorAdvancedIndexing.cpp sums booleans
        kernel.temp(source.numel())
    kernel.emit()
    if packet in _TRUTHS and source.numel() == 1 and source.dtype is not torch.bool:
        kernel.temp(1)  # ReduceOps.cpp: nothing to reduce, it is converted
    asked_dtype = torch.int64 if packet in _COUNTS else kernel.kwargs.get("dtype")
    dtype = asked_dtype or source.dtype
    if packet in (_aten.sum, _aten.prod) and not source.dtype.is_floating_point:
        dtype = asked_dtype or torch.int64
    converts = packet in _CONVERTS and dtype != source.dtype and not source.dtype.is_floating_point
    copy = kernel.temp(source.numel() * dtype.itemsize if converts or packet in _COUNTS else 0)
    if kernel.func in _READ_DENSE:
        kernel.contiguous(source)
    part_bytes, results = _part_bytes(kernel, dtype), kernel.outputs
    if in_parts:
        reads_it = not (converts or (kernel.func in _READ_DENSE and not source.is_contiguous()))
        if not (reads_it and packet in _KNOWN_IN_PARTS and all(nbytes(r) <= _MOST_INDEXED_BYTES for r in results)):
            kernel.name()
        kernel.temp(sum(r.numel() * part_bytes for r in results[:1] if r.element_size() != part_bytes))
    take_workspaces(kernel, source, _dimensions(kernel, source.dim()), part_bytes)
    kernel.free(copy)


def _last_byte(dimensions: Iterable[tuple[int, int]], source: torch.Tensor) -> int:
    """Position of the last element's first byte, from 1; 32 bits index to 2^31 - 1 (``can_use_32bit_indexing``)."""
    return 1 + source.element_size() * sum((size - 1) * step for size, step in dimensions)


def _indexed_parts(reduction: Reduction, source: torch.Tensor, walked: set[Reduction] | None) -> Iterator[Reduction]:
    """``SplitUntil32Bit``: the dimension of the largest extent is halved until 32 bits are enough.

    With ``walked`` equal parts come once: each frees its workspace before the next takes one, the peak is the same.
    """
    if walked is not None:
        if reduction in walked:
            return
        walked.add(reduction)
    dimensions, count = [*reduction.reduced, *reduction.outer], len(reduction.reduced)
    if _last_byte(dimensions, source) <= _MOST_INDEXED_BYTES:
        yield reduction
        return
    at = max(reversed(range(len(dimensions))), key=lambda at: (dimensions[at][0] - 1) * dimensions[at][1])
    size, step = dimensions[at]
    for part in (size // 2, size - size // 2):
        dimensions[at] = part, step
        smaller = replace(reduction, reduced=tuple(dimensions[:count]), outer=tuple(dimensions[count:]))
        yield from _indexed_parts(smaller, source, walked)


def _dimensions(kernel: Kernel, count: int) -> tuple[int, ...]:
    dims = kernel.arg("dim") if any(argument.name == "dim" for argument in kernel.func._schema.arguments) else None
    if dims is None or dims == []:
        return tuple(range(count))
    return tuple(d % max(count, 1) for d in ([dims] if isinstance(dims, int) else dims))


_READ_DENSE = (_aten.max.default, _aten.min.default)  # TensorCompare.cpp
RULES: dict[torch._ops.OpOverload, Rule] = {
    getattr(packet, overload): _reduce
    for packet, overloads in {
        _aten.sum: "default dim_IntList", _aten.mean: "default dim", _aten.prod: "default dim_int",
        _aten.amax: "default", _aten.amin: "default", _aten.max: "default dim", _aten.min: "default dim",
        _aten.argmax: "default", _aten.argmin: "default", _aten.any: "default dim", _aten.all: "default dim",
        _aten.linalg_vector_norm: "default", _aten.var: "correction", _aten.std: "correction",
        _aten.var_mean: "correction", _aten.count_nonzero: "default dim_IntList",
    }.items()
    for overload in overloads.split()
}  # fmt: skip
