"""Scratchpads of oneDNN's convolutions of bfloat16 on a CPU with AVX-512.

Follows ``init_conf`` and ``init_scratchpad`` of jit_avx512_core_bf16_conv_kernel.cpp, of its neighbour for 1x1 and of
jit_uni_dw_conv_kernel_utils.cpp. Sums are of float32 and rounded at the end; for the gradient of the weight pairs of
points of both operands are brought beside each other first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from brim.predict.lowering.cpu_convolution_avx512 import (
    ALIGN_BYTES,
    BLOCK,
    PAGE_BYTES,
    Parts,
    best_divider,
    candidates,
)
from brim.predict.lowering.cpu_convolution_direct import Direct
from brim.predict.lowering.cpu_convolution_shape import padded

_ITEM_BYTES = 2
_SPLIT = 14  # rows and columns above which pairs are made in registers for a 1x1 weight
_FULL_ROWS_BYTES = 48 * 1024  # of both operands, up to which images are summed whole
_FULL_ROWS_CHANNELS = 128


def _booked(*sizes: int) -> int:
    return sum(size + ALIGN_BYTES for size in sizes if size)


def _barriers(count: int) -> int:
    return (count + 1) * PAGE_BYTES if count else 0


def forward_scratchpad_bytes(direct: Direct, *, has_bias: bool) -> int:
    bias = padded(direct.outputs, BLOCK) * _ITEM_BYTES if has_bias and direct.outputs % BLOCK else 0
    if direct.depthwise:
        return 0
    if not direct.pointwise:
        return _booked(bias)
    return _booked(bias, _strided_source(direct, padded(direct.inputs, BLOCK)), _stored(direct, direct.outputs))


def source_scratchpad_bytes(direct: Direct) -> int:
    """Of the gradient of the source."""
    return _booked(_stored(direct, direct.inputs)) if direct.pointwise and max(direct.stride) == 1 else 0


def _points(direct: Direct) -> int:
    return direct.result[0] * direct.result[1] * direct.result[2]


def _strided_source(direct: Direct, channels: int) -> int:
    """The source of a strided 1x1 convolution without the points left out, for every thread."""
    return torch.get_num_threads() * channels * _points(direct) * _ITEM_BYTES if max(direct.stride) > 1 else 0


def _stored(direct: Direct, channels: int) -> int:
    """Sums of a 1x1 convolution before they are rounded: ``key_conv_store_wsp``."""
    threads, points = torch.get_num_threads(), _points(direct)
    line = _line(direct, padded(channels, BLOCK), points)
    least = -(-threads // (direct.batch * -(-points // line)))
    groups = best_divider(threads, least, 2 * least, largest=False)
    groups = -(-threads // -(-threads // groups))
    return threads * padded(points, line) * padded(-(-padded(channels, BLOCK) // groups), BLOCK) * 4


def _line(direct: Direct, channels: int, points: int) -> int:
    """Points that a 1x1 kernel keeps in registers."""
    rows = direct.result[0] * direct.result[1]
    most, least = (9, 6) if 8 * direct.batch >= torch.get_num_threads() else (30, 9)
    if most == 9 and 128 < channels < 256 and 10 < rows < 28:
        most, least = 6, 5
    shared = rows if rows >= _SPLIT else points
    for line in range(most, least - 1, -1):
        if shared % line == 0:
            return line
    line, left = min(most, points), points % most
    for tried in range(most, least - 1, -1):
        if points % tried > left or points % tried == 0:
            line, left = tried, points % tried
            if left == 0:
                break
    return line


def weight_scratchpad_bytes(direct: Direct, *, has_bias: bool) -> int:
    if direct.depthwise:
        channels, threads = padded(direct.groups, BLOCK), torch.get_num_threads()
        images = min(max(1, threads // min(channels // BLOCK, threads)), direct.batch)
        bias = channels * (images - 1) * 4 if has_bias else 0
        return _booked(channels * direct.window * images * 4, bias)
    if direct.pointwise:
        return _pointwise_weight(direct, has_bias=has_bias)
    return _weight(direct, has_bias=has_bias)


def _pointwise_weight(direct: Direct, *, has_bias: bool) -> int:
    inputs, outputs = padded(direct.inputs, BLOCK), padded(direct.outputs, BLOCK)
    (_, rows, width), points = direct.result, _points(direct)
    in_registers = rows > _SPLIT and width > _SPLIT and (direct.rank < 3 or outputs <= 64)
    reduced = best_divider(
        points, 7 if in_registers else 8, min(256, points) if in_registers else 16, largest=True, by=2
    )
    if points % reduced:
        reduced = best_divider(width, 4, width, largest=in_registers, by=2)
    reduced = 1 if reduced > 256 else reduced
    reduced = reduced if in_registers else padded(reduced, 2)
    lines, factor = direct.batch * -(-points // reduced), 4 * max(1, outputs // inputs)

    def memory(parts: Parts) -> int:
        each = -(-lines // parts.images)
        some, other = -(-outputs // BLOCK // parts.outputs), -(-inputs // BLOCK // parts.inputs)
        return each * (other + some) * BLOCK * reduced + factor * some * other * BLOCK * BLOCK

    parts = _least(memory, lines, outputs // BLOCK, inputs // BLOCK, 1, direct.batch)
    sums = (inputs * outputs + (outputs if has_bias else 0)) * parts.images * 4
    bias = outputs * _ITEM_BYTES if has_bias and direct.outputs % BLOCK else 0
    left = best_divider(inputs // BLOCK, 5, inputs // BLOCK, largest=False) * BLOCK
    right = best_divider(outputs // BLOCK, 16, outputs // BLOCK, largest=False) * BLOCK
    strided = parts.all * left * points * _ITEM_BYTES if max(direct.stride) > 1 else 0
    pairs = 0 if in_registers else parts.all * padded(points, 2) * _ITEM_BYTES
    return _booked(sums, bias, strided, pairs * left, pairs * right) + _barriers(1 if parts.images > 1 else 0)


def _least(
    memory: Callable[[Parts], float], images: int, outputs: int, inputs: int, groups: int, most_images: int
) -> Parts:
    threads = torch.get_num_threads()
    found = Parts(groups=groups)
    least = memory(found)
    for parts in candidates(threads // groups, images, outputs, inputs, groups):
        if memory(parts) <= least:
            found, least = parts, memory(parts)
    if threads // groups // 2 < found.images < threads // groups:
        return Parts(images=min(most_images, threads), outputs=found.outputs, inputs=found.inputs, groups=groups)
    return found


def _rows_summed(direct: Direct, row: int) -> int:
    """Images, or rows or planes of them, that threads share out."""
    if direct.rank == 3:
        return direct.batch * direct.result[0]
    (_, top, left), (_, high, wide) = direct.before, direct.kernel
    rows = max(1, top, direct.after[1])
    whole = direct.source == direct.result and high > 1 and wide > 1 and max(direct.stride) == 1
    whole = whole and not direct.dilated and left == wide // 2 and top == high // 2 and not direct.narrow
    whole = whole and row * rows <= _FULL_ROWS_BYTES and padded(direct.inputs, BLOCK) >= _FULL_ROWS_CHANNELS
    return direct.batch if whole else direct.batch * direct.result[1]


def _weight(direct: Direct, *, has_bias: bool) -> int:
    threads, groups = torch.get_num_threads(), direct.groups
    block = direct.inputs if direct.narrow else BLOCK
    inputs, outputs = -(-direct.inputs // block), -(-direct.outputs // BLOCK)
    (depth, high, wide), (planes, rows, width), stride = direct.source, direct.result, direct.stride
    guard = padded(max(direct.before[2], max(0, direct.after[2]) + 1), 2)
    by_two = direct.rank == 3 and direct.kernel[2] == 1 and stride[2] == 1 and not direct.narrow
    line = wide if direct.narrow or by_two else padded(-(-wide // stride[2]) + guard, 2) * stride[2]
    result_line = width if by_two else padded(width, 2)
    work = _rows_summed(direct, (block * line + BLOCK * result_line) * _ITEM_BYTES)
    source, result = direct.batch * block * depth * high * line, direct.batch * BLOCK * planes * rows * result_line
    sums = block * BLOCK * direct.window
    scale, ratio = 0.5 * (source * inputs + result * outputs) * 2 / (sums * inputs * outputs * 4), outputs / inputs
    source_factor = max(1 / ratio, 1.0) * (4 if scale < 1 else 1)

    def memory(parts: Parts) -> float:
        share, some, other = -(-work // parts.images), -(-outputs // parts.outputs), -(-inputs // parts.inputs)
        read = source_factor * share * other * source / work / (stride[0] * stride[1] * stride[2])
        return read + max(ratio, 1.0) * share * some * result / work + max(scale, 1.0) * some * other * sums

    if threads < groups:
        parts = Parts(groups=threads)
    else:
        parts = _least(memory, work, outputs, inputs, groups, work)
    total = (groups * outputs * inputs * sums + (groups * outputs * BLOCK if has_bias else 0)) * parts.images * 4
    meetings = _barriers(1)
    if by_two:
        return _booked(total) + meetings
    count = parts.images * groups
    turned = 0 if direct.narrow else count * inputs * line * block * high * depth
    meetings += _barriers(parts.all // parts.outputs if parts.outputs > 1 else 0)
    meetings += _barriers(parts.all // parts.inputs if parts.inputs > 1 else 0)
    of_result = count * outputs * result_line * BLOCK * rows * planes
    return _booked((turned + guard) * _ITEM_BYTES, of_result * _ITEM_BYTES, total) + meetings
