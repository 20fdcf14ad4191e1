"""Perplexity: what a model that knows nothing has, what one that knows all has, and that windows only cut context."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import UsageError
from support.perplexity import perplexity, prose

WORDS = 50


class Counting(nn.Module):
    """Says that the next token is the next number, as surely as ``sharpness``."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(sharpness))
        self.lengths: list[int] = []

    def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.lengths.append(ids.shape[1])
        return SimpleNamespace(logits=nn.functional.one_hot((ids + 1) % WORDS, WORDS) * self.sharpness)


IDS = torch.arange(120)[None] % WORDS


def test_who_knows_nothing_is_as_perplexed_as_there_are_words() -> None:
    assert perplexity(Counting(0.0), IDS) == pytest.approx(WORDS)


def test_who_knows_all_is_not_perplexed() -> None:
    assert perplexity(Counting(100.0), IDS) == pytest.approx(1.0)
    assert perplexity(Counting(100.0), IDS.flip(1)) > math.exp(90)


@pytest.mark.parametrize("window", [1, 7, 118, 119, 120, 4096])
def test_every_token_but_the_first_counts_once_whatever_the_window(window: int) -> None:
    model = Counting(3.0)
    assert perplexity(model, IDS, window=window) == pytest.approx(perplexity(Counting(3.0), IDS))
    assert sum(model.lengths) == 119
    assert max(model.lengths) <= window


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match="1 tokens"):
        perplexity(Counting(1.0), IDS[:, :1])


def test_the_text_is_there_and_long_enough_to_measure_with() -> None:
    words = prose().split()
    assert 700 < len(words) < 1500
    assert len(set(words)) > 300
