"""Into which layout oneDNN brings a convolution on the CPU, by the instructions that it may use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from brim.predict.lowering import cpu_convolution_avx512 as avx512
from brim.predict.lowering.cpu_convolution_avx512 import ALIGN_BYTES
from brim.predict.lowering.cpu_convolution_bfloat16 import forward_scratchpad_bytes as _half_forward
from brim.predict.lowering.cpu_convolution_bfloat16 import source_scratchpad_bytes as _half_source
from brim.predict.lowering.cpu_convolution_direct import Direct
from brim.predict.lowering.cpu_convolution_shape import AVX2_LANES, WIDEST_KERNEL, Convolution, lanes, padded


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``block``: channels that lie together; 0 where columns are made of plain tensors.

    ``flat``: a first layer's source is read where it is, and the weight's input channels are padded to ``pair`` only:
    bfloat16 is multiplied by twos. ``dense``: the one channel of every group takes a block of its own.
    """

    block: int
    flat: bool = False
    pair: int = 1
    dense: bool = False


_COLUMNS = Layout(block=0)


def result_layout(conv: Convolution) -> Layout:
    """A transposed convolution is the gradient of another one's source."""
    return _source(conv) if conv.transposed and lanes() > AVX2_LANES else _forward(conv)


def source_layout(conv: Convolution) -> Layout:
    """Of the gradient of the source."""
    return _forward(conv) if conv.transposed and lanes() > AVX2_LANES else _source(conv)


def _forward(conv: Convolution) -> Layout:
    if lanes() == AVX2_LANES:
        return _avx2_forward(conv)
    direct = Direct.of(conv)
    block = avx512.forward_block(direct)
    if not block:  # the kernel of AVX2 is asked next
        return _avx2_forward(conv) if _fills_avx2(direct) else _COLUMNS
    return Layout(block=block, flat=direct.narrow and not direct.pointwise, pair=4 // conv.item_bytes)


def _avx2_forward(conv: Convolution) -> Layout:
    if conv.by_gemm(AVX2_LANES) or conv.far_padded:
        return _COLUMNS
    return Layout(block=AVX2_LANES, flat=conv.groups == 1 and conv.inputs < AVX2_LANES)


def _source(conv: Convolution) -> Layout:
    if lanes() == AVX2_LANES:
        by_gemm = conv.by_gemm(AVX2_LANES) or (conv.strided and not conv.depthwise and not conv.transposed)
        return _COLUMNS if by_gemm else Layout(block=AVX2_LANES)
    return Layout(block=avx512.source_block(Direct.of(conv)))


def weight_layout(conv: Convolution) -> Layout:
    if lanes() == AVX2_LANES:
        return _avx2_weight(conv)
    direct = Direct.of(conv)
    if avx512.weight_taken(direct, channels_last=conv.channels_last):
        dense = direct.depthwise and not avx512.depthwise_weight_taken(direct)
        return Layout(block=avx512.BLOCK, flat=direct.narrow and not direct.pointwise, dense=dense)
    if conv.channels_last:
        return _COLUMNS
    return _avx2_weight(conv) if _fills_avx2(direct) else _COLUMNS


def _avx2_weight(conv: Convolution) -> Layout:
    """What the blocked kernel leaves to columns (``init_conf`` of jit_avx2_conv_kernel_f32.cpp)."""
    kernels, sides = conv.weight.shape[2:], conv.source.shape[2:]
    fits = all(side >= kernel for side, kernel in zip(sides, kernels, strict=True))
    if conv.channels_last and conv.depthwise and 3 < kernels[-1] <= WIDEST_KERNEL and fits and not conv.dilated:
        return Layout(block=AVX2_LANES, dense=True)
    by_gemm = conv.by_gemm(AVX2_LANES) or conv.dilated or (len(sides) == 3 and conv.padding[0] > 0)
    by_gemm = by_gemm or (conv.depthwise and kernels[-1] > 3) or kernels[-1] > WIDEST_KERNEL
    if by_gemm or any(side < kernel for side, kernel in zip(sides, kernels, strict=True)):
        return _COLUMNS
    return Layout(block=AVX2_LANES, flat=conv.groups == 1 and conv.inputs == 3)


def _fills_avx2(direct: Direct) -> bool:
    return direct.groups == 1 or (direct.inputs % AVX2_LANES == 0 and direct.outputs % AVX2_LANES == 0)


def strided_block(conv: Convolution) -> int:
    """Lanes of oneDNN's kernel for gradients of strided sources (jit_brgemm_conv_bwd_utils.cpp, ``init_jcp``), or 0.

    The gradient of the source, and of a transposed convolution the result itself. Groups have to be wider than a
    register; where AVX-512 has no other kernel for narrow ones, that of AVX2 is asked too.
    """
    if not conv.strided or conv.dilated:
        return 0
    reduced = (conv.inputs if conv.transposed else conv.outputs) // conv.groups
    if conv.groups == 1 or reduced > lanes():
        return lanes()
    if reduced > AVX2_LANES and not conv.depthwise and not avx512.source_block(Direct.of(conv)):
        return AVX2_LANES
    return 0


def forward_scratchpad_bytes(conv: Convolution, layout: Layout, *, has_bias: bool) -> int:
    """A bias as long as the blocked channels, or a source without the points that strides leave out."""
    if conv.item_bytes == 2:
        direct = Direct.of(conv)
        return _half_source(direct) if conv.transposed else _half_forward(direct, has_bias=has_bias)
    count, threads = conv.outputs // (1 if conv.depthwise else conv.groups), torch.get_num_threads()
    bias = padded(conv.outputs, layout.block) * 4 + ALIGN_BYTES if has_bias and count % layout.block else 0
    pointwise = conv.pointwise and conv.strided and conv.groups == 1
    if lanes() == AVX2_LANES:
        return bias or (threads * conv.inputs * conv.points * 4 + ALIGN_BYTES if pointwise else 0)
    if pointwise and Direct.of(conv).pointwise:
        bias += threads * padded(conv.inputs, layout.block) * conv.points * 4 + ALIGN_BYTES
    if conv.transposed:  # the result, to which the bias is added
        return conv.blocked(conv.outputs, conv.points, layout.block) + ALIGN_BYTES if has_bias else 0
    return bias


def source_scratchpad_bytes(conv: Convolution) -> int:
    if conv.item_bytes != 2:
        return 0
    direct = Direct.of(conv)
    return _half_forward(direct, has_bias=False) if conv.transposed else _half_source(direct)


def last_layout(conv: Convolution) -> Layout:
    """With the channels last: 0 for brgemm, else the blocks that its kernel for narrow groups makes of the weight."""
    direct = Direct.of(conv)
    narrow = max(direct.inputs, direct.outputs) < avx512.BLOCK
    if lanes() == AVX2_LANES or conv.groups == 1 or conv.depthwise or not narrow:
        return _COLUMNS
    return Layout(block=avx512.forward_block(direct))


def is_known(conv: Convolution) -> bool:
    """Whether what oneDNN takes inside is: of half precision only where its blocked kernels of AVX-512 compute."""
    if conv.source.dtype == torch.float32:
        return True
    if conv.source.dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported() or conv.channels_last:
        return False
    if Direct.of(conv).pointwise and conv.batch < torch.get_num_threads():
        return False
    layouts = [weight_layout(conv)]
    if not (conv.transposed and strided_block(conv)):
        layouts.append(result_layout(conv))
    if conv.transposed or not strided_block(conv):
        layouts.append(source_layout(conv))
    return all(layout.block == avx512.BLOCK for layout in layouts)
