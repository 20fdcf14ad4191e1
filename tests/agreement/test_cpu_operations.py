"""Operation by operation: the sizes that are taken inside, in their order, are those that the profiler sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from brim.predict.tracer import trace
from support.cpu.compare import predicted_events
from support.cpu.truth import memory_events, peak_bytes

_BF16, _LAST = torch.bfloat16, torch.channels_last


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=_LAST)


# name: the operation, then the shapes of its inputs, which all require gradients
OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), ((2, 4, 256, 16),)),
    "attention-mask": (
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(2, 1, 64, 64)), ((2, 4, 64, 16),)),
    "attention-dropout": (lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), ((2, 4, 64, 16),)),
    "batch-norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((4, 32, 8, 8), (32,), (32,))),
    "batch-norm-last": (lambda x, w: F.batch_norm(_last(x), None, None, w, None, True), ((4, 32, 8, 8), (32,))),
    "conv-pad": (lambda x, w, b: F.conv2d(x, w, b, padding=1), ((2, 20, 16, 16), (36, 20, 3, 3), (36,))),
    "conv-first": (lambda x, w: F.conv2d(x, w, stride=4), ((4, 3, 64, 64), (32, 3, 4, 4))),
    "conv-stride": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), ((2, 16, 16, 16), (32, 16, 3, 3))),
    "conv-depthwise": (lambda x, w: F.conv2d(x, w, padding=3, groups=32), ((4, 32, 16, 16), (32, 1, 7, 7))),
    "conv-grouped": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), ((2, 8, 16, 16), (16, 2, 3, 3))),
    "conv-transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), ((2, 32, 8, 8), (32, 16, 2, 2))),
    "conv-last": (lambda x, w: F.conv2d(_last(x), _last(w), padding=1), ((2, 16, 16, 16), (32, 16, 3, 3))),
    "conv-1d": (lambda x, w: F.conv1d(x, w, padding=1, stride=2), ((4, 80, 64), (32, 80, 3))),
    "conv-dilated": (lambda x, w: F.conv2d(x, w, padding=4, dilation=4), ((2, 16, 16, 16), (32, 16, 3, 3))),
    "conv-wide": (lambda x, w: F.conv1d(x, w, padding=8, groups=4), ((2, 64, 40), (64, 16, 16))),
    "conv-3d": (lambda x, w: F.conv3d(x, w, padding=1), ((2, 16, 8, 8, 8), (32, 16, 3, 3, 3))),
    "conv-one-image": (lambda x, w: F.conv2d(x, w, padding=1), ((1, 16, 16, 16), (16, 16, 3, 3))),
    "conv-bf16": (lambda x, w: F.conv2d(x.to(_BF16), w.to(_BF16), padding=1), ((2, 16, 8, 8), (32, 16, 3, 3))),
    "conv-bf16-first": (lambda x, w: F.conv2d(x.to(_BF16), w.to(_BF16), padding=3, stride=2),
                        ((4, 3, 32, 32), (16, 3, 7, 7))),
    "conv-bf16-stride": (lambda x, w: F.conv2d(x.to(_BF16), w.to(_BF16), padding=1, stride=2),
                        ((4, 32, 16, 16), (64, 32, 3, 3))),
    "conv-bf16-point": (lambda x, w: F.conv2d(x.to(_BF16), w.to(_BF16)), ((4, 32, 16, 16), (64, 32, 1, 1))),
    "conv-bf16-depthwise": (lambda x, w: F.conv2d(x.to(_BF16), w.to(_BF16), padding=1, groups=32),
                        ((4, 32, 16, 16), (32, 1, 3, 3))),
    "group-norm": (lambda x, w, b: F.group_norm(x, 4, w, b), ((4, 32, 8, 8), (32,), (32,))),
    "layer-norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), ((64, 64, 32), (32,), (32,))),
    "layer-norm-strided": (lambda x, w, b: F.layer_norm(x.mT, (64,), w, b), ((8, 64, 32), (64,), (64,))),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), ((64, 32),)),
    "mean-bf16": (lambda x: x.to(_BF16).mean(-1), ((64, 64),)),
    "mixed-dtypes": (lambda x, y: x.to(_BF16) * y, ((64, 64), (64, 64))),
    "mse": (lambda x: F.mse_loss(x, torch.zeros(64, 16)), ((64, 16),)),
    "roll": (lambda x: torch.roll(x, (1, 2), (1, 2)), ((4, 16, 8, 8),)),
    "softmax-strided": (lambda x: x.mT.softmax(-1), ((4, 32, 16),)),
    "sort": (lambda x: x.sort(-1)[0], ((64, 64),)),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2), ((4, 16, 8, 8),)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_and_its_backward_take_what_is_predicted(name):
    operation, shapes = OPERATIONS[name]

    def build() -> Callable[[], Any]:
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

        def step() -> None:
            out = operation(*inputs)
            out.backward(torch.ones_like(out))

        return step

    predicted = peak_bytes(predicted_events(trace(build, steps=1, target="cpu")))
    measured = peak_bytes(memory_events(build, steps=1))
    assert predicted == pytest.approx(measured, rel=0.003)
