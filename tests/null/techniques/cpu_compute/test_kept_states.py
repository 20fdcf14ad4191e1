"""Caches that were filled elsewhere: a block's part of them comes to where the block is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache

from brim.errors import UnsupportedError
from brim.techniques.cpu_compute.kept_states import rest_in

META = torch.device("meta")  # the one other device that every machine has


def filled(layers: int = 3) -> DynamicCache:
    cache = DynamicCache()
    for index in range(layers):
        cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), index)
    return cache


def devices(cache: Any) -> list[str]:
    return [layer.keys.device.type for layer in cache.layers]


def test_only_the_blocks_own_layers_are_brought() -> None:
    cache = filled()
    rest_in(META, ((torch.ones(1),), {"past_key_values": cache}), {1})
    assert devices(cache) == ["cpu", "meta", "cpu"]
    assert cache.layers[1].values.device == cache.layers[1].device == META


def test_both_caches_of_an_encoder_and_a_decoder() -> None:
    both = EncoderDecoderCache(filled(), filled())
    rest_in(META, [{"cache": both}], {0, 2})
    assert devices(both.self_attention_cache) == devices(both.cross_attention_cache) == ["meta", "cpu", "meta"]


def test_a_cache_that_was_laid_out_before() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    cache = StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    rest_in(META, (cache,), {1})
    assert devices(cache) == ["cpu", "meta"]
    assert cache.layers[1].cumulative_length.device == META


def test_layers_that_are_not_there_yet_are_no_matter() -> None:
    cache = DynamicCache()
    rest_in(META, (cache,), {5})
    assert len(cache.layers) == 0


def test_a_cache_that_moves_its_layers_itself_is_refused() -> None:
    cache = filled()
    cache.offloading = True
    with pytest.raises(UnsupportedError, match="offloads its layers"):
        rest_in(META, (cache,), {0})
