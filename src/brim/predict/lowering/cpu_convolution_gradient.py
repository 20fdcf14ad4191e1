"""What the gradients of a convolution on the CPU allocate inside, by oneDNN's kernel for each.

Sizes of scratchpads are those that oneDNN books: jit_brgemm_conv_bwd_utils.cpp for the gradient of the source of a
strided convolution, gemm_convolution_utils.cpp where columns are made, jit_avx2_conv_kernel_f32.cpp for weights. Of
oneDNN's choice of blocks (a search over estimated efficiencies) what it nearly always ends with is taken: rows whole,
and as many channels as fill registers best.
"""

from __future__ import annotations

from math import prod

import torch

from brim.predict.lowering.cpu_convolution_avx512 import ALIGN_BYTES, weight_scratchpad_bytes
from brim.predict.lowering.cpu_convolution_bfloat16 import weight_scratchpad_bytes as half_weight_scratchpad_bytes
from brim.predict.lowering.cpu_convolution_blocking import forward_columns_bytes
from brim.predict.lowering.cpu_convolution_choice import (
    Layout,
    last_layout,
    source_layout,
    source_scratchpad_bytes,
    strided_block,
    weight_layout,
)
from brim.predict.lowering.cpu_convolution_direct import Direct
from brim.predict.lowering.cpu_convolution_shape import AVX2_LANES, Convolution, lanes, padded
from brim.predict.lowering.kernel import Kernel, nbytes

_PAGE = 4096  # to which brgemm's buffers are rounded, in elements, and aligned, in bytes
_BATCH_ELEMENT_BYTES = 40  # sizeof(brgemm_batch_element_t)
_REDUCED_CHANNELS = 64  # input channels up to which the gradient of a 1x1 weight is one piece of work
_MOST_BLOCKS = 4  # of input channels that brgemm takes at once

# Columns are made for one image per thread where an image is small (gemm_convolution_utils.cpp).
_SMALL_IMAGE = 512
_SMALL_IMAGE_OF_WEIGHT = 256
_SMALL_WINDOW = 64
_SMALL_WORK = 64 * 1024
_SHARE_OF_SOURCE, _SHARE_OF_WEIGHT = 0.1, 0.05  # of the room for columns, where they have to be made in parts


