"""What a forward pass takes, watched on fake tensors: counted to the byte, and who reads what."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from brim.errors import UnsupportedError
from brim.estimation.step_memory import Inputs, watch_example, watch_inference


def test_a_chain_holds_two_neighbouring_results_at_once() -> None:
    chain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    seen = watch_example(chain, (torch.randn(4, 16),))
    assert seen.step_bytes == 2 * 4 * 64 * 4
    assert seen.uses["0.weight"] == {frozenset({"", "0"})}
    assert seen.uses["2.bias"] == {frozenset({"", "2"})}


def test_the_last_token_is_counted_with_the_cache_and_filling_it_is_not() -> None:
    layers, width, total = 2, 64, 100
    settings = {"n_layer": layers, "n_embd": width, "n_head": 2, "vocab_size": 16, "bos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**settings, eos_token_id=0)).eval()
    cache_bytes = 2 * layers * (total - 1) * width * 4
    short = watch_inference(model, Inputs(prompt=1, total=total)).step_bytes
    # The longer cache of one layer is made beside the shorter one.
    assert cache_bytes < short < cache_bytes * (1 + 1 / layers) + 64 * width * 4
    long = watch_inference(model, Inputs(prompt=total, total=total)).step_bytes
    assert long > short


def test_a_forward_that_decides_on_values_of_its_example_is_watched() -> None:
    class Picky(nn.Module):
        def forward(self, source: torch.Tensor) -> torch.Tensor:
            return source[source > 0]

    assert watch_example(Picky(), (torch.tensor([1.0, -1.0, 2.0, -3.0]),)).step_bytes > 0


def test_a_forward_that_cannot_be_watched_says_what_to_give_instead() -> None:
    class Leaving(nn.Module):
        def forward(self, source: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(source.numpy())

    with pytest.raises(UnsupportedError, match="activations="):
        watch_example(Leaving(), (torch.randn(4),))
