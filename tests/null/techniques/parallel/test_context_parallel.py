"""Sequences over ranks: what each is given, and what does not split."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from brim.errors import UnsupportedError
from brim.techniques.parallel import context_parallel, sharding

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50,
}  # fmt: skip


def applied(model, rank=0):
    with sharding.alone(2, rank):
        return context_parallel.apply(model, context_parallel.mesh_of(2, "cpu"))


def test_ranks_share_neighbours_tensors_and_sequences_of_ranks_a_stride_apart():
    with sharding.alone(8, 5):
        mesh = context_parallel.mesh_of(2, "cpu", tensor_parallel=2)
        assert mesh.mesh.tolist() == [5, 7]
        assert context_parallel.mesh_of(1, "cpu", tensor_parallel=2) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_two_chunks_and_the_labels_of_the_tokens_that_follow(rank):
    context = applied(LlamaForCausalLM(LlamaConfig(**SIZES)), rank)
    tokens = torch.arange(16).view(2, 8)
    own = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
    assert torch.equal(context.own(tokens), tokens[:, own])
    assert context.positions(4, tokens.device).tolist() == [own]
    following = [[1, 2, 3, 4, 5, 6, 7, -100], [9, 10, 11, 12, 13, 14, 15, -100]]
    assert context.following(tokens).tolist() == [[row[at] for at in own] for row in following]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_masked_query_looks_at_what_went_before_it_on_all_ranks(rank):
    """Tokens are in the ranks' order: 0, 1, 6, 7, then 2 to 5."""
    mask = applied(LlamaForCausalLM(LlamaConfig(**SIZES)), rank).mask(4, torch.device("cpu"))
    assert mask.shape == (1, 1, 4, 8)
    assert mask[0, 0].sum(1).tolist() == [[1, 2, 7, 8], [3, 4, 5, 6]][rank]
    assert mask[0, 0, 0].tolist() == [place <= 2 * rank for place in (0, 1, 6, 7, 2, 3, 4, 5)]


def test_attention_over_a_window_is_refused():
    with pytest.raises(UnsupportedError, match="sliding_window"):
        applied(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_hang_on_the_longest_sequence_are_refused(kind):
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind}
    with sharding.alone(2), pytest.raises(UnsupportedError, match=kind):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        model.config = config
        context_parallel.apply(model, context_parallel.mesh_of(2, "cpu"))
