"""What routers are seen to do: counted by hand, and the same whether the model is fitted or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.techniques.experts.router_statistics import RouterStatistics, router_statistics, watch_routers
from support.families import inputs, make


def test_the_experts_of_each_call_are_counted() -> None:
    model, given = make("qwen3-moe", num_hidden_layers=2), inputs("qwen3-moe")
    seen: list[torch.Tensor] = []
    hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    found = router_statistics(model, given)
    hook.remove()
    assert list(found) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    (visit,) = found["model.layers.1.mlp.experts"].visits
    tokens = seen[0].shape[0]
    assert visit == {e: int((seen[0] == e).sum()) / tokens for e in seen[0].unique().tolist()}
    assert sum(visit.values()) == pytest.approx(2)  # each token has two
    assert found["model.layers.1.mlp.experts"].distinct == len(visit)


def test_generation_is_a_call_for_the_prompt_and_one_per_token() -> None:
    model = make("mixtral", num_hidden_layers=2)
    ids = torch.arange(5)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    for layer in router_statistics(model, given, new_tokens=6).values():
        assert [len(visit) for visit in layer.visits[1:]] == [2] * 5
        assert len(layer.visits) == 6


def test_hit_rates_rise_with_the_slots_to_one() -> None:
    cycle = RouterStatistics(count=4, visits=tuple({expert: 1.0} for expert in [0, 1, 0, 2] * 20))
    rates = [cycle.hit_rate(slots) for slots in (1, 2, 3, 4)]
    assert rates == sorted(rates)
    assert rates[0] == 0
    assert rates[1] == 0.5  # the favourite stays, as it would not under LRU
    assert rates[2:] == [1.0, 1.0]
    assert cycle.distinct == 1
    assert cycle.loads(2) == 0.5


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no layers of fused experts"):
        router_statistics(nn.Linear(2, 2), {"input": torch.ones(2)})


def test_a_run_that_calls_nothing_says_nothing() -> None:
    assert watch_routers(make("mixtral", num_hidden_layers=1), lambda: None) == {}
