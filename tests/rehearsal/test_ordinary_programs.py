"""What a trace says of ordinary programs is what PyTorch's own CUDA build takes for them."""

from __future__ import annotations

import statistics

import pytest

from support.ordinary import programs
from support.ordinary.comparison import compared, traced

NAMES = (
    "checkpoints_written_and_read", "cifar_tutorial", "ddpm_with_ema", "dense_batches_from_sparse_features",
    "global_filters_of_an_image", "gradients_per_sample_with_noise", "graph_attention_by_scatter", "gru_cells",
    "heat_equation_by_hessians", "images_as_sines_with_their_gradients",
    "imagenet_example_with_accuracy", "llama_like_with_rms_norm_bf16", "llama_like_with_rms_norm_fp32",
    "llava_with_an_image_each", "lstm_cells", "masked_lm", "metrics_reduced_over_a_group_of_one", "nanogpt",
    "nested_tensors_of_sentences", "point_cloud_neighbours", "rotary_positions_by_complex_numbers",
    "r1_penalty_of_a_discriminator", "scripted_modules", "spectral_and_weight_norm",
    "text_classification_by_embedding_bag", "unet_segmentation", "vae_example", "vit_fp16_scaler_fused_adamw",
    "word_language_model",
)  # fmt: skip


pytestmark = pytest.mark.timeout(900)  # the first test waits for all programs, on the device and traced


@pytest.fixture(scope="module")
def rows(on_device):
    made = [traced(one) for one in programs() if one.name in NAMES]
    found = compared(made, on_device.environment)
    return {row.program.name: row for row in found}


@pytest.mark.parametrize("name", NAMES)
def test_allocated_and_reserved_are_those_of_the_device(rows, name):
    row = rows[name]
    assert row.true_allocated is not None, row.said
    assert row.allocated == pytest.approx(row.true_allocated, rel=0.02)
    assert row.reserved == pytest.approx(row.true_reserved, rel=0.03)


def test_nineteen_of_twenty_programs_are_closer(rows):
    """Within half a percent of what is allocated, and one percent of what is reserved."""
    allocated = [abs(row.allocated / row.true_allocated - 1) for row in rows.values()]
    reserved = [abs(row.reserved / row.true_reserved - 1) for row in rows.values()]
    assert statistics.quantiles(allocated, n=20, method="inclusive")[-1] <= 0.005
    assert statistics.quantiles(reserved, n=20, method="inclusive")[-1] <= 0.01
