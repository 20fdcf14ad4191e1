"""What a convolution on the CPU allocates inside: oneDNN's blocked copies, or the columns of the plain kernel.

Follows aten/src/ATen/native/Convolution.cpp (which kernel), mkldnn/Conv.cpp (copies in and out) and oneDNN's
jit_avx2, jit_avx512, brgemm and gemm convolutions (layouts, scratchpads). Tensors are blocked by as many channels as
a vector register holds; which kernel takes what is in ``cpu_convolution_choice``, gradients in
``cpu_convolution_gradient``.
"""

from __future__ import annotations

import torch

from brim.predict.lowering.cpu_convolution_avx512 import ALIGN_BYTES
from brim.predict.lowering.cpu_convolution_blocking import forward_columns_bytes
from brim.predict.lowering.cpu_convolution_choice import (
    forward_scratchpad_bytes,
    is_known,
    last_layout,
    result_layout,
    strided_block,
)
from brim.predict.lowering.cpu_convolution_gradient import (
    brgemm_batch_bytes,
    gradient_of_source,
    gradient_of_weight,
    source_columns_bytes,
    strided_scratchpad_bytes,
    strided_weight_bytes,
    threads_of_columns,
)
from brim.predict.lowering.cpu_convolution_shape import AVX2_LANES, Convolution, lanes
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten


def _uses_onednn(conv: Convolution) -> bool:
    """``use_mkldnn`` of Convolution.cpp."""
    source, weight = conv.source, conv.weight
    if not torch.backends.mkldnn.is_available() or source.numel() == 0:
        return False
    if source.dtype in (torch.bfloat16, torch.float16):
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported, torch.ops.mkldnn._is_mkldnn_fp16_supported
        return bool(supported[source.dtype is torch.float16]())
    if source.dtype != torch.float32:
        return False
    sizes = list(weight.shape[2:])
    if len(sizes) == 1:
        sizes = [1, *sizes]
    worth = conv.strided or conv.dilated or source.size(0) >= 16 or sizes[-1] != 1 or sizes[-2] != 1
    worth = worth or torch.get_num_threads() > 1
    large = conv.groups > 1 or (sizes[-1] > 3 and sizes[-2] > 3) or source.size(0) > 1 or source.numel() > 20480
    return worth and large


def _tell_unknown(kernel: Kernel, conv: Convolution) -> None:
    if not is_known(conv):
        kernel.unknown = f"{kernel.func.overloadpacket}: oneDNN's buffers for {str(conv.source.dtype)[6:]}"


def _copies(kernel: Kernel, *tensors: torch.Tensor, channels_last: bool) -> None:
    """Inputs are first brought into the layout that the kernel reads."""
    for tensor in tensors:
        if channels_last and tensor.dim() in (4, 5):
            layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            if not tensor.is_contiguous(memory_format=layout):
                kernel.temp(nbytes(tensor))
        elif not tensor.is_contiguous():
            kernel.temp(nbytes(tensor))


def _forward(kernel: Kernel) -> None:
    source, weight, bias, stride, padding, dilation, transposed, _, groups = kernel.args[:9]
    conv = Convolution(
        source=source, weight=weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        transposed=transposed, sides=list(kernel.result.shape[2:]),
    )  # fmt: skip
    if not _uses_onednn(conv):
        _plain_forward(kernel, conv)
        return
    _tell_unknown(kernel, conv)
    _copies(kernel, source, weight, channels_last=conv.channels_last)
    if conv.channels_last:
        _channels_last(kernel, conv)
        return
    if transposed and conv.strided:
        _strided_transposed(kernel, conv, bias is not None)
        return
    result = _onednn_forward(kernel, conv, bias is not None)
    kernel.emit()
    kernel.free(result)


def _channels_last(kernel: Kernel, conv: Convolution) -> None:
    kernel.emit()
    layout = last_layout(conv)
    if layout.block:
        kernel.free(kernel.temp(conv.blocked_weight(layout.block, flat=False)))
        return
    handles = [] if conv.depthwise else [kernel.temp(brgemm_batch_bytes(conv.window))]
    handles.append(kernel.temp(conv.blocked_weight(lanes(), flat=conv.flat or lanes() > AVX2_LANES)))
    _free(kernel, handles)


