"""The KV cache of fixed size that graphs read: the scores of transformers' own, which it is given back as."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from brim.techniques import decoding_graphs
from brim.techniques.kv_offload import cache as kv_cache
from support.generating import make

PROMPT, NEW = 11, 6
IDS = torch.randint(3, 300, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(1))


def token(model: Any, cache: Any, tokens: int) -> torch.Tensor:
    """Logits of the last of ``tokens``, as generate calls the model; the second sequence is padded."""
    mask = torch.ones_like(IDS[:, :tokens])
    mask[1, :3] = 0
    inputs = model.prepare_inputs_for_generation(
        IDS[:, :tokens],
        next_sequence_length=None if tokens == PROMPT else 1,
        cache=cache,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
    )
    logits: torch.Tensor = model(**inputs, use_cache=True).logits[:, -1]
    return logits


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "opt", "gpt-neox", "qwen3-moe"])
@torch.no_grad()
def test_scores_over_a_cache_of_fixed_size_are_those_of_a_growing_one(name: str) -> None:
    """Windows of 8 tokens are full already."""
    model = make(name)
    plain, cache = kv_cache.own_cache(model), kv_cache.own_cache(model)
    for each in (plain, cache):
        token(model, each, PROMPT)
    types = [type(layer) for layer in cache.layers]
    static = decoding_graphs._StaticCache(cache, PROMPT + NEW, torch.device("cpu"))
    with static.growing():
        scores = [token(model, cache, PROMPT + 1)]
    for tokens in range(PROMPT + 1, PROMPT + NEW):
        scores += [token(model, cache, tokens) for _ in range(2)]  # a pass may be repeated
        expected = token(model, plain, tokens)
        for each in scores:
            torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)
        scores.clear()
        static.advance()
    assert not static.full and static.grows
    static.leave()
    assert [type(layer) for layer in cache.layers] == types
    assert cache.get_seq_length() == plain.get_seq_length()
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        token(model, cache, PROMPT + NEW), token(model, plain, PROMPT + NEW), rtol=1e-4, atol=1e-4
    )


def test_only_layers_that_keep_all_tokens_suit() -> None:
    model = make("mamba")
    cache = kv_cache.own_cache(model)
    with pytest.raises(decoding_graphs._Unsuitable, match="LinearAttentionLayer"):
        decoding_graphs._StaticCache(cache, 20, torch.device("cpu"))


def test_the_bytes_of_graphs_grow_with_the_cache_that_they_copy() -> None:
    model = make("llama")
    planned = decoding_graphs.graph_bytes(model, 4, 256, planned=True)
    assert decoding_graphs.graph_bytes(model, 4, 256, planned=False) - planned == 4 * 256 * 4 * (2 * 2 * 16) * 4
    assert decoding_graphs.graph_bytes(model, 8, 256, planned=True) > planned > 96 << 20
