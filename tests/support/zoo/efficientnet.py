"""EfficientNet B0 to B4 (Tan and Le, arXiv 1905.11946)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from support.zoo.layers import SqueezeExcitation, StochasticDepth, conv_norm_act, divisible

# expansion, kernel, stride, inputs, outputs, repeats: the paper's table 1
_TABLE = (
    (1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2), (6, 3, 2, 40, 80, 3), (6, 5, 1, 80, 112, 3),
    (6, 5, 2, 112, 192, 4), (6, 3, 1, 192, 320, 1),
)  # fmt: skip


class MBConv(nn.Module):
    def __init__(self, expand: int, kernel: int, stride: int, inputs: int, outputs: int, drop: float) -> None:
        super().__init__()
        hidden = divisible(inputs * expand)
        layers: list[nn.Module] = [conv_norm_act(inputs, hidden, 1, act=nn.SiLU)] if hidden != inputs else []
        layers += [
            conv_norm_act(hidden, hidden, kernel, stride=stride, groups=hidden, act=nn.SiLU),
            SqueezeExcitation(hidden, max(1, inputs // 4), act=partial(nn.SiLU, inplace=True)),
            conv_norm_act(hidden, outputs, 1, act=None),
        ]
        self.block = nn.Sequential(*layers)
        self.stochastic_depth = StochasticDepth(drop)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result = self.block(input)
        if self.adds:
            result = self.stochastic_depth(result)
            result += input
        return result


class EfficientNet(nn.Module):
    def __init__(self, width: float, depth: float, dropout: float, classes: int = 1000) -> None:
        super().__init__()
        first = divisible(32 * width)
        layers: list[nn.Module] = [conv_norm_act(3, first, 3, stride=2, act=nn.SiLU)]
        total = sum(math.ceil(row[-1] * depth) for row in _TABLE)
        index, outputs = 0, first
        for expand, kernel, stride, inputs, channels, repeats in _TABLE:
            inputs, outputs = divisible(inputs * width), divisible(channels * width)
            blocks = []
            for number in range(math.ceil(repeats * depth)):
                source = outputs if number else inputs
                blocks.append(MBConv(expand, kernel, 1 if number else stride, source, outputs, 0.2 * index / total))
                index += 1
            layers.append(nn.Sequential(*blocks))
        layers.append(conv_norm_act(outputs, 4 * outputs, 1, act=nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout, inplace=True), nn.Linear(4 * outputs, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "efficientnet_b0": partial(EfficientNet, 1.0, 1.0, 0.2),
    "efficientnet_b1": partial(EfficientNet, 1.0, 1.1, 0.2),
    "efficientnet_b2": partial(EfficientNet, 1.1, 1.2, 0.3),
    "efficientnet_b3": partial(EfficientNet, 1.2, 1.4, 0.3),
    "efficientnet_b4": partial(EfficientNet, 1.4, 1.8, 0.4),
}
