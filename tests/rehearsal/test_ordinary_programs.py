"""What a trace says of ordinary programs is what PyTorch's own CUDA build takes for them."""

from __future__ import annotations

import pytest

from ordinary import programs
from ordinary_programs import compared, traced

NAMES = (
    "cifar_tutorial", "ddpm_with_ema", "imagenet_example_with_accuracy", "llama_like_with_rms_norm_bf16",
    "llama_like_with_rms_norm_fp32", "nanogpt", "text_classification_by_embedding_bag", "unet_segmentation",
    "vae_example", "vit_fp16_scaler_fused_adamw",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(on_device):
    made = [traced(one) for one in programs() if one.name in NAMES]
    found = compared(made, on_device.environment.python, real=False)
    return {row.program.name: row for row in found}


@pytest.mark.parametrize("name", NAMES)
def test_allocated_and_reserved_are_those_of_the_device(rows, name):
    row = rows[name]
    assert row.true_allocated is not None, row.said
    assert row.allocated == pytest.approx(row.true_allocated, rel=0.005)
    assert row.reserved == pytest.approx(row.true_reserved, rel=0.015)
