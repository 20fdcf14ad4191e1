"""A convolution as oneDNN's direct kernels see it: sides of three, channels of a group, paddings on both ends.

A transposed convolution is the gradient of another one, and is turned round here: what is its source there is the
result here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from brim.predict.lowering.cpu_convolution_shape import Convolution

_T = TypeVar("_T")
Sides = tuple[int, int, int]  # depth, height, width


def _three(values: Sequence[_T], missing: _T) -> tuple[_T, _T, _T]:
    first, second, third = [*[missing] * (3 - len(values)), *values]
    return first, second, third


@dataclass(frozen=True, kw_only=True)
class Direct:
    """``inputs`` and ``outputs`` are channels of one group."""

    rank: int
    batch: int
    groups: int
    inputs: int
    outputs: int
    source: Sides
    result: Sides
    kernel: Sides
    stride: Sides
    dilation: Sides
    before: Sides  # padding

    @staticmethod
    def of(conv: Convolution) -> Direct:
        source, result = list(conv.source.shape[2:]), list(conv.sides)
        inputs, outputs = conv.inputs // conv.groups, conv.outputs // conv.groups
        if conv.transposed:
            source, result, inputs, outputs = result, source, outputs, inputs
        rank = max(2, len(source))  # PyTorch gives it lines as images of one row

        def full(given: Sequence[int]) -> list[int]:
            return list(given) if len(given) == len(source) else [given[0]] * len(source)

        return Direct(
            rank=rank, batch=conv.batch, groups=conv.groups, inputs=inputs, outputs=outputs,
            source=_three(source, 1), result=_three(result, 1), kernel=_three(conv.weight.shape[2:], 1),
            stride=_three(full(conv.stride), 1), dilation=_three(full(conv.dilation), 1),
            before=_three(full(conv.padding), 0),
        )  # fmt: skip

    @property
    def extent(self) -> Sides:
        """What a dilated kernel reaches over."""
        reach = [(size - 1) * apart + 1 for size, apart in zip(self.kernel, self.dilation, strict=True)]
        return reach[0], reach[1], reach[2]

    @property
    def after(self) -> Sides:
        """Padding at the ends, below zero where points of the source are not read."""
        sizes = zip(self.source, self.result, self.extent, self.stride, self.before, strict=True)
        found = [(out - 1) * step + reach - side - pad for side, out, reach, step, pad in sizes]
        return found[0], found[1], found[2]

    @property
    def window(self) -> int:
        return prod(self.kernel)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inputs == self.outputs == 1

    @property
    def dilated(self) -> bool:
        return max(self.dilation) > 1

    @property
    def narrow(self) -> bool:
        """A first layer, whose few channels are read where they are (``is_1stconv``)."""
        return self.groups == 1 and self.inputs < 16

    @property
    def pointwise(self) -> bool:
        """For the kernel of 1x1 convolutions; strides are taken out of the source first, where rows end with one."""
        if self.window != 1 or self.groups != 1 or any(self.before):
            return False
        if max(self.stride) == 1:
            return not any(self.after)
        ends = zip(self.result, self.stride, self.source, strict=True)
        return self.rank < 3 and all(out * step == side for out, step, side in ends)
