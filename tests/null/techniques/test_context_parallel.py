"""Sequences over ranks: what each is given, and what does not split."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from brim.errors import UnsupportedError
from brim.techniques import context_parallel, sharding

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 50,
}  # fmt: skip


def applied(model, rank=0):
    with sharding.alone(2, rank):
        return context_parallel.apply(model, context_parallel.mesh_of(2, "cpu"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_stretch_and_the_labels_of_the_tokens_that_follow(rank):
    context = applied(LlamaForCausalLM(LlamaConfig(**SIZES)), rank)
    tokens = torch.arange(16).view(2, 8)
    given = context.cut(tokens, tokens)
    own = slice(4 * rank, 4 * rank + 4)
    assert torch.equal(given["input_ids"], tokens[:, own])
    assert given["position_ids"].tolist() == [list(range(8))[own]]
    following = [[1, 2, 3, 4, 5, 6, 7, -100][own], [9, 10, 11, 12, 13, 14, 15, -100][own]]
    assert given["shift_labels"].tolist() == following


@pytest.mark.parametrize("rank", [0, 1])
def test_a_query_looks_at_what_went_before_it_on_all_ranks(rank):
    mask = applied(LlamaForCausalLM(LlamaConfig(**SIZES)), rank).mask(3, torch.device("cpu"))
    assert mask.shape == (1, 1, 3, 6)
    assert mask[0, 0].sum(1).tolist() == [3 * rank + own for own in (1, 2, 3)]


def test_attention_over_a_window_is_refused():
    with pytest.raises(UnsupportedError, match="sliding_window"):
        applied(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)))
