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

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Literal

import torch

from brim.predict.lowering.kernel import Kernel, Rule, nbytes

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CHANNELS = 8  # of half precision that Tensor Cores read at once
_MEASURED = (9, 0)  # the capability whose workspaces were measured
_READ_BYTES = 16  # a point's channels that Tensor Cores read at once
_MULTIPROCESSORS = 132
_TILE = 128  # rows and columns of a block's part of the product
_MOST_SPLITS, _MOST_SPLIT_TILES = 14, 288  # of a sum over points, of 3x3 and larger kernels
_SLACK_BYTES, _SPLIT_SLACK_BYTES = 16, 272  # added to a workspace that is not empty

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
    """Bytes of operands copied to the chosen layout (Convolution.cpp, cudnn/ConvShared.cpp)."""
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
    """Bytes of source, weight and result, channels last and padded, where Tensor Cores need them so."""
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


@dataclass(frozen=True, kw_only=True)
class _Direct:
    """A convolution of two dimensions at most, in one group, as cuDNN is asked for it: a transposed one is another's
    gradient. An ``image`` of ``channels`` is read into a ``result`` of ``outputs``; sizes count both.

    Of kernels that are larger than one point the operands are multiplied as matrices (implicit GEMM): the forward
    pass adds up over ``depth``, channels and taps; the weight's gradient over the result's points.
    """

    channels: int
    outputs: int
    taps: int  # points of the kernel
    points: int  # of the image, all samples
    result_points: int
    image_area: int  # points of one sample
    result_area: int
    strided: bool
    patches: bool  # kernels side by side
    element_bytes: int
    channels_last: bool

    @property
    def depth(self) -> int:
        return self.channels * self.taps

    @property
    def products(self) -> int:
        return self.result_points * self.outputs * self.depth

    @property
    def half(self) -> bool:
        return self.element_bytes == 2

    @property
    def pointwise(self) -> bool:
        """Return whether it is a matrix product for each sample, which cuBLAS-like kernels do in either layout."""
        return self.taps == 1 and not self.strided

    @property
    def _channels_at_once(self) -> int:
        return _READ_BYTES // self.element_bytes

    @property
    def few(self) -> bool:
        """Return whether it has fewer channels than are read at once, as in the first layer."""
        return self.channels < self._channels_at_once

    def _padded(self, channels: int) -> int:
        return ceil(channels / self._channels_at_once) * self._channels_at_once

    def _copies(self, image: bool, result: bool, weight: bool) -> int:
        """Bytes of the operands' copies."""
        channels, outputs = self._padded(self.channels), self._padded(self.outputs)
        elements = image * self.points * channels + result * self.result_points * outputs
        return (elements + weight * channels * outputs * self.taps) * self.element_bytes

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
        image, result = (self._padded(number) != number for number in (self.channels, self.outputs))
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
        odd = self._padded(self.channels) != self.channels or self._padded(self.outputs) != self.outputs
        weight = self.taps > 1 or (self.half and odd and direction == "input")
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
        return self.products > 50 * numbers * self.element_bytes or (self.depth >= 882 and self.points > 10_368)

    def _transposes_weight(self) -> bool:
        if self.half:
            return self.products >= 8e6
        worth = not (self.few and self.depth < 98) and self._copies(True, True, False) > 292_352
        return self.products >= 8e6 and worth

    # -- the weight's gradient: blocks of threads share a sum over points, and leave their parts in float32 --------

    def _sum_bytes(self) -> int:
        if self.channels_last:
            return self._padded(self.channels) * self._padded(self.outputs) * self.taps * 4
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


def _measured_bytes(kernel: Kernel, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, direction: Direction) -> int:
    """The workspace by the measured rules; where none holds, operands are transposed as on other GPUs."""
    if x.dim() > 4:
        return _transposed_bytes(kernel, x, w, y, direction)
    tensor_cores = x.dtype in _HALF or (x.dtype is torch.float32 and _allows_tf32())
    if kernel.arg("groups") != 1 or not tensor_cores or not (x.numel() and y.numel()):
        return 0
    channels_last = _channels_last(x, w)
    if kernel.arg("transposed"):
        x, y, direction = y, x, _OTHER_WAY[direction]
    taps, strides = prod(w.shape[2:]), kernel.arg("stride")
    direct = _Direct(
        channels=x.size(1), outputs=y.size(1), taps=taps, points=x.numel() // x.size(1),
        result_points=y.numel() // y.size(1), image_area=prod(x.shape[2:]), result_area=prod(y.shape[2:]),
        strided=any(stride > 1 for stride in strides), patches=taps > 1 and list(strides) == list(w.shape[2:]),
        element_bytes=x.element_size(), channels_last=channels_last,
    )  # fmt: skip
    return direct.workspace_bytes(direction)


def _allows_tf32() -> bool:
    cudnn: Any = torch.backends.cudnn
    return str(cudnn.conv.fp32_precision) == "tf32"


def rules(capability: tuple[int, int], without_cudnn: Rule) -> dict[torch._ops.OpOverload, Rule]:
    """The rules of convolutions. ``without_cudnn``: for those that PyTorch's own kernels compute."""
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
