"""One tiny transformers model of each kind whose blocks are called differently, with inputs and a generation."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

WORDS = 99
_DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
}
_QWEN3_MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
_MIXTRAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 128,
    "num_layers": 5,
    "num_heads": 4,
    "vocab_size": WORDS,
    "decoder_start_token_id": 0,
}
# name -> prefix of the configuration's class, the model's class, values
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaForCausalLM", _DECODER),
    "llama-tied": ("Llama", "LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {**_DECODER, **_MIXTRAL}),
    "qwen3-moe": ("Qwen3Moe", "Qwen3MoeForCausalLM", {**_DECODER, **_QWEN3_MOE}),
    "gpt-oss": (
        "GptOss",
        "GptOssForCausalLM",
        {**_DECODER, **_MIXTRAL, "head_dim": 16, "layer_types": None, "sliding_window": 8},
    ),
    "gpt2": ("GPT2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": WORDS}),
    "t5": ("T5", "T5ForConditionalGeneration", _T5),
    "vit": (
        "ViT",
        "ViTForImageClassification",
        {
            **{key: value for key, value in _DECODER.items() if key not in ("vocab_size", "num_key_value_heads")},
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    "mamba": (
        "Mamba",
        "MambaForCausalLM",
        {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 8, "vocab_size": WORDS},
    ),
    "switch": (
        "SwitchTransformers",
        "SwitchTransformersForConditionalGeneration",
        {**_T5, "num_experts": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
    ),
}


def make(name: str, **values: Any) -> Any:
    """The model with random weights, the same each time. ``values`` change its configuration."""
    torch.manual_seed(0)
    prefix, model, known = FAMILIES[name]
    return getattr(transformers, model)(getattr(transformers, f"{prefix}Config")(**{**known, **values})).eval()


def inputs(name: str) -> dict[str, Any]:
    ids = torch.arange(14).view(2, 7) % WORDS
    if name == "vit":
        return {"pixel_values": torch.linspace(-1, 1, 6144).view(2, 3, 32, 32)}
    if name in ("t5", "switch"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    return {"input_ids": ids}


def size_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def generated(model: Any, **options: Any) -> Any:
    """Eight tokens and their logits."""
    ids = torch.arange(1, 6)[None]
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_same_generation(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for mine, theirs in zip(one.logits, other.logits, strict=True):
        assert torch.equal(mine, theirs)
