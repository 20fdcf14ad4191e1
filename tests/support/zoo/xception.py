"""Xception (Chollet, arXiv 1610.02357). Input 299 x 299."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn


class Separable(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pointwise(self.depthwise(x))


class Block(nn.Module):
    def __init__(self, widths: tuple[int, ...], stride: int = 1, begins_with_relu: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            if index or begins_with_relu:
                layers.append(nn.ReLU(inplace=index > 0))
            layers += [Separable(inputs, outputs), nn.BatchNorm2d(outputs)]
        if stride != 1:
            layers.append(nn.MaxPool2d(3, stride, 1))
        self.rep = nn.Sequential(*layers)
        self.skip = None
        if widths[0] != widths[-1] or stride != 1:
            self.skip = nn.Sequential(
                nn.Conv2d(widths[0], widths[-1], 1, stride, bias=False), nn.BatchNorm2d(widths[-1])
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.rep(x)
        out += self.skip(x) if self.skip is not None else x
        return out


class Xception(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            Block((64, 128, 128), 2, False), Block((128, 256, 256), 2), Block((256, 728, 728), 2),
            *(Block((728, 728, 728, 728)) for _ in range(8)),
            Block((728, 728, 1024), 2),
            Separable(1024, 1536), nn.BatchNorm2d(1536), nn.ReLU(inplace=True),
            Separable(1536, 2048), nn.BatchNorm2d(2048), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.fc = nn.Linear(2048, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(torch.flatten(x, 1))


MODELS: dict[str, Callable[..., nn.Module]] = {"xception": Xception}
