"""Which of oneDNN's kernels of AVX-512 take a convolution of float32, and the scratchpads that they book.

Follows ``init_conf`` and ``init_scratchpad`` of jit_avx512_common_conv_kernel.cpp and of
jit_avx512_common_1x1_conv_kernel.cpp: channels come in blocks of 16 (of 8 or 4 in groups that 16 does not divide),
and where threads share out images or rows each but the first sums the gradient of the weight into a copy of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from brim.predict.lowering.cpu_convolution_direct import Direct
from brim.predict.lowering.cpu_convolution_shape import padded

BLOCK = 16
ALIGN_BYTES = 128  # what oneDNN adds to each piece of a scratchpad to align it
PAGE_BYTES = 4096
_BARRIER_BYTES = 2 * PAGE_BYTES  # where threads meet before they sum: a page, and another to align it
_REGISTERS = 28
_ALL_REGISTERS = 31
_CODE = 256 * 1024 // 15  # instructions of a kernel at most
_WIDEST_OF_WEIGHT = 14
_ROWS = 9  # that a thread sums over at least, where rows are shared out
_USUAL_CACHE_BYTES = {1: 32 * 1024, 2: 512 * 1024}


def _cache_bytes(level: int) -> int:
    name = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE"}[level]
    known = os.sysconf(name) if name in getattr(os, "sysconf_names", ()) else 0
    return known if known > 0 else _USUAL_CACHE_BYTES[level]


def _group_block(direct: Direct) -> int:
    """Channels of a block; 0 where none of the sizes divides those of a group."""
    if direct.groups == 1 or direct.depthwise:
        return BLOCK
    return next((n for n in (BLOCK, 8, 4) if direct.inputs % n == 0 and direct.outputs % n == 0), 0)


def forward_block(direct: Direct) -> int:
    """Channels of a block in the forward kernel; 0 where it does not take the convolution."""
    block = _group_block(direct)
    if not block or direct.depthwise or direct.pointwise:
        return block
    after, extent = direct.after, direct.extent
    if any(reach <= max(*pads) for reach, *pads in zip(extent, direct.before, after, strict=True)):
        return 0
    line, outputs = _forward_line(direct, block)
    tail = direct.result[2] % line
    right = max(0, after[2] - tail * direct.stride[2])
    if direct.before[2] > line or right > line:
        return 0
    inputs = direct.inputs if direct.narrow else block
    parts = 1 + (direct.before[2] > 0) + (after[2] > 0)
    return block if parts * direct.kernel[2] * inputs * outputs * line <= _CODE else 0


def _forward_line(direct: Direct, block: int) -> tuple[int, int]:
    """Points of a row, and blocks of output channels, that a kernel keeps in registers."""
    (_, rows, width), (_, high, wide) = direct.result, direct.kernel
    blocks = -(-direct.outputs // block)
    inputs = direct.inputs if direct.narrow else block
    columns = -(-direct.source[2] // direct.stride[2])
    cached = columns * inputs * high * direct.kernel[0] + width * block * 2 + direct.window * inputs * block * 2
    small = cached * 4 < _cache_bytes(1)
    line = min(width, _REGISTERS)
    channels = padded(direct.inputs, inputs)
    base = wide == 3 and width <= 28 and small
    base = base and not (width == 13 and channels >= 192) and not (width == 28 and channels >= 512)
    unstrided = direct.stride[1] == direct.stride[2] == 1
    few = direct.batch <= 16 and (padded(direct.outputs, block) <= 192 or rows <= 10)
    alone = direct.batch == 1 and (line >= width or direct.narrow or (width <= 147 and direct.outputs <= 96))
    if wide > 3 or (base and (unstrided or few)) or alone:
        pairs = small and width <= 8 and high <= 3 and wide <= 3 and blocks % 2 == 0
        pairs = pairs and (not direct.narrow or direct.batch == 1) and (direct.batch != 1 or line < width)
        return (min(width, _ALL_REGISTERS // 3), 2) if pairs else (line, 1)
    if direct.narrow and direct.batch == 1:
        return line, 1
    best, rating = 1, 0.0
    for count in range(min(blocks, 5), 0, -1):
        if blocks % count == 0:
            rated = _shared(direct, blocks, count, min(width, _ALL_REGISTERS // (count + 1)))
            if rated > 1.05 * rating:
                best, rating = count, rated
    return min(width, _ALL_REGISTERS // (best + 1)), best


def _shared(direct: Direct, blocks: int, count: int, line: int) -> float:
    """How evenly threads share images, rows and blocks of channels."""
    threads = torch.get_num_threads()
    work = direct.batch * direct.result[1] * -(-blocks // count)
    return work / padded(work, threads)


def source_block(direct: Direct) -> int:
    """Channels of a block in the kernel for the gradient of the source; 0 where it does not take the convolution."""
    block = _group_block(direct)
    if not block or direct.depthwise or direct.pointwise:
        return block
    if any(apart > 1 and step > 1 for apart, step in zip(direct.dilation, direct.stride, strict=True)):
        return 0
    (_, _, wide), (_, _, stride), (_, _, width) = direct.kernel, direct.stride, direct.source
    reach = (wide - 1) * direct.dilation[2]
    line, inputs = _source_line(direct, block)
    tail, right = width % line, direct.after[2]
    left_over = max(0, (reach - direct.before[2]) // stride)
    right_over = max(0, (reach - max(0, right + tail)) // stride)
    if max(left_over, right_over) * stride > line:
        return 0
    if width > line and (line % stride or right + tail < 0):
        return 0
    parts = 1 + (left_over > 0) + (right_over > 0)
    return block if parts * wide * block * inputs * line <= _CODE else 0


def _source_line(direct: Direct, block: int) -> tuple[int, int]:
    """Points of a row of the source, and blocks of its channels, that a kernel keeps in registers."""
    (_, high, wide), width = direct.kernel, direct.source[2]
    blocks = -(-direct.inputs // block)
    cached = width * block * 2 * high + direct.result[2] * block + high * wide * block * block * 2
    small = cached * 4 <= _cache_bytes(1)
    strided = direct.stride[0] > 1 or direct.stride[1] > 1
    short = width <= 5 or 8 < width <= 13 or not small
    if strided or not (wide == 1 or (wide == 5 and width < 8) or (wide < 5 and short)):
        single = wide > 3 or (wide == 3 and cached * 4 < _cache_bytes(1) and direct.result[2] > 8)
        if not single and not strided and blocks % 2 == 0:
            return min(width, _ALL_REGISTERS // 3), 2
        return min(width, _REGISTERS), 1
    count = next(n for n in range(min(4, blocks), 0, -1) if blocks % n == 0)
    return min(width, _ALL_REGISTERS // (count + 1)), count


def weight_taken(direct: Direct, *, channels_last: bool) -> bool:
    """Whether the kernel for the gradient of the weight takes the convolution."""
    if direct.pointwise or (direct.depthwise and depthwise_weight_taken(direct)):
        return True
    if not channels_last:
        if direct.groups > 1 and (direct.inputs % BLOCK or direct.outputs % BLOCK):
            return False
        if direct.narrow and direct.inputs > 3:
            return False
    if any(apart > 1 and step > 1 for apart, step in zip(direct.dilation[:2], direct.stride[:2], strict=True)):
        return False
    if direct.dilation[0] > 1 or (direct.dilation[1] > 1 and direct.extent[1] > direct.source[1]):
        return False
    return direct.kernel[2] <= _WIDEST_OF_WEIGHT and _weight_padding_taken(direct)


def _weight_padding_taken(direct: Direct) -> bool:
    ends = [max(0, pad) for pad in direct.after]
    depth, height, width = zip(direct.before, ends, direct.extent, strict=True)
    if max(depth[:2]) >= depth[2] or (depth[0] > 0 and direct.kernel[0] >= direct.source[0] + depth[0]):
        return False
    if max(height[:2]) > height[2] // 2:
        return False
    return max(width[:2]) < width[2] and max(width[:2]) <= _REGISTERS


def depthwise_weight_taken(direct: Direct) -> bool:
    """``init_conf`` of jit_uni_dw_conv_kernel_utils.cpp."""
    if direct.rank > 2 or direct.dilated or direct.kernel[2] > 3 or direct.stride[2] > direct.kernel[2]:
        return False
    (_, top, left), (_, bottom, right) = direct.before, direct.after
    (_, high, wide), step = direct.kernel, direct.stride[1]
    if max(top, bottom) > high // 2 or max(left, right) > wide // 2 or direct.source[1] < high + -top % step:
        return False
    return all(pad <= 1 or pad % step == 0 for pad in (top, bottom))


def weight_scratchpad_bytes(direct: Direct, *, has_bias: bool, channels_last: bool) -> int:
    """What sums of threads take before they are put together, and the padded bias."""
    inputs, outputs = padded(direct.inputs, BLOCK), padded(direct.outputs, BLOCK)
    sizes = []
    if direct.depthwise and depthwise_weight_taken(direct):
        channels = padded(direct.groups, BLOCK)
        images = (
            torch.get_num_threads()
            if channels_last
            else min(max(1, torch.get_num_threads() // min(channels // BLOCK, torch.get_num_threads())), direct.batch)
        )
        sizes = [channels * direct.window * (images - 1) * 4]
        sizes.append(channels * (images - 1) * 4 if has_bias else 0)
        return sum(size + ALIGN_BYTES for size in sizes if size)
    if direct.pointwise:
        parts = _pointwise_parts(direct)
        sizes.append(inputs * outputs * (parts.images - 1) * 4)
        if max(direct.stride) > 1:
            channels = best_divider(inputs // BLOCK, 5, inputs // BLOCK, largest=False) * BLOCK
            points = direct.result[0] * direct.result[1] * direct.result[2]
            sizes.append(parts.all * channels * points * 4)
    else:
        parts = _weight_parts(direct, channels_last=channels_last)
        of_copy = direct.groups * outputs * ((direct.inputs if direct.narrow else inputs) * direct.window + 1)
        sizes.append(of_copy * (parts.images - 1) * 4)
    if has_bias and direct.outputs % BLOCK:
        sizes.append(direct.groups * outputs * 4)
    barrier = _BARRIER_BYTES if parts.images > 1 else 0
    return sum(size + ALIGN_BYTES for size in sizes if size) + barrier


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Among how many threads each direction is shared."""

    images: int = 1  # and rows or planes, over which is summed
    outputs: int = 1
    inputs: int = 1
    groups: int = 1

    @property
    def all(self) -> int:
        return self.images * self.outputs * self.inputs * self.groups


