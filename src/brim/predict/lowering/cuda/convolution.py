"""Workspaces of convolutions on CUDA, as far as they follow from the arguments.

PyTorch runs the first engine of cuDNN's heuristics with the workspace that it asks for (cudnn/Conv_v8.cpp under
aten/src/ATen/native). Which one that is cannot be known here, so the trace says so and ``estimation/bounds.py``
has those that are known. What is known beforehand:

* Depthwise convolutions in float32 take PyTorch's own kernels, without any workspace.
* Tensor Cores read channels-last operands whose rows of channels are whole pieces of 16 bytes; cuDNN transposes and
  pads others by itself (NVIDIA, Deep Learning Performance, Convolutional Layers), so the workspace holds every
  operand of another layout once more.
* On the one GPU that was measured (``measurements/convolution_workspaces.jsonl.gz``: an H200, cuDNN 9.19) the
  transposed operands, and the partial sums of the weight's gradient, are nearly all that there is. ``_Direct`` has
  the rules. Their form was found in all of the measured layers; which operands are transposed is the heuristics'
  choice, and its thresholds are fitted to two thirds (``tests/null/predict/test_cuda_convolutions.py`` compares with
  the others).
"""

from __future__ import annotations

from math import ceil, prod
from typing import Any, Literal

import torch

from brim.predict.lowering.cuda.build_answers import any_kernel
from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_MEASURED = (9, 0)  # the capability whose workspaces were measured
_READ_BYTES = 16  # a point's channels that Tensor Cores read at once
_MULTIPROCESSORS = 132
_TILE = 128  # rows and columns of a block's part of the product
_MOST_SPLITS, _MOST_SPLIT_TILES = 14, 288  # of a sum over points, of 3x3 and larger kernels
_SLACK_BYTES, _SPLIT_SLACK_BYTES = 16, 272  # added to a workspace that is not empty

Direction = Literal["forward", "input", "weight"]


def _forward(kernel: Kernel) -> None:
    x, w = kernel.arg("input"), kernel.arg("weight")
    _note_engine(kernel, x, w)
    for operand in (x, w):
        kernel.temp(_copied_bytes(operand, x, w))
    kernel.emit()
    kernel.temp(_workspace_bytes(kernel, x, w, kernel.result, "forward"))


