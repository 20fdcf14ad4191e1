"""VGG (Simonyan and Zisserman, arXiv 1409.1556), configurations A, B, D and E."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

_LAYERS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    def __init__(self, depths: tuple[int, ...], batch_norm: bool, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for depth, width in zip(depths, _WIDTHS, strict=True):
            for _ in range(depth):
                layers.append(nn.Conv2d(inputs, width, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU(inplace=True))
                inputs = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(True), nn.Dropout(0.5),
            nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


MODELS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(VGG, depths, False) for name, depths in _LAYERS.items()},
    **{f"{name}_bn": partial(VGG, depths, True) for name, depths in _LAYERS.items()},
}
