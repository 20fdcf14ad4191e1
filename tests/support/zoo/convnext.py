"""ConvNeXt (Liu et al., arXiv 2201.03545)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from support.zoo.layers import StochasticDepth


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.permute(x, self.dims)


class CNBlock(nn.Module):
    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(dim, dim, 7, padding=3, groups=dim), Permute(0, 2, 3, 1), nn.LayerNorm(dim, eps=1e-6),
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), Permute(0, 3, 1, 2),
        )  # fmt: skip
        self.layer_scale = nn.Parameter(torch.ones(dim, 1, 1) * 1e-6)
        self.stochastic_depth = StochasticDepth(drop)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result = self.layer_scale * self.block(input)
        result = self.stochastic_depth(result)
        result += input
        return result


class ConvNeXt(nn.Module):
    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], drop: float, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6))]
        total, index = sum(depths), 0
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            blocks = []
            for _ in range(depth):
                blocks.append(CNBlock(width, drop * index / (total - 1.0)))
                index += 1
            layers.append(nn.Sequential(*blocks))
            if stage + 1 < len(widths):
                layers.append(nn.Sequential(LayerNorm2d(width, eps=1e-6), nn.Conv2d(width, widths[stage + 1], 2, 2)))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            LayerNorm2d(widths[-1], eps=1e-6), nn.Flatten(1), nn.Linear(widths[-1], classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        return self.classifier(x)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "convnext_tiny": partial(ConvNeXt, (96, 192, 384, 768), (3, 3, 9, 3), 0.1),
    "convnext_small": partial(ConvNeXt, (96, 192, 384, 768), (3, 3, 27, 3), 0.4),
    "convnext_base": partial(ConvNeXt, (128, 256, 512, 1024), (3, 3, 27, 3), 0.5),
    "convnext_large": partial(ConvNeXt, (192, 384, 768, 1536), (3, 3, 27, 3), 0.5),
}