def _copied_bytes(operand: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> int:
    """Bytes of operands copied to the chosen layout (Convolution.cpp, cudnn/ConvShared.cpp)."""
    layout = _LAST[x.dim()] if _channels_last(x, w) else torch.contiguous_format
    return 0 if operand.is_contiguous(memory_format=layout) else nbytes(operand)


def _backward(kernel: Kernel) -> None:
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
        kernel.passing(_workspace_bytes(kernel, x, w, y, direction))
        kernel.free(copy)


def _transposed_bytes(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> int:
    """Bytes of source, weight and result, channels last and padded, where Tensor Cores need them so."""
    if x.dtype not in _HALF or kernel.arg("groups") != 1 or _channels_last(x, w):
        return 0
    points = sum(t.size(0) * _padded(t.size(1), x) * prod(t.shape[2:]) for t in (x, y))
    return (points + _padded(w.size(0), x) * _padded(w.size(1), x) * prod(w.shape[2:])) * x.element_size()


def _padded(channels: int, operand: torch.Tensor) -> int:
    """Return channels filled up to pieces that Tensor Cores read at once."""
    at_once = _READ_BYTES // operand.element_size()
    return ceil(channels / at_once) * at_once


def _note_engine(kernel: Kernel, x: torch.Tensor, w: torch.Tensor) -> None:
    if not _native_depthwise(kernel, x, w):
        kernel.name("cuDNN's workspace")


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


class _Direct:
    """A convolution of two dimensions at most, in one group, as cuDNN is asked for it: a transposed one is another's
    gradient. An ``image`` of ``channels`` is read into a ``result`` of ``outputs``.

    Of kernels that are larger than one point the operands are multiplied as matrices (implicit GEMM): the forward
    pass adds up over ``depth``, channels and taps; the weight's gradient over the result's points.
    """

    def __init__(
        self, image: torch.Tensor, w: torch.Tensor, result: torch.Tensor, *, strides: list[int], channels_last: bool
    ) -> None:
        self.image, self.result, self.channels_last = image, result, channels_last
        self.channels, self.outputs = image.size(1), result.size(1)
        self.taps = prod(w.shape[2:])  # points of the kernel
        self.points, self.result_points = image.numel() // image.size(1), result.numel() // result.size(1)
        self.image_area, self.result_area = prod(image.shape[2:]), prod(result.shape[2:])  # points of one sample
        self.depth = self.channels * self.taps
        self.products = self.result_points * self.outputs * self.depth
        self.strided = any(stride > 1 for stride in strides)
        self.patches = self.taps > 1 and list(strides) == list(w.shape[2:])  # kernels side by side
        self.half = image.element_size() == 2
        # A matrix product for each sample, which cuBLAS-like kernels do in either layout.
        self.pointwise = self.taps == 1 and not self.strided
        # Fewer channels than are read at once, as in the first layer.
        self.few = self.channels < _READ_BYTES // image.element_size()

    def _copies(self, image: bool, result: bool, weight: bool) -> int:
        """Bytes of the operands' copies."""
        channels, outputs = _padded(self.channels, self.image), _padded(self.outputs, self.image)
        elements = image * self.points * channels + result * self.result_points * outputs
        return (elements + weight * channels * outputs * self.taps) * self.image.element_size()

    def _is_padded(self) -> tuple[bool, bool]:
        """Return whether the image's and the result's channels are no whole pieces."""
        image, result = (_padded(count, self.image) != count for count in (self.channels, self.outputs))
        return image, result

    def workspace_bytes(self, direction: Direction) -> int:
        if self.channels_last:
            bytes = self._padding(direction)
        elif self.pointwise:
            bytes = self._pointwise(direction)
        else:
            bytes = self._copies(*self._transposed(direction))
        if direction != "weight" or (self.pointwise and not self.channels_last):
            return bytes + _SLACK_BYTES * (bytes > 0 and not self._by_sample(direction))
        slack = _SPLIT_SLACK_BYTES if self.channels_last and self.pointwise else _SLACK_BYTES
        if not self.channels_last and not bytes:  # too small to be worth Tensor Cores
            return 0
        bytes += self._splits() * self._sum_bytes()
        return bytes + slack * (bytes > 0)

    # -- operands that lie as they are read: only channels that are no whole pieces are padded -----------------------

    def _padding(self, direction: Direction) -> int:
        image, result = self._is_padded()
        if self.taps == 1 and not (self.half and self.strided and direction == "input"):
            return 0
        if direction == "forward":
            if self.half:
                image, result = image and (self.depth > 392 or self.products > 2.6e9), result and self.depth > 98
            else:
                large_first = self.few and self.products > 2.6e9
                image, result = self.taps >= 49 or large_first, result and self.depth > 3040
        elif not self.half and direction == "input":
            whole = self.few and (self.taps >= 16 or self.strided)
            image, result = whole, whole or result
        elif not self.half:
            image = result = self.few and self.depth >= 98
        return self._copies(image, result, image or result)

    # -- matrix products ---------------------------------------------------------------------------------------------

    def _by_sample(self, direction: Direction) -> bool:
        """Return whether the weight's gradient is summed in one part per sample, as it is if these are small."""
        numbers = self.channels * self.outputs
        large = numbers >= 1 << 19 or (numbers >= 1 << 18 and self.result_points >= 6272)
        return self.pointwise and not self.channels_last and direction == "weight" and not large

    def _pointwise(self, direction: Direction) -> int:
        if self._by_sample(direction):
            return self.result_points // self.result_area * self.channels * self.outputs * 4
        transposed = direction == "weight" or self.channels * self.outputs >= 1 << 20
        return self._copies(transposed, transposed, False)

    # -- implicit GEMM: the operands are transposed where the work is worth it -------------------------------------

    def _transposed(self, direction: Direction) -> tuple[bool, bool, bool]:
        """Flags of transposed operands: image, result, weight. One tap's weight has one layout, unless padded."""
        if not getattr(self, f"_transposes_{direction}")():
            return False, False, False
        weight = self.taps > 1 or (self.half and any(self._is_padded()) and direction == "input")
        return True, not (direction == "forward" and self._result_is_written_in_place()), weight

    def _transposes_forward(self) -> bool:
        if self.few and self.half:
            first = self.depth >= 98 and self.products >= 5e8
            many = self.outputs >= 192 and self.products >= 1 << 28
            return self.taps > 1 and (self.depth >= 512 or first or many)
        if self.few:
            return self.depth >= 98 and self.products >= 1e8
        return self.half or self.taps == 1 or self.depth > 544 or self.result_area > 59 * 59

    def _result_is_written_in_place(self) -> bool:
        """Return whether the result is written in PyTorch's layout, as are short sums in float32."""
        if self.half or self.few or self.taps == 1:
            return False
        result_bytes = self._copies(False, True, False)
        return (self.depth <= 1384 and result_bytes <= 484096) or (
            544 < self.depth <= 882 and self.image_area <= 120 * 120
        )

    def _transposes_input(self) -> bool:
        if self.patches:
            return False
        if self.half:
            return True
        if self.taps == 1:
            return self.channels * self.outputs >= 1 << 17
        numbers = self.points * self.channels + self.result_points * self.outputs + self.depth * self.outputs
        return self.products > 50 * numbers * self.image.element_size() or (
            self.depth >= 882 and self.points > 10_368
        )

    def _transposes_weight(self) -> bool:
        if self.half:
            return self.products >= 8e6
        worth = not (self.few and self.depth < 98) and self._copies(True, True, False) > 292_352
        return self.products >= 8e6 and worth

    # -- the weight's gradient: blocks of threads share a sum over points, and leave their parts in float32 --------

    def _sum_bytes(self) -> int:
        if self.channels_last:
            return _padded(self.channels, self.image) * _padded(self.outputs, self.image) * self.taps * 4
        return self.channels * self.outputs * self.taps * 4

    def _splits(self) -> int:
        """The number of parts that keeps all multiprocessors busy, each with enough points for a block of threads."""
        if self.channels_last and (not self.half or (self.taps == 1 and self.strided)):
            return 0
        if self.pointwise:
            if not self.channels_last:
                return 0
            tiles = ceil(self.outputs / _TILE) * ceil(self.depth / _TILE)
            splits = min(_MULTIPROCESSORS // tiles, round(self.result_points / 1344))
        else:
            tiles = max(1, self.outputs * self.depth // _TILE**2)
            splits = self.result_points * 9 // ((3584 if self.half else 896) * tiles)
            if self.half:  # one part is added to in place
                splits = min(_MOST_SPLITS, splits, _MOST_SPLIT_TILES // tiles) - 1
            else:
                side = _TILE if self.outputs >= _TILE else _TILE // 2
                blocks = ceil(self.outputs / side) * ceil(self.depth / side)
                splits = min(_MULTIPROCESSORS // blocks, splits)
        return splits if splits > 1 else 0


_OTHER_WAY: dict[Direction, Direction] = {"forward": "input", "input": "forward", "weight": "weight"}


def _workspace_bytes(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, direction: Direction) -> int:
    """The workspace by the measured rules; where none holds, operands are transposed."""
    if x.dim() > 4 or kernel.capability != _MEASURED:
        return _transposed_bytes(kernel, x, w, y)
    tensor_cores = x.dtype in _HALF or (x.dtype is torch.float32 and _allows_tf32())
    if kernel.arg("groups") != 1 or not tensor_cores or not (x.numel() and y.numel()):
        return 0
    channels_last = _channels_last(x, w)
    if kernel.arg("transposed"):
        x, y, direction = y, x, _OTHER_WAY[direction]
    direct = _Direct(x, w, y, strides=kernel.arg("stride"), channels_last=channels_last)
    return direct.workspace_bytes(direction)


def _allows_tf32() -> bool:
    cudnn: Any = torch.backends.cudnn
    return str(cudnn.conv.fp32_precision) == "tf32"


def _pads_by_a_stride(kernel: Kernel) -> bool:
    """Return whether an output is padded by a stride or more, which cuDNN is not asked to do (Convolution.cpp)."""
    pairs = zip(kernel.arg("output_padding"), kernel.arg("stride"), strict=True)
    return bool(kernel.arg("transposed")) and any(padding >= stride for padding, stride in pairs)


def _by_cudnn(rule: Rule) -> Rule:
    return lambda kernel: (any_kernel if _pads_by_a_stride(kernel) else rule)(kernel)


RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.convolution.default: _by_cudnn(_forward),
    _aten.convolution_backward.default: _by_cudnn(_backward),
}
