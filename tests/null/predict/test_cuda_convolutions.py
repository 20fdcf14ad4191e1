"""Which convolutions have a workspace that nobody knows, and what the others take."""

import pytest
import torch
from torch import nn

from brim import trace
from brim.core import Category


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


def temporaries(dtype, layout=torch.contiguous_format):
    """Sizes of what kernels take and give back in a step of a convolution from 3 to 20 channels."""

    def build():
        model = nn.Conv2d(3, 20, 3, padding=1, bias=False).cuda().to(dtype)
        source = torch.randn(2, 3, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        source = source.to(memory_format=layout)
        return lambda: model(source).square().sum().backward()

    made = trace(build, steps=1)
    return [storage.bytes for storage in made.storages if storage.category is Category.TEMPORARY]


TRANSPOSED = (2 * 16 * 16) * (8 + 24) + 8 * 24 * 3 * 3  # elements of source, result and weight, channels padded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_transposes_its_operands_with_channels_padded_to_eight(dtype):
    assert temporaries(dtype).count(TRANSPOSED * 2) == 3  # for the result, and for both gradients


def test_channels_last_and_float32_are_not_transposed():
    assert TRANSPOSED * 2 not in temporaries(torch.float16, torch.channels_last)
    assert TRANSPOSED * 4 not in temporaries(torch.float32)


@pytest.mark.parametrize(("groups", "first"), [(32, 32 * 3 * 3), (1, 2 * 32 * 16 * 16)])
def test_depthwise_kernels_make_the_gradient_of_the_weight_before_that_of_the_source(groups, first):
    def build():
        model = nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False).cuda()
        source = torch.randn(2, 32, 16, 16, device="cuda", requires_grad=True)
        return lambda: model(source).square().sum().backward()

    made = trace(build, steps=1)
    backward = next(op for op in made.ops if "convolution_backward" in op.name)
    born = min((s for s in made.storages if s.born > backward.at), key=lambda storage: storage.born)
    assert born.bytes == 4 * first
