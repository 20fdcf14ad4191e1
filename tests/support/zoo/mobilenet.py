"""MobileNetV2 (arXiv 1801.04381), MobileNetV3 (1905.02244) and MNASNet (1807.11626)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from support.zoo.layers import SqueezeExcitation, conv_norm_act, divisible


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        self.adds = stride == 1 and inputs == outputs
        hidden = inputs * expand
        layers: list[nn.Module] = [conv_norm_act(inputs, hidden, 1, act=nn.ReLU6)] if expand != 1 else []
        layers += [
            conv_norm_act(hidden, hidden, 3, stride=stride, groups=hidden, act=nn.ReLU6),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    # expansion, channels, repeats, stride: the paper's table 2
    _TABLE = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm_act(3, 32, 3, stride=2, act=nn.ReLU6)]
        inputs = 32
        for expand, outputs, repeats, stride in self._TABLE:
            for number in range(repeats):
                layers.append(InvertedResidual(inputs, outputs, 1 if number else stride, expand))
                inputs = outputs
        layers.append(conv_norm_act(inputs, 1280, 1, act=nn.ReLU6))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        return self.classifier(x)


_Row = tuple[int, int, int, int, bool, str, int]  # inputs, kernel, expanded, outputs, squeeze, activation, stride
_LARGE: tuple[_Row, ...] = (
    (16, 3, 16, 16, False, "RE", 1), (16, 3, 64, 24, False, "RE", 2), (24, 3, 72, 24, False, "RE", 1),
    (24, 5, 72, 40, True, "RE", 2), (40, 5, 120, 40, True, "RE", 1), (40, 5, 120, 40, True, "RE", 1),
    (40, 3, 240, 80, False, "HS", 2), (80, 3, 200, 80, False, "HS", 1), (80, 3, 184, 80, False, "HS", 1),
    (80, 3, 184, 80, False, "HS", 1), (80, 3, 480, 112, True, "HS", 1), (112, 3, 672, 112, True, "HS", 1),
    (112, 5, 672, 160, True, "HS", 2), (160, 5, 960, 160, True, "HS", 1), (160, 5, 960, 160, True, "HS", 1),
)  # fmt: skip
_SMALL: tuple[_Row, ...] = (
    (16, 3, 16, 16, True, "RE", 2), (16, 3, 72, 24, False, "RE", 2), (24, 3, 88, 24, False, "RE", 1),
    (24, 5, 96, 40, True, "HS", 2), (40, 5, 240, 40, True, "HS", 1), (40, 5, 240, 40, True, "HS", 1),
    (40, 5, 120, 48, True, "HS", 1), (48, 5, 144, 48, True, "HS", 1), (48, 5, 288, 96, True, "HS", 2),
    (96, 5, 576, 96, True, "HS", 1), (96, 5, 576, 96, True, "HS", 1),
)  # fmt: skip
_norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)


class BlockV3(nn.Module):
    def __init__(self, row: _Row) -> None:
        super().__init__()
        inputs, kernel, expanded, outputs, squeeze, activation, stride = row
        act = nn.Hardswish if activation == "HS" else nn.ReLU
        self.adds = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if expanded != inputs:
            layers.append(conv_norm_act(inputs, expanded, 1, norm=_norm, act=act))
        layers.append(conv_norm_act(expanded, expanded, kernel, stride=stride, groups=expanded, norm=_norm, act=act))
        if squeeze:
            layers.append(SqueezeExcitation(expanded, divisible(expanded // 4), gate=nn.Hardsigmoid))
        layers.append(conv_norm_act(expanded, outputs, 1, norm=_norm, act=None))
        self.block = nn.Sequential(*layers)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result = self.block(input)
        if self.adds:
            result += input
        return result


class MobileNetV3(nn.Module):
    def __init__(self, rows: tuple[_Row, ...], last: int, classes: int = 1000) -> None:
        super().__init__()
        outputs = rows[-1][3]
        self.features = nn.Sequential(
            conv_norm_act(3, 16, 3, stride=2, norm=_norm, act=nn.Hardswish),
            *(BlockV3(row) for row in rows),
            conv_norm_act(outputs, 6 * outputs, 1, norm=_norm, act=nn.Hardswish),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * outputs, last), nn.Hardswish(inplace=True), nn.Dropout(0.2, inplace=True),
            nn.Linear(last, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


_MNAS_MOMENTUM = 1 - 0.9997


class MnasBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        self.adds = inputs == outputs and stride == 1
        hidden = inputs * expand
        norm = partial(nn.BatchNorm2d, momentum=_MNAS_MOMENTUM)
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, hidden, 1, bias=False), norm(hidden), nn.ReLU(inplace=True),
            nn.Conv2d(hidden, hidden, kernel, padding=kernel // 2, stride=stride, groups=hidden, bias=False),
            norm(hidden), nn.ReLU(inplace=True),
            nn.Conv2d(hidden, outputs, 1, bias=False), norm(outputs),
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layers(input) + input if self.adds else self.layers(input)


class MNASNet(nn.Module):
    # channels, kernel, stride, expansion, repeats: the paper's figure 7
    _TABLE = (
        (24, 3, 2, 3, 3),
        (40, 5, 2, 3, 3),
        (80, 5, 2, 6, 3),
        (96, 3, 1, 6, 2),
        (192, 5, 2, 6, 4),
        (320, 3, 1, 6, 1),
    )

    def __init__(self, alpha: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, momentum=_MNAS_MOMENTUM)
        first, second = divisible(32 * alpha), divisible(16 * alpha)
        layers: list[nn.Module] = [
            nn.Conv2d(3, first, 3, padding=1, stride=2, bias=False), norm(first), nn.ReLU(inplace=True),
            nn.Conv2d(first, first, 3, padding=1, groups=first, bias=False), norm(first), nn.ReLU(inplace=True),
            nn.Conv2d(first, second, 1, bias=False), norm(second),
        ]  # fmt: skip
        inputs = second
        for channels, kernel, stride, expand, repeats in self._TABLE:
            outputs = divisible(channels * alpha)
            blocks = []
            for number in range(repeats):
                blocks.append(MnasBlock(inputs, outputs, kernel, 1 if number else stride, expand))
                inputs = outputs
            layers.append(nn.Sequential(*blocks))
        layers += [nn.Conv2d(inputs, 1280, 1, bias=False), norm(1280), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(1280, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        x = x.mean([2, 3])
        return self.classifier(x)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mobilenet_v2": MobileNetV2,
    "mobilenet_v3_large": partial(MobileNetV3, _LARGE, 1280),
    "mobilenet_v3_small": partial(MobileNetV3, _SMALL, 1024),
    "mnasnet0_5": partial(MNASNet, 0.5),
    "mnasnet0_75": partial(MNASNet, 0.75),
    "mnasnet1_0": partial(MNASNet, 1.0),
    "mnasnet1_3": partial(MNASNet, 1.3),
}
