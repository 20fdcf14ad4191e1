"""ResNet-152 (He et al., arXiv 1512.03385, table 1) on 224 x 224 pixels, as a user would give it to ``brim plan``."""

from __future__ import annotations

import torch
from torch import nn

DEPTHS, WIDTHS = (3, 8, 36, 3), (64, 128, 256, 512)
ROWS = 224


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.relu(self.bn1(self.conv1(x)))
        made = self.relu(self.bn2(self.conv2(made)))
        return self.relu(self.bn3(self.conv3(made)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], 64
        for index, (depth, width) in enumerate(zip(DEPTHS, WIDTHS, strict=True)):
            blocks = []
            for number in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if index and not number else 1))
                inputs = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.pool(self.stem(x)))
        return self.head(x.mean((2, 3)))


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return ResNet(), (torch.zeros(ROWS, 3, 224, 224),)