def brgemm_batch_bytes(window: int = 1) -> int:
    """Addresses of a batch of small products for every thread, one for each point of the window."""
    elements = -(-padded(window * _BATCH_ELEMENT_BYTES, _PAGE) // _BATCH_ELEMENT_BYTES)
    return torch.get_num_threads() * elements * _BATCH_ELEMENT_BYTES + _PAGE


def strided_scratchpad_bytes(conv: Convolution) -> int:
    """Of the gradient of the source of a strided convolution: padded gradients, their mask, rows that are cut off.

    ``init_conf`` and ``init_scratchpad`` of jit_brgemm_conv_bwd_utils.cpp, one set of buffers per thread. A
    transposed convolution is such a gradient.
    """
    window, small, large = conv.weight.shape[2:], conv.sides, conv.source.shape[2:]
    small_channels, large_channels = conv.outputs, conv.inputs
    if conv.transposed:
        small, large = list(large), torch.Size(small)
        small_channels, large_channels = large_channels, small_channels
    sizes = zip(small, large, window, conv.stride, conv.padding, strict=True)
    points = prod(out + _overhang(out, side, kernel, step, pad) for out, side, kernel, step, pad in sizes)
    buffers = [padded(points * small_channels, _PAGE) * conv.item_bytes, _PAGE]
    if large[-1] % conv.stride[-1]:
        row = padded(large[-1], conv.stride[-1]) * conv.stride[-1]
        buffers.append(padded(row * large_channels, _PAGE) * conv.item_bytes)
    if conv.item_bytes == 2:  # sums of a row before they are rounded
        buffers.append(-(-large[-1] // conv.stride[-1]) * _strided_block(conv) * 4)
    return brgemm_batch_bytes(prod(window)) + sum(torch.get_num_threads() * size + _PAGE for size in buffers)


def _overhang(out: int, side: int, kernel: int, stride: int, before: int) -> int:
    """Points of a side's gradient that lie before and after it, for windows that reach over the edge."""
    after = (out - 1) * stride + kernel - side - before
    return max(0, kernel - 1 - before) // stride + max(0, kernel - 1 - after) // stride


def strided_weight_bytes(conv: Convolution) -> int:
    """Input channels in the blocks of brgemm that waste least of the last; output channels as they are."""
    inputs, outputs = (conv.outputs, conv.inputs) if conv.transposed else (conv.inputs, conv.outputs)
    channels = padded(inputs // conv.groups, _strided_block(conv))
    return (
        channels * conv.groups * padded(outputs // conv.groups, 4 // conv.item_bytes) * conv.window * conv.item_bytes
    )


def _strided_block(conv: Convolution) -> int:
    inputs, block = (conv.outputs if conv.transposed else conv.inputs) // conv.groups, strided_block(conv) or lanes()
    counts = range(min(-(-inputs // block), _MOST_BLOCKS), 0, -1)
    return min((count * block for count in counts), key=lambda size: padded(inputs, size))


def threads_of_columns(conv: Convolution, *, weight: bool) -> int:
    """All threads, each with an image of its own, or one image after the other by all (``outer_threading``)."""
    threads, block = torch.get_num_threads(), lanes()
    points, source_points = prod(conv.sides[-2:]), prod(conv.source.shape[2:][-2:])
    inputs, outputs = conv.inputs // conv.groups, conv.outputs // conv.groups
    if conv.transposed:
        points, source_points, inputs, outputs = source_points, points, outputs, inputs
    several = conv.batch != 1 or conv.groups > 2
    if weight:
        return threads if points // threads < _SMALL_IMAGE_OF_WEIGHT and several else 1
    images, products = conv.groups * conv.batch, -(-source_points // block) * -(-inputs // block)
    evener = images / padded(images, threads) >= products / padded(products, threads)
    small_work = source_points * inputs * outputs // threads < _SMALL_WORK
    small = points // threads < _SMALL_IMAGE or conv.window < _SMALL_WINDOW
    return threads if small and several and (evener or small_work) else 1


def source_columns_bytes(conv: Convolution) -> int:
    return _columns_within(conv, threads_of_columns(conv, weight=False), _SHARE_OF_SOURCE) + ALIGN_BYTES


def _columns_within(conv: Convolution, threads: int, share: float, beside_bytes: int = 0) -> int:
    """Columns of all threads: of whole images, or where that is too much of a ``share`` of what there is room for."""
    whole, room = conv.columns(threads), conv.most_scratch_bytes - beside_bytes
    if whole <= room:
        return whole
    points = prod((conv.source.shape[2:] if conv.transposed else conv.sides)[-2:])
    each = whole // points  # bytes of a point, in all threads
    return max(lanes(), int(room // each * share)) * each


def _free(kernel: Kernel, handles: list[int]) -> None:
    for handle in reversed(handles):
        kernel.free(handle)


def gradient_of_source(kernel: Kernel, conv: Convolution, output: int) -> None:
    if strided_block(conv) and not conv.transposed:
        _by_strided_brgemm(kernel, conv, output)
    elif conv.channels_last:
        kernel.emit(output)
        _channels_last(kernel, conv)
    else:
        _in_layout(kernel, conv, output, source_layout(conv))


def _channels_last(kernel: Kernel, conv: Convolution) -> None:
    layout = last_layout(conv)
    if layout.block or conv.depthwise:
        kernel.free(kernel.temp(conv.blocked_weight(layout.block or lanes(), flat=False)))
        return
    weight = strided_weight_bytes(conv) if lanes() > AVX2_LANES else conv.blocked_weight(AVX2_LANES, flat=False)
    _free(kernel, [kernel.temp(weight), kernel.temp(brgemm_batch_bytes(conv.window) + ALIGN_BYTES)])


def _in_layout(kernel: Kernel, conv: Convolution, output: int, layout: Layout) -> None:
    if not layout.block:
        result = kernel.temp(conv.batch * conv.inputs * conv.source_points * conv.item_bytes)
        columns = forward_columns_bytes(conv) + 2 * ALIGN_BYTES if conv.transposed else source_columns_bytes(conv)
        kernel.free(kernel.temp(columns))
    else:
        handles = [kernel.temp(0 if layout.flat else conv.blocked(conv.outputs, conv.points, layout.block))]
        handles.append(kernel.temp(conv.blocked_weight(layout.block, flat=layout.flat, pair=layout.pair)))
        result = kernel.temp(conv.blocked(conv.inputs, conv.source_points, layout.block))
        handles.append(kernel.temp(source_scratchpad_bytes(conv)))
        _free(kernel, handles)
    kernel.emit(output)
    kernel.free(result)


def _by_strided_brgemm(kernel: Kernel, conv: Convolution, output: int) -> None:
    """In the layout with channels last, into which gradients are brought and out of which the result is copied."""
    weight, scratchpad = strided_weight_bytes(conv), strided_scratchpad_bytes(conv)
    if conv.channels_last:
        kernel.emit(output)
        _free(kernel, [kernel.temp(weight), kernel.temp(scratchpad)])
        return
    result_bytes = conv.batch * conv.inputs * conv.source_points * conv.item_bytes
    handles = [kernel.temp(conv.batch * conv.outputs * conv.points * conv.item_bytes), kernel.temp(weight)]
    result = kernel.temp(result_bytes)
    handles.append(kernel.temp(scratchpad))
    _free(kernel, handles)
    public = kernel.temp(result_bytes)
    kernel.emit(output)
    kernel.free(public)
    kernel.free(result)


def gradient_of_weight(kernel: Kernel, conv: Convolution, made: dict[int, int]) -> None:
    layout = weight_layout(conv)
    handles = []
    if not layout.block or (conv.channels_last and layout.block == AVX2_LANES and not layout.dense):
        blocked = kernel.temp(nbytes(conv.weight))
    elif conv.channels_last:
        blocked = kernel.temp(conv.blocked_weight(layout.block, flat=layout.flat, dense=layout.dense))
    else:
        of_result = (conv.outputs, conv.points)
        of_source = (conv.inputs, conv.source_points)
        if conv.transposed:
            of_result, of_source = of_source, of_result
        handles.append(kernel.temp(conv.blocked(*of_result, layout.block)))
        if not layout.flat:
            handles.append(kernel.temp(conv.blocked(*of_source, layout.block)))
        blocked = kernel.temp(conv.blocked_weight(layout.block, flat=layout.flat))
    handles.append(kernel.temp(_weight_scratchpad_bytes(conv, layout, has_bias=2 in made)))
    bias = kernel.temp(nbytes(kernel.outputs[made[2]]) if 2 in made else 0)
    _free(kernel, handles)
    if 2 in made:
        kernel.emit(made[2])
    if conv.channels_last:
        public = kernel.temp(nbytes(conv.weight))
        kernel.emit(made[1])
        kernel.free(public)
    else:
        kernel.emit(made[1])
    kernel.free(blocked)
    kernel.free(bias)


def _weight_scratchpad_bytes(conv: Convolution, layout: Layout, *, has_bias: bool) -> int:
    nested = ALIGN_BYTES if conv.transposed else 0  # the scratchpad of a convolution within that of a transposed one
    if not layout.block:
        each = threads_of_columns(conv, weight=True)
        reduction = 4 * each * nbytes(conv.weight)
        columns = _columns_within(conv, each, _SHARE_OF_WEIGHT, reduction + ALIGN_BYTES)
        turned = 0
        if conv.channels_last:  # the source with its points last, for every thread
            turned = each * conv.inputs // conv.groups * conv.source_points * conv.item_bytes + ALIGN_BYTES
        return columns + reduction + turned + 2 * ALIGN_BYTES + nested
    if layout.block > AVX2_LANES:
        direct, bias = Direct.of(conv), has_bias and not conv.transposed
        if conv.item_bytes == 2:
            found = half_weight_scratchpad_bytes(direct, has_bias=bias)
        else:
            found = weight_scratchpad_bytes(direct, has_bias=bias, channels_last=conv.channels_last)
        return found + nested if found else 0
    if layout.dense:
        return conv.groups * AVX2_LANES * 4 + ALIGN_BYTES if has_bias else 0
    return _avx2_weight_bytes(conv, has_bias=has_bias)


def _avx2_weight_bytes(conv: Convolution, *, has_bias: bool) -> int:
    bias = padded(conv.outputs, AVX2_LANES) * 4 + ALIGN_BYTES if has_bias and conv.outputs % AVX2_LANES else 0
    if conv.channels_last:
        bias = 0
    if not conv.pointwise or conv.groups > 1:
        return bias
    threads = torch.get_num_threads()
    scratch = threads * conv.inputs * conv.points * 4 + ALIGN_BYTES if conv.strided else 0
    if conv.inputs <= _REDUCED_CHANNELS:  # one job for all threads: each sums into its own copy
        scratch += threads * (conv.blocked_weight(AVX2_LANES, flat=False) + 4096) + ALIGN_BYTES
    return bias + scratch
