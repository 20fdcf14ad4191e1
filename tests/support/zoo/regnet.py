"""RegNet X and Y (Radosavovic et al., arXiv 2003.13678): widths from the quantised linear rule of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from support.zoo.layers import SqueezeExcitation, conv_norm_act


class Block(nn.Module):
    """1x1, grouped 3x3, squeeze-and-excitation (Y only), 1x1."""

    def __init__(self, inputs: int, outputs: int, stride: int, group_width: int, se_ratio: float) -> None:
        super().__init__()
        self.proj = (
            conv_norm_act(inputs, outputs, 1, stride=stride, act=None) if inputs != outputs or stride > 1 else None
        )
        layers = [
            conv_norm_act(inputs, outputs, 1),
            conv_norm_act(outputs, outputs, 3, stride=stride, groups=outputs // group_width),
        ]
        if se_ratio:
            layers.append(SqueezeExcitation(outputs, round(se_ratio * inputs)))  # type: ignore[arg-type]
        layers.append(conv_norm_act(outputs, outputs, 1, act=None))
        self.f = nn.Sequential(*layers)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x) + self.f(x) if self.proj is not None else x + self.f(x)
        return self.activation(x)


def _stages(depth: int, w_0: int, w_a: float, w_m: float, group_width: int) -> list[tuple[int, int, int]]:
    """(width, depth, group width) of each stage, by the paper's section 3.3."""
    continuous = [w_0 + w_a * j for j in range(depth)]
    capacity = [round(math.log(u / w_0) / math.log(w_m)) for u in continuous]
    widths = [int(round(w_0 * w_m**s / 8) * 8) for s in capacity]
    starts = [0, *(i for i in range(1, depth) if widths[i] != widths[i - 1]), depth]
    stages = []
    for begin, end in pairwise(starts):
        group = min(group_width, widths[begin])
        width = widths[begin]
        fitted = max(group, int(width + group / 2) // group * group)
        fitted = fitted + group if fitted < 0.9 * width else fitted
        stages.append((fitted, end - begin, group))
    return stages


class RegNet(nn.Module):
    def __init__(
        self,
        depth: int,
        w_0: int,
        w_a: float,
        w_m: float,
        group_width: int,
        se_ratio: float = 0.0,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = conv_norm_act(3, 32, 3, stride=2)
        inputs, stages = 32, []
        for width, count, group in _stages(depth, w_0, w_a, w_m, group_width):
            blocks = []
            for number in range(count):
                blocks.append(Block(inputs, width, 1 if number else 2, group, se_ratio))
                inputs = width
            stages.append(nn.Sequential(*blocks))
        self.trunk_output = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.trunk_output(x)
        x = self.avgpool(x)
        x = x.flatten(start_dim=1)
        return self.fc(x)


_X = {
    "400mf": (22, 24, 24.48, 2.54, 16),
    "800mf": (16, 56, 35.73, 2.28, 16),
    "1_6gf": (18, 80, 34.01, 2.25, 24),
    "3_2gf": (25, 88, 26.31, 2.25, 48),
    "8gf": (23, 80, 49.56, 2.88, 120),
}
_Y = {
    "400mf": (16, 48, 27.89, 2.09, 8),
    "800mf": (14, 56, 38.84, 2.4, 16),
    "1_6gf": (27, 48, 20.71, 2.65, 24),
    "3_2gf": (21, 80, 42.63, 2.66, 24),
    "8gf": (17, 192, 76.82, 2.19, 56),
}
MODELS: dict[str, Callable[..., nn.Module]] = {
    **{f"regnet_x_{size}": partial(RegNet, *row) for size, row in _X.items()},
    **{f"regnet_y_{size}": partial(RegNet, *row, 0.25) for size, row in _Y.items()},
}
