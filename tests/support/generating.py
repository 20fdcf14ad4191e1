"""Tiny models of many families, saved as users have them, and what transformers alone makes of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from support.tiny_model import save_tokenizer

WORDS = 300
DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # else a random model says the same token for ever
}
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 8}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "decoder_start_token_id": 0}
MAMBA: dict[str, Any] = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.5}
JAMBA: dict[str, Any] = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
RWKV: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}

# name -> class, its configuration's class and values
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "long": (
        "LlamaForCausalLM",
        "LlamaConfig",
        DECODER | {"intermediate_size": 1024, "max_position_embeddings": 4096},
    ),
    "multi-head": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"num_key_value_heads": 4}),
    "multi-query": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"num_key_value_heads": 1}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "init_std": 0.2},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DECODER | MOE),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | WINDOW),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | WINDOW),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA),
    "jamba": ("JambaForCausalLM", "JambaConfig", DECODER | JAMBA),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", RWKV),
}


def make(name: str) -> Any:
    kind, configuration, values = FAMILIES[name]
    torch.manual_seed(0)
    ids = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2}
    config = getattr(transformers, configuration)(**ids, **values)
    return getattr(transformers, kind)(config).eval()


def save(folder: Path, name: str) -> Path:
    make(name).save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder


def alone(folder: Path, prompts: Sequence[str], count: int, **options: Any) -> list[list[int]]:
    """The new tokens that transformers makes of each prompt, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encodes = transformers.AutoConfig.from_pretrained(folder).is_encoder_decoder
    model = (AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM).from_pretrained(folder)
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
        )
        rows.append([int(token) for token in out[0][0 if encodes else ids.shape[1] :]])
    return rows


def save_words_llama(folder: Path, layers: int) -> Path:
    """A Llama of some 11 MiB a layer. Its tokens are far enough apart that rounding changes none."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=0, eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder
