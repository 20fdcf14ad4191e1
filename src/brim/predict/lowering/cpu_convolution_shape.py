"""One convolution as oneDNN's kernels on the CPU see it: channels, points, and which of the kernels it is for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from brim.predict.lowering.kernel import is_channels_last

# What oneDNN's AVX2 code does (jit_avx2_conv_kernel_f32.cpp); wider is left to columns.
WIDEST_KERNEL = 13  # for the gradient of a weight (kw < 14)
_WIDEST_PADDING = 3  # forward: the points of a row that it computes at once (l_pad <= ur_w)
_WIDEST_PADDED_STRIDE = 7  # forward: wider kernels are not both padded and strided


def lanes() -> int:
    """float32 lanes of a vector register, which is how oneDNN blocks channels."""
    return 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


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

    @property
    def by_gemm(self) -> bool:
        """Groups whose channels do not fill blocks go through columns."""
        block = lanes()
        if self.groups == 1 or self.depthwise:
            return False
        return bool(self.inputs // self.groups % block or self.outputs // self.groups % block)

    @property
    def far_padded(self) -> bool:
        """Padded too far for the blocked forward kernel."""
        if lanes() != 8 or self.depthwise or self.transposed:
            return False
        far = self.strided and self.weight.size(-1) > _WIDEST_PADDED_STRIDE and any(self.padding)
        return far or self.padding[-1] > _WIDEST_PADDING

    @property
    def by_strided_brgemm(self) -> bool:
        """oneDNN's kernel for gradients of strided sources does it (jit_brgemm_conv_bwd_utils.cpp, ``init_jcp``).

        The gradient of the source, and of a transposed convolution the result itself.
        """
        if not self.strided or self.dilated:
            return False
        reduced = self.inputs if self.transposed else self.outputs
        return self.groups == 1 or reduced // self.groups > lanes()

    def blocked(self, channels: int, points: int) -> int:
        return self.batch * padded(channels, lanes()) * points * 4

    def blocked_weight(self, *, flat: bool) -> int:
        block = lanes()
        if self.depthwise:
            return padded(self.groups, block) * self.window * 4
        inputs = self.inputs // self.groups
        inputs = inputs if flat else padded(inputs, block)
        return self.groups * padded(self.outputs // self.groups, block) * inputs * self.window * 4

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
