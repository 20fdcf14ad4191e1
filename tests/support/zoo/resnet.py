"""ResNet (arXiv 1512.03385, stride in the 3x3 convolution), ResNeXt (1611.05431) and Wide ResNet (1605.07146)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(
        self, inputs: int, width: int, stride: int, shortcut: nn.Module | None, groups: int, base: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(
        self, inputs: int, width: int, stride: int, shortcut: nn.Module | None, groups: int, base: int
    ) -> None:
        super().__init__()
        inner = int(width * (base / 64.0)) * groups
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], classes: int = 1000,
        groups: int = 1, base: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs, stages = 64, []
        for index, depth in enumerate(depths):
            width, blocks = 64 << index, []
            for number in range(depth):
                stride = 2 if index and not number else 1
                outputs = width * block.expansion
                shortcut = None
                if stride != 1 or inputs != outputs:
                    shortcut = nn.Sequential(
                        nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                    )
                blocks.append(block(inputs, width, stride, shortcut, groups, base))
                inputs = outputs
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(ResNet, Bottleneck, (3, 4, 6, 3), groups=32, base=4),
    "resnext101_32x8d": partial(ResNet, Bottleneck, (3, 4, 23, 3), groups=32, base=8),
    "wide_resnet50_2": partial(ResNet, Bottleneck, (3, 4, 6, 3), base=128),
    "wide_resnet101_2": partial(ResNet, Bottleneck, (3, 4, 23, 3), base=128),
}
