"""Ordinary programs trace as they are; ``python bench/ordinary_programs.py`` goes through all of them."""

from __future__ import annotations

import pytest

from support.ordinary import programs
from support.ordinary.comparison import traced

CHEAP = (
    "adam_amsgrad_one_by_one", "checks_of_gradients", "confusion_by_bincount", "dlrm_with_embedding_bags",
    "gcn_by_sparse_adjacency", "gcn_by_csr_adjacency", "matrix_factorization_with_sparse_adam",
    "gradients_per_sample_with_noise", "fourier_neural_operator", "llava_with_an_image_each", "scripted_modules",
    "generation_with_sampling", "graph_batches_pooled_by_segment", "gru_classifier_unsorted",
    "hardest_triplets_of_a_batch", "hungarian_matching_by_numpy", "lbfgs", "llama_with_padding", "lora",
    "lstm_tagger_with_packing", "masked_lm", "metrics_by_numpy", "mixture_of_experts_by_loop", "nanogpt", "pissa",
    "poisson_and_gaussian_likelihoods", "random_augmentations_on_the_host", "simclr", "soft_actor_critic",
    "speech_ctc",
)  # fmt: skip


def test_every_program_has_a_name_of_its_own_and_there_are_190():
    names = [one.name for one in programs()]
    assert len(names) == len(set(names)) >= 190
    assert set(CHEAP) <= set(names)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHEAP)
def test_an_ordinary_program_traces_as_it_is(name):
    (one,) = [one for one in programs() if one.name == name]
    row = traced(one)
    assert row.allocated is not None, row.said
    assert row.allocated > 0
