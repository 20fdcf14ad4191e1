"""Inception v3 (Szegedy et al., arXiv 1512.00567) with its auxiliary classifier. Input 299 x 299."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class Conv(nn.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = self.bn(x)
        return functional.relu(x, inplace=True)


class Branches(nn.Module):
    """Branches side by side, concatenated: ``pooled`` behind an average pooling, ``maximum`` adds a max pooling."""

    def __init__(self, *branches: nn.Module, pooled: nn.Module | None = None, maximum: bool = False) -> None:
        super().__init__()
        self.branches, self.pooled, self.maximum = nn.ModuleList(branches), pooled, maximum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [branch(x) for branch in self.branches]
        if self.pooled is not None:
            outputs.append(self.pooled(functional.avg_pool2d(x, 3, 1, 1)))
        if self.maximum:
            outputs.append(functional.max_pool2d(x, 3, 2))
        return torch.cat(outputs, 1)


def _seven(inputs: int, inner: int, last: int, twice: bool) -> nn.Sequential:
    along, across = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    order = (across, along, across, along) if twice else (along, across)
    layers: list[nn.Module] = [Conv(inputs, inner, 1)]
    for index, (kernel, padding) in enumerate(order):
        layers.append(Conv(inner, last if index + 1 == len(order) else inner, kernel, padding=padding))
    return nn.Sequential(*layers)


def _a(inputs: int, pool: int) -> Branches:
    return Branches(
        Conv(inputs, 64, 1),
        nn.Sequential(Conv(inputs, 48, 1), Conv(48, 64, 5, padding=2)),
        nn.Sequential(Conv(inputs, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, padding=1)),
        pooled=Conv(inputs, pool, 1),
    )


def _c(inner: int) -> Branches:
    return Branches(
        Conv(768, 192, 1), _seven(768, inner, 192, False), _seven(768, inner, 192, True), pooled=Conv(768, 192, 1)
    )


def _fork(inputs: int) -> Branches:
    return Branches(Conv(inputs, 384, (1, 3), padding=(0, 1)), Conv(inputs, 384, (3, 1), padding=(1, 0)))


def _e(inputs: int) -> Branches:
    return Branches(
        Conv(inputs, 320, 1),
        nn.Sequential(Conv(inputs, 384, 1), _fork(384)),
        nn.Sequential(Conv(inputs, 448, 1), Conv(448, 384, 3, padding=1), _fork(384)),
        pooled=Conv(inputs, 192, 1),
    )


class Auxiliary(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv0, self.conv1, self.fc = Conv(768, 128, 1), Conv(128, 768, 5), nn.Linear(768, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.avg_pool2d(x, 5, 3)
        x = self.conv1(self.conv0(x))
        x = functional.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(torch.flatten(x, 1))


class InceptionV3(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.first = nn.Sequential(
            Conv(3, 32, 3, 2), Conv(32, 32, 3), Conv(32, 64, 3, padding=1), nn.MaxPool2d(3, 2),
            Conv(64, 80, 1), Conv(80, 192, 3), nn.MaxPool2d(3, 2),
            _a(192, 32), _a(256, 64), _a(288, 64),
            Branches(
                Conv(288, 384, 3, 2), nn.Sequential(Conv(288, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, 2)),
                maximum=True,
            ),
            _c(128), _c(160), _c(160), _c(192),
        )  # fmt: skip
        self.auxiliary = Auxiliary(classes)
        self.last = nn.Sequential(
            Branches(
                nn.Sequential(Conv(768, 192, 1), Conv(192, 320, 3, 2)),
                nn.Sequential(_seven(768, 192, 192, False), Conv(192, 192, 3, 2)),
                maximum=True,
            ),
            _e(1280), _e(2048), nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(), nn.Flatten(1), nn.Linear(2048, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        auxiliary = self.auxiliary(x)
        return self.last(x), auxiliary


MODELS: dict[str, Callable[..., nn.Module]] = {"inception_v3": InceptionV3}
