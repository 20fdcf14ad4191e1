"""How many experts a pass reads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import UsageError
from brim.planning.seconds.expert_reading import expected_experts, reading
from support import families


def test_one_token_reads_what_it_asks_for_and_many_read_all() -> None:
    assert expected_experts(8, 2, 1) == pytest.approx(2)
    assert expected_experts(8, 2, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert expected_experts(8, 2, 1000) == pytest.approx(8)
    assert expected_experts(8, 8, 1) == 8
    assert expected_experts(8, 2, 0) == 0


def test_simulated_draws_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [len(torch.rand(5, 12, generator=generator).topk(3).indices.unique()) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_experts(12, 3, 5), rel=0.02)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 512))
def test_it_is_between_what_one_token_asks_for_and_all(count: int, chosen: int, tokens: int) -> None:
    if chosen > count:
        with pytest.raises(UsageError):
            expected_experts(count, chosen, tokens)
        return
    found = expected_experts(count, chosen, tokens)
    assert (chosen if tokens else 0) - 1e-6 <= found <= min(count, chosen * tokens) + 1e-6


@pytest.mark.parametrize(("name", "count"), [("mixtral", 6), ("qwen3-moe", 8)])
def test_parameters_of_experts_are_found(name: str, count: int) -> None:
    model = families.make(name)
    found = reading(model, tokens=1)
    fused = [parameter for path, parameter in model.named_parameters() if path in found]
    assert fused and all(parameter.shape[0] == count for parameter in fused)
    assert all(math.isclose(one.share, 2 / count) and one.expert is None for one in found.values())
    assert all(one.share > 0.99 for one in reading(model, tokens=200).values())


def test_a_dense_model_has_none() -> None:
    assert reading(families.make("llama"), tokens=1) == {}


def test_experts_that_are_modules_of_their_own_are_told_apart() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
    model.config = type("Config", (), {"num_experts_per_tok": 1})()
    found = reading(model, 1)
    assert len(found) == 8 and {each.share for each in found.values()} == {0.25}
    assert {one.expert for one in found.values()} == {f"experts.{i}" for i in range(4)}
