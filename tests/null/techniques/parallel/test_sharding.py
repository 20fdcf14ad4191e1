"""Sharding and pipelining on one process: shapes, plans, stages, and what is refused."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from brim.errors import UnsupportedError, UsageError
from brim.techniques.parallel import pipeline, sharding

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about its own process groups


def llama(layers=4, **settings):
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, **settings,
    ))  # fmt: skip


def gpt2(layers=2):
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=128, n_positions=64))


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_shards_are_a_ranks_part_of_every_weight(zero):
    with sharding.alone(4):
        model = llama()
        whole = sum(parameter.numel() for parameter in model.parameters())
        sharding.apply(model, sharding.mesh_of(4, 1, "cpu"), sharding.Sharding(zero=zero))
        mine = sum(local(parameter).numel() for parameter in model.parameters())
    assert mine == (whole if zero == 0 else whole // 4)
    assert not dist.is_initialized()


@pytest.mark.parametrize("zero", [0, 3])
def test_what_stays_in_float32_is_gathered_apart(zero):
    """As transformers keeps routers of mixtures of experts, in a model of bfloat16."""
    with sharding.alone(2):
        model = llama().bfloat16()
        for layer in model.model.layers:
            layer.mlp.gate_proj.float().register_forward_pre_hook(lambda module, given: given[0].float())
            layer.mlp.gate_proj.register_forward_hook(lambda module, given, made: made.bfloat16())
        sharding.apply(model, sharding.mesh_of(2, 1, "cpu"), sharding.Sharding(zero=zero))
        model(torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
        kinds = {(local(parameter.grad).dtype, parameter.dtype) for parameter in model.parameters()}
    assert kinds == {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensors_are_split_by_outputs_and_inputs(sequence_parallel):
    with sharding.alone(2):
        model = llama()
        decision = sharding.Sharding(zero=0, sequence_parallel=sequence_parallel)
        sharding.apply(model, sharding.mesh_of(1, 2, "cpu"), decision)
        layer = model.model.layers[0]
        shapes = {
            name: tuple(local(layer.get_submodule(name).weight).shape)
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
        }
        table = tuple(local(model.model.embed_tokens.weight).shape)
    assert shapes == {
        "self_attn.q_proj": (32, 64), "self_attn.k_proj": (16, 64), "self_attn.o_proj": (64, 32),
        "mlp.gate_proj": (48, 64), "mlp.down_proj": (64, 48),
    }  # fmt: skip
    assert table == (64, 64)


def test_queries_keys_and_values_in_one_product_are_split_each():
    with sharding.alone(2):
        model = gpt2()
        before = model.transformer.h[0].attn.c_attn.weight.detach().clone()
        sharding.apply(model, sharding.mesh_of(1, 2, "cpu"), sharding.Sharding(zero=0))
        attention = model.transformer.h[0].attn
        mine = local(attention.c_attn.weight)
    expected = torch.cat([part[:, :32] for part in before.split(64, dim=1)], dim=1).t()
    assert torch.equal(mine, expected)
    assert attention.split_size == 32


def test_tied_weights_stay_one():
    with sharding.alone(2):
        model = gpt2()
        sharding.apply(model, sharding.mesh_of(1, 2, "cpu"), sharding.Sharding(zero=0))
        assert model.lm_head.weight is model.transformer.wte.weight


def test_sizes_that_do_not_divide_and_meshes_of_other_sizes_are_errors():
    with sharding.alone(3), pytest.raises(UsageError, match="is not a multiple"):
        sharding.apply(llama(), sharding.mesh_of(1, 3, "cpu"), sharding.Sharding())
    with sharding.alone(4), pytest.raises(UsageError, match="There are 4"):
        sharding.mesh_of(3, 1, "cpu")
    with sharding.alone(2), pytest.raises(UsageError, match="group of real ranks"), sharding.alone(2):
        pass


def test_a_block_of_unknown_names_is_refused():
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = torch.nn.ModuleList([torch.nn.ModuleDict({"a": block})])
    with sharding.alone(2), pytest.raises(UnsupportedError, match="q_proj"):
        sharding.apply(model, sharding.mesh_of(1, 2, "cpu"), sharding.Sharding())


def test_a_sharded_model_is_not_put_together_again():
    with sharding.alone(2):
        handle = sharding.apply(llama(), sharding.mesh_of(2, 1, "cpu"), sharding.Sharding())
    with pytest.raises(UnsupportedError, match="undo the sharding"):
        handle.remove()


# -- stages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_stages_one_after_the_other_are_the_model(make):
    torch.manual_seed(0)
    model = make(layers=4).eval()
    tokens = torch.randint(0, 128, (2, 16))
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=tokens).loss
        hidden = tokens
        for part in pipeline.parts([1, 2, 1]):
            stage = make(layers=4).eval()
            stage.load_state_dict(model.state_dict())
            hidden = pipeline.cut(stage, part)(hidden, tokens if part.has_head else None)
    assert torch.allclose(hidden, expected, atol=1e-6)


def test_a_stage_has_its_own_weights_only():
    first, middle, last = (pipeline.cut(llama(), part) for part in pipeline.parts([1, 2, 1]))
    names = [{name.split(".layers.")[0] for name, _ in stage.named_parameters()} for stage in (first, middle, last)]
    assert "model.model.embed_tokens.weight" in names[0]
    assert not any("lm_head" in name or "model.norm" in name for name in names[0] | names[1])
    assert not any("embed_tokens" in name for name in names[1] | names[2])
    assert {"model.lm_head.weight", "model.model.norm.weight"} <= names[2]
    assert len(middle.model.model.layers) == 2


def test_layers_that_a_model_does_not_have_are_an_error():
    with pytest.raises(UsageError, match="has 4"):
        pipeline.cut(llama(), pipeline.Part(first=3, layers=2, of=5))


def test_a_process_that_was_a_rank_tells_of_errors_as_before():
    hook = sys.excepthook
    with sharding.alone(4, 1):
        pass
    assert sys.excepthook is hook
    assert not dist.is_initialized()


def test_an_operator_on_lists_is_propagated_once_for_each_kind_of_tensor(monkeypatch):
    """And an optimizer that steps over them gives each parameter what it gives it alone."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    lengths = []
    plain = ShardingPropagator._propagate_tensor_meta_non_cached

    def counting(self, schema):
        lengths.extend(len(arg) for arg in schema.args_schema if isinstance(arg, list | tuple))
        return plain(self, schema)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", counting)
    with sharding.alone(4):
        model = llama(layers=6)
        sharding.apply(model, sharding.mesh_of(4, 1, "cpu"), sharding.Sharding(zero=3))
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        optimizer.step()
        states = [optimizer.state[parameter]["exp_avg"] for parameter in parameters]
    assert [state.shape for state in states] == [parameter.shape for parameter in parameters]
    assert [state.placements for state in states] == [parameter.placements for parameter in parameters]
    kinds = {(parameter.shape, parameter.placements) for parameter in parameters}
    assert len(kinds) < len(parameters) and max(lengths) == len(kinds)
