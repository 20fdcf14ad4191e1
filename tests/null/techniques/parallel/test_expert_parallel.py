"""Experts over ranks: what each keeps, and what does not divide."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from brim.errors import UsageError
from brim.techniques.parallel import sharding
from brim.techniques.parallel.sharding_plan import spread_experts


def mixtral(experts, **settings):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=50, num_local_experts=experts, num_experts_per_tok=2, **settings,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_share_of_each_layers_experts(rank):
    model = mixtral(4)
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    with sharding.alone(2, rank):
        spread = spread_experts(model, sharding.mesh_of(2, 1, "cpu")["shard"])
        kept = {name: value for name, value in model.named_parameters() if ".experts." in name}
        assert {id(value) for value in kept.values()} == {id(value) for value in spread.parameters()}
        assert len(kept) == 2
        for name, value in kept.items():
            assert value.shape == whole[name].shape
            assert torch.equal(value.to_local(), whole[name][2 * rank : 2 * rank + 2])


def test_gradients_that_are_sums_over_ranks_are_made_means():
    model = mixtral(4)
    with sharding.alone(2):
        spread = spread_experts(model, sharding.mesh_of(2, 1, "cpu")["shard"])
        for parameter in spread.parameters():
            parameter.grad = torch.ones_like(parameter)
        spread.settle()
        assert all((p.grad.to_local() == 0.5).all() for p in spread.parameters())


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_a_rank_whose_experts_nothing_goes_to_takes_part_and_has_gradients_of_zero(kind):
    model = mixtral(4, experts_implementation=kind)
    with sharding.alone(2, rank=1):
        spread = spread_experts(model, sharding.mesh_of(2, 1, "cpu")["shard"])
        hidden = torch.ones(6, 16, requires_grad=True)
        chosen = torch.tensor([[0, 1]]).repeat(6, 1)
        made = model.model.layers[0].mlp.experts(hidden, chosen, torch.full((6, 2), 0.5))
        assert made.shape == hidden.shape
        made.sum().backward()
        assert hidden.grad.shape == hidden.shape
        spread.settle()
        assert all((p.grad.to_local() == 0).all() for p in spread.parameters())


def test_experts_that_do_not_divide_are_told():
    with sharding.alone(2), pytest.raises(UsageError, match="3 experts"):
        spread_experts(mixtral(3), sharding.mesh_of(2, 1, "cpu")["shard"])
