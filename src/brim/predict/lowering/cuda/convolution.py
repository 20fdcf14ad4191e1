"""What convolutions take on CUDA besides their outputs, as far as it follows from their arguments.

PyTorch runs the first engine of cuDNN's heuristics with the workspace that it asks for (cudnn/Conv_v8.cpp under
aten/src/ATen/native). Which one that is cannot be known here, so the trace says so and ``estimation/workspaces.py``
has those that are known. Two cases are known beforehand:

* Depthwise convolutions in float32 take PyTorch's own kernels, without any workspace.
* In half precision Tensor Cores do the work. They read channels-last operands of a multiple of eight channels; cuDNN
  transposes and pads others by itself (NVIDIA, Deep Learning Performance, Convolutional Layers), so the workspace
  holds every operand of another layout once more.
"""

from __future__ import annotations

from math import prod

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CHANNELS = 8  # of half precision that Tensor Cores read at once


def _forward(kernel: Kernel) -> None:
    x, w = kernel.arg("input"), kernel.arg("weight")
    _note_engine(kernel, x, w)
    for operand in (x, w):
        kernel.temp(_copied_bytes(operand, x, w))
    kernel.emit()
    kernel.temp(_transposed_bytes(kernel, x, w, kernel.result))


def _copied_bytes(operand: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> int:
    """Convolution.cpp, cudnn/ConvShared.cpp: operands of another layout than the one that is taken are copied."""
    layout = _LAST[x.dim()] if _channels_last(x, w) else torch.contiguous_format
    return 0 if operand.is_contiguous(memory_format=layout) else nbytes(operand)


def _backward(kernel: Kernel) -> None:
    """Convolution.cpp, cudnn/ConvShared.cpp: a gradient that is not dense is copied first."""
    y, x, w = kernel.arg("grad_output"), kernel.arg("input"), kernel.arg("weight")
    _note_engine(kernel, x, w)
    last = _channels_last(x, w)
    if not y.is_contiguous(memory_format=_LAST[y.dim()] if last else torch.contiguous_format):
        kernel.temp(nbytes(y))
    gradients = range(sum(kernel.arg("output_mask")[:2]))  # of the input, then of the weight
    if _native_depthwise(kernel, x, w):  # cuda/DepthwiseConv2d.cu: the weight's is first
        for output in reversed(gradients):
            kernel.emit(output)
        return
    workspace = _transposed_bytes(kernel, x, w, y)
    # Each gradient reads the other operand.
    read = [other for other, wanted in zip((w, x), kernel.arg("output_mask")[:2], strict=True) if wanted]
    for output, other in zip(gradients, read, strict=True):
        copy = kernel.temp(_copied_bytes(other, x, w))
        kernel.emit(output)
        kernel.free(kernel.temp(workspace))
        kernel.free(copy)


def _transposed_bytes(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> int:
    """Source, weight and result with the channels last and padded, where Tensor Cores need them so."""
    if x.dtype not in _HALF or kernel.arg("groups") != 1 or _channels_last(x, w):
        return 0
    points = x.size(0) * _padded(x.size(1)) * prod(x.shape[2:]) + y.size(0) * _padded(y.size(1)) * prod(y.shape[2:])
    return (points + _padded(w.size(0)) * _padded(w.size(1)) * prod(w.shape[2:])) * x.element_size()


def _padded(channels: int) -> int:
    return -(-channels // _CHANNELS) * _CHANNELS


def _note_engine(kernel: Kernel, x: torch.Tensor, w: torch.Tensor) -> None:
    if not _native_depthwise(kernel, x, w):
        kernel.unknown = f"{kernel.func.overloadpacket}: cuDNN's workspace"


def _native_depthwise(kernel: Kernel, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Convolution.cpp, ``use_cudnn_depthwise`` (half precision may go to cuDNN); cuda/DepthwiseConv2d.cu."""
    groups = kernel.arg("groups")
    depthwise = groups > 1 and groups == x.size(1) and w.size(0) % groups == 0 and not kernel.arg("transposed")
    return bool(depthwise and x.dtype not in _HALF and not _channels_last(x, w))


def _channels_last(*operands: torch.Tensor) -> bool:
    """ConvUtils.h, ``cudnn_conv_suggest_memory_format``: either operand's layout decides."""
    layout = _LAST.get(operands[0].dim())
    return layout is not None and any(
        t.is_contiguous(memory_format=layout) and not t.is_contiguous() for t in operands
    )


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
}
