"""Models in 8 and 4 bits: what is left alone, what is refused, and that removal is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import brim
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.techniques.quantization.technique import (
    SCHEMES,
    Quantization,
    QuantizedLinear,
    apply,
    quantize_meta,
    quantized_layers,
    stored_bytes,
)


def llama(*, tied: bool = False, **values: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "tie_word_embeddings": tied,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **values})).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96)).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
    return T5ForConditionalGeneration(config).eval()


IDS = torch.arange(1, 9).view(1, 8)


def logits(model: nn.Module) -> torch.Tensor:
    given = {"decoder_input_ids": IDS[:, :3]} if isinstance(model, T5ForConditionalGeneration) else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, **given).logits
    return found


@pytest.mark.parametrize("make", [llama, gpt2, t5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_gives_almost_the_same_and_after_removal_the_very_same(
    make: Callable[[], nn.Module], scheme: str
) -> None:
    model = make()
    before, names = logits(model), {name: id(value) for name, value in model.named_parameters()}
    handle = apply(model, scheme)
    assert handle.report.stored_bytes < handle.report.wide_bytes / 3
    quantized = logits(model)
    assert not torch.equal(quantized, before)
    relative = ((quantized - before).norm() / before.norm()).item()
    assert relative < {"int8": 0.02, "fp8": 0.1, "int4": 0.25}[scheme]
    handle.remove()
    handle.remove()
    assert torch.equal(logits(model), before)
    assert {name: id(value) for name, value in model.named_parameters()} == names
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    apply(model, scheme).remove()  # again


def test_a_users_hook_stays() -> None:
    model, seen = llama(), []
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.register_forward_hook(lambda *_: seen.append(1))
    handle = apply(model, "int8")
    logits(model)
    assert len(seen) == 1
    handle.remove()
    logits(model)
    assert len(seen) == 2


@pytest.mark.parametrize("make", [llama, gpt2, lambda: llama(tied=True)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_without_values_gets_the_parameters_of_a_real_one(make: Callable[[], nn.Module], scheme: str) -> None:
    real = make()
    apply(real, scheme)
    with torch.device("meta"):
        planned = make()
    report = quantize_meta(planned, scheme)

    def shapes(model: nn.Module) -> dict[str, Any]:
        return {name: (p.dtype, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}

    assert shapes(planned) == shapes(real)
    assert all(p.is_meta for p in planned.parameters())
    layers = [module for module in planned.modules() if isinstance(module, QuantizedLinear)]
    assert report.stored_bytes == sum(layer.codes.nbytes + layer.scale.nbytes for layer in layers)
    assert report.layers == len(layers)


def test_the_head_is_left_unless_it_is_asked_for() -> None:
    assert "lm_head" not in quantized_layers(llama(), "int8")
    assert len(quantized_layers(llama(), "int8")) == 14
    assert "lm_head" in quantized_layers(llama(), Quantization(scheme="int8", head=True))


def test_a_head_that_is_tied_to_the_embeddings_becomes_a_layer_of_its_own() -> None:
    model = llama(tied=True)
    before, table = logits(model), model.get_input_embeddings().weight
    assert "lm_head" not in quantized_layers(model, "int8")
    handle = apply(model, Quantization(scheme="int8", head=True))
    assert isinstance(model.lm_head, QuantizedLinear)
    assert model.get_input_embeddings().weight is table
    assert ((logits(model) - before).norm() / before.norm()).item() < 0.02
    handle.remove()
    assert model.lm_head.weight is table


def test_a_weight_that_two_layers_share_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    assert list(quantized_layers(model, "int8")) == ["2"]


def test_sides_that_a_scheme_cannot_hold_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 64), nn.Linear(96, 64), nn.Linear(100, 32))
    assert list(quantized_layers(model, "int8")) == ["0", "1", "2", "3"]
    assert list(quantized_layers(model, "int4")) == ["2"]  # in groups of 32, the largest that divides 96
    assert list(quantized_layers(model, "fp8")) == ["2"]
    assert stored_bytes(Quantization(scheme="int4"), 64, 96) == 64 * 96 // 2 + 4 * 64 * 3


def test_experts_in_one_tensor_are_left_and_the_rest_is_not() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=96,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    before = logits(model)
    handle = apply(model, "int8")
    assert handle.report.layers == 8
    assert "8 linear layers with" in str(handle.report)
    assert ((logits(model) - before).norm() / before.norm()).item() < 0.05


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="0 linear layers can be quantized"):
        apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "int8")
    with pytest.raises(UnsupportedError, match="None of its 1 linear layers can"):
        quantize_meta(nn.Sequential(nn.Linear(5, 7)), "int4")


def test_a_second_application_is_refused_and_so_is_a_fitted_model() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    handle = apply(model, "int8")
    with pytest.raises(UsageError, match=r"already \(int8\)"):
        apply(model, "int4")
    handle.remove()
    fitted = brim.fit(model, ram=10 * 64 * 65, activations=0)
    with pytest.raises(UsageError, match="fitted already"):
        apply(model, "int8")
    fitted.remove()
    apply(model, "int8").remove()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_are_refused_and_nothing_changes(scheme: str) -> None:
    model = llama()
    weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
    weight.data[3, 5] = float("nan")
    with pytest.raises(ModelError, match=r"Cannot quantize model\.layers\.1\.mlp\.up_proj\.weight"):
        apply(model, scheme)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    weight.data[3, 5] = 0
    apply(model, scheme).remove()


def test_unknown_schemes_and_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="Known: int8, int4, fp8"):
        apply(nn.Linear(64, 64), "int5")
    with pytest.raises(UsageError, match="groups of 48 weights"):
        Quantization(scheme="int4", group=48)
