"""Stages of models whose decoders do more than go through like layers: one after the other they are the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from brim.errors import UnsupportedError
from brim.techniques.parallel import pipeline

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_FIRST_DENSE = {
    "first_k_dense_replace": 3, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
_OLD = {"n_embd": 64, "n_layer": 6, "n_head": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 6, "n_head": 4},  # a norm behind the embedding
    "cohere2": {"sliding_window": 8},
    "deepseek_v3": {**_LATENT, **_FIRST_DENSE},
    "gemma2": {"sliding_window": 8},  # embeddings are scaled wherever they are from; layers of two kinds in turn
    "gemma3_text": {"sliding_window": 8},  # positions of two kinds, too
    "gpt_neo": {"num_layers": 6, "num_heads": 4, "attention_types": [[["global", "local"], 3]], "window_size": 8},
    "gpt_oss": {"sliding_window": 8, **_EXPERTS},
    "gptj": {**_OLD, "rotary_dim": 8},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "jamba": {},  # what a layer is, is worked out from two other numbers
    "lfm2": {},  # its last norm is named for the embedding
    "llama4_text": {"interleave_moe_layer_step": 2, "num_local_experts": 2, "intermediate_size_mlp": 96},
    "modernbert-decoder": {},  # its embedding is a module of several
    "nanochat": {},  # one norm without weights, before its layers and behind them
    "nemotron": {},  # its norm is named LayerNorm1P
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen3_moe": {"mlp_only_layers": [0, 3], **_EXPERTS},
}


def make(family: str) -> Any:
    settings = {key: value for key, value in {**_SIZES, **FAMILIES[family]}.items() if value is not None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # a norm of ones may be applied twice, and nothing tells
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_the_model(family: str) -> None:
    model = make(family)
    tokens = torch.randint(3, 128, (2, 16))
    expected = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    copies = [copy.deepcopy(model) for _ in range(3)]
    names = {id(p): name for whole in copies for name, p in whole.named_parameters()}
    stages = [pipeline.cut(whole, part) for whole, part in zip(copies, pipeline.parts([2, 1, 3]), strict=True)]
    hidden: torch.Tensor = tokens
    for stage in stages:
        hidden = stage(hidden, tokens if stage.part.has_head else None)
    hidden.backward()
    assert torch.allclose(hidden, expected, atol=1e-6)
    found: dict[str, torch.Tensor] = {}
    for parameter in (p for stage in stages for p in stage.parameters() if p.grad is not None):
        name = names[id(parameter)]  # of a tied table there are two
        found[name] = parameter.grad + found[name] if name in found else parameter.grad
    assert found.keys() == {name for name, gradient in gradients.items() if gradient is not None}
    for name, gradient in found.items():
        assert torch.allclose(gradient, gradients[name], atol=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_weight_is_on_one_stage(family: str) -> None:
    """But for the table that is both ends' of a tied model: copies on others would be saved over the trained one."""
    model = make(family)
    stages = [pipeline.cut(copy.deepcopy(model), part) for part in pipeline.parts([2, 1, 3])]
    held = sum(p.numel() for stage in stages for p in stage.parameters())
    table = pipeline.tied_table(model)
    assert held == sum(p.numel() for p in model.parameters()) + (0 if table is None else table.numel())


def test_layers_are_left_out_of_a_stage_with_what_the_configuration_says_of_them() -> None:
    """A shallower stage of the same kinds: the configuration's lists have an entry for each layer that is there."""
    whole = make("gemma3_text")
    kinds = whole.config.layer_types[1:]
    stage = pipeline.cut(whole, pipeline.Part(first=1, layers=5, of=6), [0, 3, 4])
    assert stage.inner.config.layer_types == [kinds[0], kinds[3], kinds[4]]
    assert [layer.self_attn.layer_type for layer in stage.inner.layers] == [kinds[0], kinds[3], kinds[4]]


def test_a_norm_that_runs_at_another_time_than_it_seems_is_refused() -> None:
    """MVP's only norm is that of its embedding."""
    settings = {
        "d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "vocab_size": 128, "decoder_ffn_dim": 96,
        "decoder_attention_heads": 4, "encoder_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mvp", **settings))
    stage = pipeline.cut(model, pipeline.Part(first=0, layers=1, of=2))
    with pytest.raises(UnsupportedError, match="runs at another time"):
        stage(torch.randint(3, 128, (2, 16)))


def test_layers_that_get_the_embedding_too_are_refused() -> None:
    """As Zamba's do."""
    stage = pipeline.cut(make("granite"), pipeline.Part(first=3, layers=3, of=6))
    stage.inner.layers[0].register_forward_pre_hook(
        lambda module, args, named: (args, {**named, "original": args[0]}), with_kwargs=True, prepend=True
    )
    with pytest.raises(UnsupportedError, match="other inputs than hidden states"):
        stage(torch.zeros(2, 16, 64), torch.zeros(2, 16, dtype=torch.long))


def test_a_decoder_whose_layers_take_something_else_is_refused() -> None:
    stage = pipeline.cut(make("granite"), pipeline.Part(first=3, layers=3, of=6))
    stage.inner.layers[0].register_forward_pre_hook(lambda module, args: (args[0][:, :4],), prepend=True)
    with pytest.raises(UnsupportedError, match="other inputs than hidden states"):
        stage(torch.zeros(2, 16, 64), torch.zeros(2, 16, dtype=torch.long))
