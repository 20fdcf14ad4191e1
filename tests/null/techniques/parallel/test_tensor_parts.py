"""What of a decoder layer is split by tensors, by its names and shapes, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from brim.errors import UnsupportedError
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel.tensor_parts import check_parts, parts_of, why_not_split

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def layer(family: str, **settings: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **{**_SIZES, **settings})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model.get_submodule(blocks(model)[-1])


def test_a_plain_layer_is_split_in_two_parts() -> None:
    parts = parts_of(layer("llama"))
    assert parts.parents == ("self_attn", "mlp")
    assert parts.writes == ("self_attn.o_proj", "mlp.down_proj")
    assert (parts.head_norms, parts.unsplit) == ((), ())


def test_a_norm_of_each_head_is_the_same_on_every_rank() -> None:
    block = layer("qwen3", head_dim=32)
    assert parts_of(block).head_norms == ("self_attn.q_norm", "self_attn.k_norm")
    assert why_not_split(block) is None


def test_experts_are_whole_and_what_is_beside_them_is_split() -> None:
    parts = parts_of(layer("llama4_text", interleave_moe_layer_step=1, intermediate_size_mlp=96, head_dim=16))
    assert parts.unsplit == ("feed_forward",)
    assert "feed_forward.shared_expert.down_proj" in parts.writes
    assert parts.in_unsplit("feed_forward.shared_expert.down_proj")


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("olmo2", {}, "self_attn.q_norm.weight"),  # a norm over all heads: of a rank's it is another one
        ("gpt_oss", {"head_dim": 16}, "self_attn.sinks"),  # a number for each head
        ("cohere", {"use_qk_norm": True}, "self_attn.q_norm.weight"),  # a norm for each head
        ("stablelm", {"qk_layernorm": True}, "q_layernorm.norms.0.weight"),
        ("phi3", {}, "self_attn.qkv_proj"),
        (
            "moshi",
            {"ffn_dim": 96, "num_codebooks": 2, "depth_decoder_config": None},
            "mlp.fc1",
        ),  # two products in one
        ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "attn.c_attn"),  # GPT-2's name, and no such thing
        ("modernbert-decoder", {}, "attn.q_proj"),  # what is split goes on to a name that is not known
    ],
)
def test_what_a_rank_would_need_its_own_part_of_is_refused(family: str, settings: dict[str, Any], named: str) -> None:
    block = layer(family, **settings)
    with pytest.raises(UnsupportedError, match="--tp 2 for it") as raised:
        check_parts([block], 2, "it")
    assert named in str(raised.value)
    check_parts([block], 1, "it")
