"""Which convolutions have a workspace that nobody knows, and what the others take."""

import pytest
import torch
from torch import nn

from brim import trace


def unknown(groups, dtype=torch.float32, layout=torch.contiguous_format):
    def build():
        model = nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False).cuda().to(dtype)
        source = torch.randn(2, 32, 16, 16, device="cuda", dtype=dtype).to(memory_format=layout)
        return lambda: model(source).sum().backward()

    return trace(build, steps=1).not_modelled


def test_depthwise_convolutions_in_float32_take_pytorchs_own_kernels():
    assert unknown(groups=32) == ()


@pytest.mark.parametrize(
    "choice", [{"groups": 1}, {"groups": 4}, {"groups": 32, "dtype": torch.float16},
               {"groups": 32, "layout": torch.channels_last}],
)  # fmt: skip
def test_convolutions_that_go_to_cudnn_are_named(choice):
    assert any("cuDNN" in text for text in unknown(**choice))