def _onednn_forward(kernel: Kernel, conv: Convolution, has_bias: bool) -> int:
    """Scratchpad, copies of source and weight, result; returns the handle of the blocked result."""
    layout = result_layout(conv)
    if not layout.block:
        columns = forward_columns_bytes(conv) + ALIGN_BYTES
        columns = columns if columns <= conv.most_scratch_bytes else 0  # else the reference kernel
        if conv.transposed:  # the gradient of another one's source, within a scratchpad of its own
            columns = source_columns_bytes(conv) + ALIGN_BYTES
        scratch = kernel.temp(columns)
        result = kernel.temp(conv.batch * conv.outputs * conv.points * conv.item_bytes)
        kernel.free(scratch)
        return result
    handles = [kernel.temp(forward_scratchpad_bytes(conv, layout, has_bias=has_bias))]
    if not layout.flat:
        handles.append(kernel.temp(conv.blocked(conv.inputs, conv.source_points, layout.block)))
    handles.append(kernel.temp(conv.blocked_weight(layout.block, flat=layout.flat, pair=layout.pair)))
    result = kernel.temp(conv.blocked(conv.outputs, conv.points, layout.block))
    _free(kernel, handles)
    return result


def _strided_transposed(kernel: Kernel, conv: Convolution, has_bias: bool) -> None:
    """The gradient of a strided convolution: its result is of oneDNN's layout and is copied."""
    result_bytes = conv.batch * conv.outputs * conv.points * conv.item_bytes
    if not strided_block(conv):
        scratch = conv.columns(threads_of_columns(conv, weight=False)) + 2 * ALIGN_BYTES
        before_bias = result_bytes + ALIGN_BYTES if has_bias else 0  # the result, to which the bias is added
        handle = kernel.temp(scratch + before_bias)
        result = kernel.temp(result_bytes)
        kernel.free(handle)
        kernel.emit()
        kernel.free(result)
        return
    handles = [kernel.temp(strided_scratchpad_bytes(conv) + ALIGN_BYTES)]
    handles.append(kernel.temp(conv.batch * conv.inputs * conv.source_points * conv.item_bytes))
    handles.append(kernel.temp(strided_weight_bytes(conv)))
    result = kernel.temp(result_bytes)
    _free(kernel, handles)
    public = kernel.temp(result_bytes)
    kernel.emit()
    kernel.free(public)
    kernel.free(result)


def _free(kernel: Kernel, handles: list[int]) -> None:
    for handle in reversed(handles):
        kernel.free(handle)


def _backward(kernel: Kernel) -> None:
    grad, source, weight, _, stride, padding, dilation, transposed, _, groups, mask = kernel.args[:11]
    conv = Convolution(
        source=source, weight=weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        transposed=transposed, sides=list(grad.shape[2:]),
    )  # fmt: skip
    made = dict(zip([i for i in range(3) if mask[i]], range(len(kernel.outputs)), strict=False))
    if not _uses_onednn(conv):
        _plain_backward(kernel, conv, made)
        return
    _tell_unknown(kernel, conv)
    _copies(kernel, grad, source, weight, channels_last=conv.channels_last)
    if mask[0]:
        gradient_of_source(kernel, conv, made[0])
    if mask[1]:
        gradient_of_weight(kernel, conv, made)
    kernel.emit()


def _plain_columns(conv: Convolution) -> int:
    """``finput`` of ConvolutionMM2d.cpp: the patches of the whole batch, unless the source itself serves."""
    if conv.transposed:  # NaiveConvolutionTranspose2d.cpp, image by image
        return conv.columns(threads=1)
    if conv.pointwise and not conv.strided and not any(conv.padding):
        return 0
    inputs = conv.inputs // conv.groups
    return conv.batch * inputs * conv.window * conv.points * conv.source.element_size()


def _plain_forward(kernel: Kernel, conv: Convolution) -> None:
    _copies(kernel, conv.source, conv.weight, channels_last=False)
    if conv.groups > 1:  # group by group, then concatenated
        kernel.temp(nbytes(kernel.result))
        kernel.free(kernel.temp(nbytes(conv.source) // conv.groups + _plain_columns(conv)))
        kernel.emit()
        return
    columns = kernel.temp(_plain_columns(conv))
    kernel.emit()
    kernel.free(columns)


def _plain_backward(kernel: Kernel, conv: Convolution, made: dict[int, int]) -> None:
    grad = kernel.args[0]
    _copies(kernel, grad, conv.source, conv.weight, channels_last=False)
    if conv.groups > 1:
        for index in made.values():
            kernel.temp(nbytes(kernel.outputs[index]))
        kernel.free(kernel.temp((nbytes(grad) + nbytes(conv.source)) // conv.groups + _plain_columns(conv)))
        kernel.emit()
        return
    for index in (0, 2, 1):
        if index in made:
            kernel.emit(made[index])
    kernel.temp(_plain_columns(conv))


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
}
