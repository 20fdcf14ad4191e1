"""Well-known CNNs from their published layer tables, with torchvision's settings and in-place choices.

Each constructor takes ``classes`` and gives an ``nn.Module`` in train mode. ``MODELS``: by torchvision's names.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from support.zoo import convnext, densenet, efficientnet, inception, mobilenet, regnet, resnet, vgg, xception

MODELS: dict[str, Callable[..., nn.Module]] = {
    **vgg.MODELS,
    **resnet.MODELS,
    **regnet.MODELS,
    **mobilenet.MODELS,
    **efficientnet.MODELS,
    **convnext.MODELS,
    **densenet.MODELS,
    **inception.MODELS,
    **xception.MODELS,
}

__all__ = ["MODELS"]
