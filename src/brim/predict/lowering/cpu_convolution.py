"""What a convolution on the CPU allocates inside: oneDNN's blocked copies, or the columns of the plain kernel.

Follows aten/src/ATen/native/Convolution.cpp (which kernel), mkldnn/Conv.cpp (copies in and out) and oneDNN's
jit_avx2, brgemm and gemm convolutions (layouts, scratchpads). Tensors are blocked by as many channels as a vector
register holds. Scratchpads that only depend on oneDNN's blocking are taken at their usual size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_ALIGN = 128  # what oneDNN adds to a scratchpad to align it
_BRGEMM_BATCH = 12336  # addresses of a batch of small products for two threads, rounded to pages
_BRGEMM_STRIDED = 61488  # the same with the buffers of a strided backward convolution

# What oneDNN's AVX2 code does (jit_avx2_conv_kernel_f32.cpp); wider is left to columns.
_WIDEST_KERNEL = 13  # for the gradient of a weight (kw < 14)
_WIDEST_PADDING = 3  # forward: the points of a row that it computes at once (l_pad <= ur_w)
_REDUCED_CHANNELS = 64  # input channels up to which the gradient of a 1x1 weight is one piece of work


def _block() -> int:
    """float32 lanes of a vector register, which is how oneDNN blocks channels."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _pad(channels: int, block: int) -> int:
    return -(-channels // block) * block


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """One convolution in its forward direction: ``source`` has ``inputs`` channels, the result has ``outputs``."""

    source: torch.Tensor
    weight: torch.Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool
    points: int  # of the result, per image and channel

    @property
    def batch(self) -> int:
        return self.source.size(0)

    @property
    def inputs(self) -> int:
        return self.source.size(1)

    @property
    def outputs(self) -> int:
        return self.weight.size(1) * self.groups if self.transposed else self.weight.size(0)

    @property
    def window(self) -> int:
        return prod(self.weight.shape[2:])

    @property
    def source_points(self) -> int:
        return prod(self.source.shape[2:])

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    @property
    def strided(self) -> bool:
        return any(s > 1 for s in self.stride)

    @property
    def dilated(self) -> bool:
        return any(d > 1 for d in self.dilation)

    @property
    def pointwise(self) -> bool:
        return self.window == 1

    @property
    def channels_last(self) -> bool:
        return _last(self.source) or _last(self.weight)

    @property
    def flat(self) -> bool:
        """A first layer: fewer channels than a block are read where they are."""
        return self.groups == 1 and self.inputs < _block()

    @property
    def by_gemm(self) -> bool:
        """Groups whose channels do not fill blocks go through columns."""
        block = _block()
        if self.groups == 1 or self.depthwise:
            return False
        return bool(self.inputs // self.groups % block or self.outputs // self.groups % block)

    @property
    def far_padded(self) -> bool:
        """Padded too far for the blocked forward kernel."""
        avx2 = _block() == 8
        return avx2 and not self.depthwise and not self.transposed and self.padding[-1] > _WIDEST_PADDING

    def blocked(self, channels: int, points: int) -> int:
        return self.batch * _pad(channels, _block()) * points * 4

    def blocked_weight(self, *, flat: bool) -> int:
        block = _block()
        if self.depthwise:
            return _pad(self.groups, block) * self.window * 4
        inputs = self.inputs // self.groups
        inputs = inputs if flat else _pad(inputs, block)
        return self.groups * _pad(self.outputs // self.groups, block) * inputs * self.window * 4

    def columns(self, points: int) -> int:
        """The patches of one image and group per thread."""
        return torch.get_num_threads() * self.inputs // self.groups * self.window * points * 4


def _last(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 4:
        return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return (
        tensor.dim() == 5
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )


def _uses_onednn(conv: _Convolution) -> bool:
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
    conv = _Convolution(
        source=source, weight=weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        transposed=transposed, points=prod(kernel.result.shape[2:]),
    )  # fmt: skip
    if not _uses_onednn(conv):
        _plain_forward(kernel, conv)
        return
    _copies(kernel, source, weight, channels_last=conv.channels_last)
    if conv.channels_last:
        kernel.emit()
        handles = [] if conv.depthwise else [kernel.temp(_BRGEMM_BATCH)]
        handles.append(kernel.temp(conv.blocked_weight(flat=conv.flat)))
        _free(kernel, handles)
        return
    if transposed and conv.strided:
        _strided_transposed(kernel, conv)
        return
    result = _onednn_forward(kernel, conv, bias is not None)
    kernel.emit()
    kernel.free(result)


def _onednn_forward(kernel: Kernel, conv: _Convolution, has_bias: bool) -> int:
    """Scratchpad, copies of source and weight, result; returns the handle of the blocked result."""
    if conv.by_gemm or conv.far_padded:
        scratch = kernel.temp(conv.columns(conv.points) + _ALIGN)
        result = kernel.temp(conv.batch * conv.outputs * conv.points * 4)
        kernel.free(scratch)
        return result
    handles = []
    block = _block()
    padded_bias = has_bias and conv.outputs // (1 if conv.depthwise else conv.groups) % block
    if padded_bias:
        handles.append(kernel.temp(_pad(conv.outputs, block) * 4 + _ALIGN))
    elif conv.pointwise and conv.strided:
        handles.append(kernel.temp(torch.get_num_threads() * conv.inputs * conv.points * 4 + _ALIGN))
    if not conv.flat:
        handles.append(kernel.temp(conv.blocked(conv.inputs, conv.source_points)))
    handles.append(kernel.temp(conv.blocked_weight(flat=conv.flat)))
    result = kernel.temp(conv.blocked(conv.outputs, conv.points))
    _free(kernel, handles)
    return result


def _strided_transposed(kernel: Kernel, conv: _Convolution) -> None:
    """A strided backward convolution: its result is channels-last and is copied once more."""
    handles = [kernel.temp(_BRGEMM_STRIDED + _ALIGN), kernel.temp(conv.blocked(conv.inputs, conv.source_points))]
    handles.append(kernel.temp(conv.blocked_weight(flat=False)))
    result = kernel.temp(conv.batch * conv.outputs * conv.points * 4)
    _free(kernel, handles)
    public = kernel.temp(conv.batch * conv.outputs * conv.points * 4)
    kernel.emit()
    kernel.free(public)
    kernel.free(result)


def _free(kernel: Kernel, handles: list[int]) -> None:
    for handle in reversed(handles):
        kernel.free(handle)


def _backward(kernel: Kernel) -> None:
    grad, source, weight, _, stride, padding, dilation, transposed, _, groups, mask = kernel.args[:11]
    conv = _Convolution(
        source=source, weight=weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        transposed=transposed, points=prod(grad.shape[2:]),
    )  # fmt: skip
    made = dict(zip([i for i in range(3) if mask[i]], range(len(kernel.outputs)), strict=False))
    if not _uses_onednn(conv):
        _plain_backward(kernel, conv, made)
        return
    _copies(kernel, grad, source, weight, channels_last=conv.channels_last)
    if mask[0]:
        _backward_data(kernel, conv, made[0])
    if mask[1]:
        _backward_weight(kernel, conv, made)
    kernel.emit()


def _backward_data(kernel: Kernel, conv: _Convolution, output: int) -> None:
    strided = conv.strided and not conv.depthwise and not conv.transposed
    weight = conv.blocked_weight(flat=False)
    if conv.channels_last:
        kernel.emit(output)
        handles = [kernel.temp(weight)]
        if not conv.depthwise:
            handles.append(kernel.temp(_BRGEMM_STRIDED if strided else _BRGEMM_BATCH + _ALIGN))
        _free(kernel, handles)
        return
    if conv.by_gemm:
        result = kernel.temp(conv.batch * conv.inputs * conv.source_points * 4)
        kernel.free(kernel.temp(conv.columns(conv.points) + _ALIGN))
        kernel.emit(output)
        kernel.free(result)
        return
    plain = conv.batch * conv.inputs * conv.source_points * 4
    grads = conv.batch * conv.outputs * conv.points * 4 if strided else conv.blocked(conv.outputs, conv.points)
    handles = [kernel.temp(grads), kernel.temp(weight)]
    result = kernel.temp(plain if strided else conv.blocked(conv.inputs, conv.source_points))
    if strided:
        handles.append(kernel.temp(_BRGEMM_STRIDED))
    _free(kernel, handles)
    if strided:
        public = kernel.temp(plain)
        kernel.emit(output)
        kernel.free(public)
    else:
        kernel.emit(output)
    kernel.free(result)


def _backward_weight(kernel: Kernel, conv: _Convolution, made: dict[int, int]) -> None:
    block, threads = _block(), torch.get_num_threads()
    flat = conv.groups == 1 and conv.inputs == 3
    handles = []
    by_gemm = conv.by_gemm or conv.dilated or (conv.source.dim() == 5 and not flat)
    by_gemm = by_gemm or (conv.depthwise and conv.weight.size(-1) > 3)
    by_gemm = by_gemm or (block == 8 and conv.weight.size(-1) > _WIDEST_KERNEL)
    by_gemm = by_gemm or any(size < k for size, k in zip(conv.source.shape[2:], conv.weight.shape[2:], strict=True))
    if conv.channels_last or by_gemm:
        blocked = kernel.temp(nbytes(conv.weight))
        if by_gemm:
            plane = prod(kernel.args[0].shape[-2:]) if conv.source.dim() == 5 else conv.points
            handles.append(kernel.temp(conv.columns(plane) + 4 * threads * nbytes(conv.weight) + 2 * _ALIGN))
    else:
        handles.append(kernel.temp(conv.blocked(conv.outputs, conv.points)))
        if not flat:
            handles.append(kernel.temp(conv.blocked(conv.inputs, conv.source_points)))
        blocked = kernel.temp(conv.blocked_weight(flat=flat))
        if 2 in made and conv.outputs % block:
            handles.append(kernel.temp(_pad(conv.outputs, block) * 4 + _ALIGN))
    if conv.pointwise and conv.groups == 1:
        scratch = threads * conv.inputs * conv.points * 4 + _ALIGN if conv.strided else 0
        if conv.inputs <= _REDUCED_CHANNELS:  # one job for all threads: each sums into its own copy
            scratch += threads * (conv.blocked_weight(flat=False) + 4096) + _ALIGN
        handles.append(kernel.temp(scratch))
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


def _plain_columns(conv: _Convolution) -> int:
    """``finput`` of ConvolutionMM2d.cpp: the patches of the whole batch, unless the source itself serves."""
    padded = any(p > 0 for p in conv.padding)
    if conv.pointwise and not conv.strided and not padded:
        return 0
    inputs = conv.inputs // conv.groups
    return conv.batch * inputs * conv.window * conv.points * conv.source.element_size()


def _plain_forward(kernel: Kernel, conv: _Convolution) -> None:
    _copies(kernel, conv.source, conv.weight, channels_last=False)
    if conv.groups > 1:  # group by group, then concatenated
        kernel.temp(nbytes(kernel.result))
        kernel.free(kernel.temp(nbytes(conv.source) // conv.groups + _plain_columns(conv)))
        kernel.emit()
        return
    columns = kernel.temp(_plain_columns(conv))
    kernel.emit()
    kernel.free(columns)


def _plain_backward(kernel: Kernel, conv: _Convolution, made: dict[int, int]) -> None:
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
