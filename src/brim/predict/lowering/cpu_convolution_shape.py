"""One convolution as oneDNN's kernels on the CPU see it: channels, points, and which of the kernels it is for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod

import torch

from brim.predict.lowering.kernel import is_channels_last

# What oneDNN's AVX2 code does (jit_avx2_conv_kernel_f32.cpp); wider is left to columns.
WIDEST_KERNEL = 13  # for the gradient of a weight (kw < 14)
_WIDEST_PADDING = 3  # forward: the points of a row that it computes at once (l_pad <= ur_w)
_WIDEST_PADDED_STRIDE = 7  # forward: wider kernels are not both padded and strided


AVX2_LANES = 8
_AVX512 = "AVX512"  # what the names of its kinds begin with, in both variables below


def lanes() -> int:
    """float32 lanes of a vector register, which is how oneDNN blocks channels.

    oneDNN asks the processor, and ONEDNN_MAX_CPU_ISA (once DNNL_MAX_CPU_ISA) holds it back; ATEN_CPU_CAPABILITY, that
    holds PyTorch's own kernels back, it does not read.
    """
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    allowed = most.upper() in ("", "ALL", "DEFAULT") or most.upper().startswith((_AVX512, "AVX10"))
    return 16 if allowed and torch.cpu._is_avx512_supported() else AVX2_LANES


def padded(count: int, block: int) -> int:
    return -(-count // block) * block


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution in its forward direction: ``source`` has ``inputs`` channels, the result has ``outputs``."""

    source: torch.Tensor
    weight: torch.Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool
    sides: list[int]  # of the result

    @property
    def item_bytes(self) -> int:
        return self.source.element_size()

    @property
    def points(self) -> int:
        """Of the result, per image and channel."""
        return prod(self.sides)

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
        return is_channels_last(self.source) or is_channels_last(self.weight)

    @property
    def flat(self) -> bool:
        """A first layer: fewer channels than a block are read where they are."""
        return self.groups == 1 and self.inputs < lanes()

    def by_gemm(self, block: int) -> bool:
        """Groups whose channels do not fill blocks go through columns."""
        if self.groups == 1 or self.depthwise:
            return False
        return bool(self.inputs // self.groups % block or self.outputs // self.groups % block)

    @property
    def far_padded(self) -> bool:
        """Padded too far for the blocked forward kernel of AVX2."""
        if self.depthwise or self.transposed:
            return False
        far = self.strided and self.weight.size(-1) > _WIDEST_PADDED_STRIDE and any(self.padding)
        return far or self.padding[-1] > _WIDEST_PADDING

    def blocked(self, channels: int, points: int, block: int) -> int:
        return self.batch * padded(channels, block) * points * self.item_bytes

    def blocked_weight(self, block: int, *, flat: bool, pair: int = 1, dense: bool = False) -> int:
        if self.depthwise and not dense:
            return padded(self.groups, block) * self.window * self.item_bytes
        inputs, outputs = self.inputs // self.groups, self.outputs // self.groups
        if self.transposed:
            inputs, outputs = outputs, inputs
        inputs = padded(inputs, pair if flat else block)
        return self.groups * padded(outputs, block) * inputs * self.window * self.item_bytes

    @property
    def most_scratch_bytes(self) -> int:
        """What columns and what goes with them may take: ``scratchpad_limit`` of gemm_convolution_utils.cpp."""
        operands = self.batch * (self.inputs * self.source_points + self.outputs * self.points) + self.weight.numel()
        return min(1 << 30, 15 * torch.get_num_threads() * 4 * operands)

    def columns(self, threads: int) -> int:
        """The patches of one image (of a volume, one plane) and group per thread."""
        unfolded = self.outputs if self.transposed else self.inputs
        small = self.source.shape[2:] if self.transposed else self.sides
        return threads * unfolded // self.groups * self.window * prod(small[-2:]) * 4
