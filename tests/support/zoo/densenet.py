"""DenseNet (Huang et al., arXiv 1608.06993)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        bottleneck = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(bottleneck)))


class DenseBlock(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self, growth: int, depths: tuple[int, ...], width: int, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        for index, depth in enumerate(depths):
            layers.append(DenseBlock([DenseLayer(width + number * growth, growth) for number in range(depth)]))
            width += depth * growth
            if index + 1 < len(depths):
                layers += [
                    nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2, 2),
                ]  # fmt: skip
                width //= 2
        layers.append(nn.BatchNorm2d(width))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.features(x)
        out = nn.functional.relu(features, inplace=True)
        out = nn.functional.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "densenet121": partial(DenseNet, 32, (6, 12, 24, 16), 64),
    "densenet161": partial(DenseNet, 48, (6, 12, 36, 24), 96),
    "densenet169": partial(DenseNet, 32, (6, 12, 32, 32), 64),
    "densenet201": partial(DenseNet, 32, (6, 12, 48, 32), 64),
}