def candidates(threads: int, images: int, outputs: int, inputs: int, groups: int) -> Iterator[Parts]:
    for some in range(1, min(threads, images) + 1):
        for parts in range(1, min(threads // some, outputs) + 1):
            yield Parts(images=some, outputs=parts, inputs=min(threads // some // parts, inputs), groups=groups)


def _weight_parts(direct: Direct, *, channels_last: bool) -> Parts:
    """``balance`` of jit_avx512_common_conv_kernel.cpp: least memory moved, then least work of a thread."""
    threads, groups = torch.get_num_threads(), direct.groups
    if threads < groups:
        return Parts(groups=threads)
    block = direct.inputs if direct.narrow else BLOCK
    inputs, outputs = -(-direct.inputs // block), -(-direct.outputs // BLOCK)
    (depth, high, wide), (planes, rows, columns) = direct.source, direct.result
    by_rows = not channels_last and direct.rank == 2 and direct.dilation[1] == 1 and rows > _ROWS
    source_rows, result_rows = (high, rows) if by_rows else (1, 1)
    shared = max(1, result_rows // _ROWS)
    images = direct.batch * planes * shared

    def memory(parts: Parts) -> int:
        some, other = -(-outputs // parts.outputs), -(-inputs // parts.inputs)
        read = -(-direct.batch * source_rows // parts.images) * other * block * (high // source_rows) * wide * depth
        read = read // direct.stride[0] // direct.stride[1] // direct.stride[2]
        written = -(-direct.batch * result_rows // parts.images) * some * BLOCK * (rows // result_rows) * columns
        return read + written * planes + 8 * some * other * direct.window * block * BLOCK

    def work(parts: Parts) -> int:
        each = -(-direct.batch * result_rows // parts.images)
        return each * -(-outputs // parts.outputs) * -(-inputs // parts.inputs)

    tried = list(candidates(threads // groups, images, outputs, inputs, groups))
    found = Parts(groups=groups)
    least = memory(found)
    for parts in tried:
        if memory(parts) <= least:
            found, least = parts, memory(parts)
    quickest = work(found)
    for parts in tried:
        if (work(parts) <= quickest and memory(parts) < 1.1 * least) or 4 * work(parts) <= 3 * quickest:
            found, quickest = parts, work(parts)
    if threads // 2 < found.images < threads:
        return Parts(images=min(images, threads), outputs=found.outputs, inputs=found.inputs, groups=groups)
    return found


def _pointwise_parts(direct: Direct) -> Parts:
    """``balance`` of jit_avx512_common_1x1_conv_kernel.cpp."""
    threads = torch.get_num_threads()
    points, width = direct.result[0] * direct.result[1] * direct.result[2], direct.result[2]
    reduced = best_divider(points, 7, 16, largest=True)
    if points % reduced:
        reduced = best_divider(width, 4, width, largest=False)
    reduced = 1 if reduced > 256 else reduced
    inputs, outputs = -(-direct.inputs // BLOCK), -(-direct.outputs // BLOCK)
    lines = direct.batch * -(-points // reduced)

    def memory(parts: Parts) -> int:
        each, some, other = -(-lines // parts.images), -(-outputs // parts.outputs), -(-inputs // parts.inputs)
        return each * (other + some) * BLOCK * reduced + 12 * some * other * BLOCK * BLOCK

    found = Parts()
    least = memory(found)
    for parts in candidates(threads, lines, outputs, inputs, 1):
        if memory(parts) <= least:
            found, least = parts, memory(parts)
    if threads // 2 < found.images < threads:
        return Parts(images=min(direct.batch, threads), outputs=found.outputs, inputs=found.inputs)
    return found


def best_divider(value: int, least: int, most: int, *, largest: bool, by: int = 1) -> int:
    """Of the sizes allowed the one that wastes least of its last multiple."""
    most = max(1, min(most, value))
    least = max(1, min(least, most))
    sizes = list(range(most, least - 1, -by))
    return min(
        sizes if largest else reversed(sizes), key=lambda size: (padded(value, size) - value) / padded(value, size)
    )
