"""Networks written out here, for what transformers does not have: plain CNNs and diffusion models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IMAGES = ("vgg", "mobilenet")
_CLASSES = 1000


def make(name: str, *, tiny: bool = False) -> nn.Module:
    makers: dict[str, Callable[[bool], nn.Module]] = {
        "vgg": Vgg, "mobilenet": MobileNet, "unet": UNet, "dit": DiffusionTransformer,
    }  # fmt: skip
    return makers[name](tiny)


def diffusion_inputs(name: str, batch: int, size: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    sample = torch.zeros(batch, 4, size, size, dtype=dtype, device=device)
    return {"sample": sample, "time": torch.zeros(batch, dtype=dtype, device=device)}


class Vgg(nn.Module):
    """Simonyan and Zisserman, arXiv 1409.1556, configuration A with batch norm."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        widths = (8, 16, 16) if tiny else (64, 128, 256, 256, 512, 512, 512, 512)
        pools = (0, 1, 2) if tiny else (0, 1, 3, 5, 7)
        layers: list[nn.Module] = []
        before = 3
        for index, width in enumerate(widths):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            before = width
            if index in pools:
                layers.append(nn.MaxPool2d(2))
        hidden = 32 if tiny else 4096
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(before * 49, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, _CLASSES),
        )  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = self.classifier(self.features(pixel_values))
        return made


class _Inverted(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 6 * before
        self.adds = stride == 1 and before == after
        self.body = nn.Sequential(
            nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True), nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x)
        return x + made if self.adds else made


class MobileNet(nn.Module):
    """Inverted residuals as in Sandler et al., arXiv 1801.04381."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        plan = ((8, 1, 1), (16, 2, 2)) if tiny else (
            (16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)
        )  # fmt: skip
        before = 8 if tiny else 32
        layers: list[nn.Module] = [nn.Conv2d(3, before, 3, 2, 1, bias=False), nn.BatchNorm2d(before), nn.ReLU6(True)]
        for width, count, stride in plan:
            for index in range(count):
                layers.append(_Inverted(before, width, stride if index == 0 else 1))
                before = width
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, _CLASSES))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = self.body(pixel_values)
        return made


def _waves(time: torch.Tensor, width: int) -> torch.Tensor:
    rates = torch.exp(torch.arange(width // 2, device=time.device) * (-math.log(10000) / (width // 2)))
    angles = time.float()[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(time.dtype)


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, time_width: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(groups, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Linear(time_width, after)
        self.second = nn.Sequential(nn.GroupNorm(groups, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        made = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        skip: torch.Tensor = self.skip(x)
        return skip + self.second(made)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(groups, width), heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, height, length = x.shape
        rows = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into(rows).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).reshape(batch, width, height, length)


class UNet(nn.Module):
    """A denoising U-Net: residual blocks with time, attention at the two lower levels."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        widths, self.time_width, groups = ((16, 32), 32, 8) if tiny else ((192, 384, 768), 768, 32)
        self.time = nn.Sequential(
            nn.Linear(self.time_width, self.time_width), nn.SiLU(), nn.Linear(self.time_width, self.time_width)
        )
        self.into = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before, skips = widths[0], [widths[0]]
        for level, width in enumerate(widths):
            for _ in range(2):
                self.down.append(self._block(before, width, level, groups))
                before = width
                skips.append(width)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(width, width, 3, 2, 1))
                skips.append(width)
        self.middle = self._block(before, before, 1, groups)
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(self._block(before + skips.pop(), width, level, groups))
                before = width
            if level:
                self.up.append(nn.Upsample(scale_factor=2))
        self.out = nn.Sequential(nn.GroupNorm(groups, before), nn.SiLU(), nn.Conv2d(before, 4, 3, padding=1))

    def _block(self, before: int, after: int, level: int, groups: int) -> nn.ModuleList:
        parts: list[nn.Module] = [_Residual(before, after, self.time_width, groups)]
        if level:
            parts.append(_Attention(after, after // (8 if groups == 8 else 64), groups))
        return nn.ModuleList(parts)

    def forward(self, sample: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        told = self.time(_waves(time, self.time_width))
        x = self.into(sample)
        skips = [x]
        for block in self.down:
            x = self._run(block, x, told)
            skips.append(x)
        x = self._run(self.middle, x, told)
        for block in self.up:
            x = self._run(block, x if isinstance(block, nn.Upsample) else torch.cat([x, skips.pop()], 1), told)
        made: torch.Tensor = self.out(x)
        return made

    @staticmethod
    def _run(block: nn.Module, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        if not isinstance(block, nn.ModuleList):
            made: torch.Tensor = block(x)
            return made
        for part in block:
            x = part(x, told) if isinstance(part, _Residual) else part(x)
        return x


class _Modulated(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.told = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.told(time)[:, None].chunk(6, dim=-1)
        rows = self.first(x) * (1 + scale) + shift
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.into(rows).chunk(3, dim=-1)
        )
        x = x + gate * self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        made: torch.Tensor = x + gate_mlp * self.mlp(self.second(x) * (1 + scale_mlp) + shift_mlp)
        return made


class DiffusionTransformer(nn.Module):
    """Peebles and Xie, arXiv 2212.09748: patches of 2, adaptive layer norm from the time."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        self.width, heads, layers = (64, 4, 2) if tiny else (1152, 16, 12)
        self.into = nn.Conv2d(4, self.width, 2, 2)
        self.time = nn.Sequential(nn.Linear(256, self.width), nn.SiLU(), nn.Linear(self.width, self.width))
        self.blocks = nn.ModuleList(_Modulated(self.width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(self.width), nn.Linear(self.width, 16)

    def forward(self, sample: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        side = sample.shape[-1] // 2
        x, told = self.into(sample).flatten(2).transpose(1, 2), self.time(_waves(time, 256))
        for block in self.blocks:
            x = block(x, told)
        rows = self.out(self.norm(x)).transpose(1, 2).reshape(sample.shape[0], 16, side, side)
        return F.pixel_shuffle(rows, 2)
