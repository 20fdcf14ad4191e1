"""Layers that several CNNs share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

NormLayer = Callable[[int], nn.Module]


def conv_norm_act(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    norm: NormLayer = nn.BatchNorm2d,
    act: Callable[..., nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution without bias, normalisation and an in-place activation."""
    padding = (kernel - 1) // 2 * dilation
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation=dilation, groups=groups, bias=False)
    layers: list[nn.Module] = [conv, norm(outputs)]
    if act is not None:
        layers.append(act(inplace=True))
    return nn.Sequential(*layers)


class SqueezeExcitation(nn.Module):
    """Channel gates (Hu et al., arXiv 1709.01507)."""

    def __init__(
        self,
        inputs: int,
        squeezed: int,
        act: Callable[[], nn.Module] = nn.ReLU,
        gate: Callable[[], nn.Module] = nn.Sigmoid,
    ) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(inputs, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, inputs, 1)
        self.activation = act()
        self.scale_activation = gate()

    def _scale(self, input: torch.Tensor) -> torch.Tensor:
        scale = self.avgpool(input)
        scale = self.fc1(scale)
        scale = self.activation(scale)
        scale = self.fc2(scale)
        return self.scale_activation(scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale = self._scale(input)
        return scale * input


class StochasticDepth(nn.Module):
    """Drops the branch of whole samples while training (Huang et al., arXiv 1603.09382)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return input
        survival = 1.0 - self.p
        noise = torch.empty([input.shape[0]] + [1] * (input.ndim - 1), dtype=input.dtype, device=input.device)
        noise = noise.bernoulli_(survival)
        if survival > 0.0:
            noise.div_(survival)
        return input * noise


def divisible(value: float, divisor: int = 8) -> int:
    """The nearest multiple that is not more than 10 % smaller (MobileNet's rounding)."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded
