"""Workspaces of convolutions on CUDA, as far as they follow from the arguments.

PyTorch runs the first engine of cuDNN's heuristics with the workspace that it asks for (cudnn/Conv_v8.cpp under
aten/src/ATen/native). Which one that is cannot be known here, so the trace says so and ``estimation/workspaces.py``
has those that are known. What is known beforehand:

* Depthwise convolutions in float32 take PyTorch's own kernels, without any workspace.
* Tensor Cores read channels-last operands whose rows of channels are whole pieces of 16 bytes; cuDNN transposes and
  pads others by itself (NVIDIA, Deep Learning Performance, Convolutional Layers), so the workspace holds every
  operand of another layout once more.
* On the one GPU that was measured (``measurements/convolution_workspaces.jsonl.gz``: an H200, cuDNN 9.19) this holds
  for TF32 too, but not for kernels of one point: those are matrix products in either layout, and the weight's
  gradient is added up in parts, one of each sample (``tests/null/predict/test_cuda_convolutions.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_MEASURED = (9, 0)  # the capability whose workspaces were measured
_READ_BYTES = 16  # that Tensor Cores read at once, of a point's channels
_SUM_BYTES = 4  # of float32, in which parts are added up
_SLACK_BYTES = 16  # of a workspace that is not empty

Direction = Literal["forward", "input", "weight"]
_Workspace = Callable[[Kernel, torch.Tensor, torch.Tensor, torch.Tensor, Direction], int]


def _forward(kernel: Kernel, workspace: _Workspace) -> None:
    x, w = kernel.arg("input"), kernel.arg("weight")
    _note_engine(kernel, x, w)
    for operand in (x, w):
        kernel.temp(_copied_bytes(operand, x, w))
    kernel.emit()
    kernel.temp(workspace(kernel, x, w, kernel.result, "forward"))


def _copied_bytes(operand: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> int:
    """Convolution.cpp, cudnn/ConvShared.cpp: operands of another layout than the one that is taken are copied."""
    layout = _LAST[x.dim()] if _channels_last(x, w) else torch.contiguous_format
    return 0 if operand.is_contiguous(memory_format=layout) else nbytes(operand)


def _backward(kernel: Kernel, workspace: _Workspace) -> None:
    """Convolution.cpp, cudnn/ConvShared.cpp: a gradient that is not dense is copied first."""
    y, x, w = kernel.arg("grad_output"), kernel.arg("input"), kernel.arg("weight")
    _note_engine(kernel, x, w)
    last, x_is_copied = _channels_last(x, w), x.dim() == 3  # of one dimension, to begin with
    if x_is_copied:
        kernel.contiguous(x)
    if not y.is_contiguous(memory_format=_LAST[y.dim()] if last else torch.contiguous_format):
        kernel.temp(nbytes(y))
    gradients = range(sum(kernel.arg("output_mask")[:2]))  # of the input, then of the weight
    if _native_depthwise(kernel, x, w):  # cuda/DepthwiseConv2d.cu: the weight's is first
        for output in reversed(gradients):
            kernel.emit(output)
        return
    # Each gradient reads the other operand.
    directions: tuple[tuple[Direction, torch.Tensor], ...] = (("input", w), ("weight", x))
    made = [one for one, wanted in zip(directions, kernel.arg("output_mask")[:2], strict=True) if wanted]
    for output, (direction, other) in zip(gradients, made, strict=True):
        copy = kernel.temp(0 if other is x and x_is_copied else _copied_bytes(other, x, w))
        kernel.emit(output)
        kernel.free(kernel.temp(workspace(kernel, x, w, y, direction)))
        kernel.free(copy)


def _transposed_bytes(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, direction: Direction) -> int:
    """Return source, weight and result with the channels last and padded, where Tensor Cores need them so."""
    if x.dtype not in _HALF or kernel.arg("groups") != 1 or _channels_last(x, w):
        return 0
    weight = _padded(w.size(0), w) * _padded(w.size(1), w) * prod(w.shape[2:])
    return (_points(x) + _points(y) + weight) * x.element_size()


def _measured_bytes(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, direction: Direction) -> int:
    """As ``_transposed_bytes``, for TF32 too; a kernel of one point is a matrix product in either layout."""
    if x.dim() > 4:
        return _transposed_bytes(kernel, x, w, y, direction)
    tensor_cores = x.dtype in _HALF or (x.dtype is torch.float32 and _allows_tf32())
    if kernel.arg("groups") != 1 or not tensor_cores or _channels_last(x, w):
        return 0
    taps = prod(w.shape[2:])
    if taps == 1 and all(stride == 1 for stride in kernel.arg("stride")):
        return x.size(0) * w.numel() * _SUM_BYTES if direction == "weight" else 0
    weight = _padded(w.size(0), w) * _padded(w.size(1), w) * taps if taps > 1 else 0
    return (_points(x) + _points(y) + weight) * x.element_size() + _SLACK_BYTES


def _points(tensor: torch.Tensor) -> int:
    """Return the elements of an operand whose channels are padded."""
    return tensor.size(0) * _padded(tensor.size(1), tensor) * prod(tensor.shape[2:])


def _padded(channels: int, tensor: torch.Tensor) -> int:
    pieces = _READ_BYTES // tensor.element_size()
    return -(-channels // pieces) * pieces


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


def _allows_tf32() -> bool:
    cudnn: Any = torch.backends.cudnn
    return str(cudnn.conv.fp32_precision) == "tf32"


def rules(capability: tuple[int, int], without_cudnn: Rule) -> dict[torch._ops.OpOverload, Rule]:
    """The rules of convolutions. ``without_cudnn``: of those that PyTorch's own kernels compute."""
    workspace = _measured_bytes if capability == _MEASURED else _transposed_bytes

    def choosing(rule: Callable[[Kernel, _Workspace], None]) -> Rule:
        return lambda kernel: without_cudnn(kernel) if _pads_by_a_stride(kernel) else rule(kernel, workspace)

    return {
        _aten.convolution.default: choosing(_forward),
        _aten.convolution_backward.default: choosing(_backward),
    }


def _pads_by_a_stride(kernel: Kernel) -> bool:
    """Return whether an output is padded by a stride or more, which cuDNN is not asked to do (Convolution.cpp)."""
    pairs = zip(kernel.arg("output_padding"), kernel.arg("stride"), strict=True)
    return bool(kernel.arg("transposed")) and any(padding >= stride for padding, stride in pairs)
