"""Small decoders of all proportions, whose memory must not pass the bound for models that certainly fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from brim.planning.inference.memory import Sizes

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox",
    "olmo2", "apertus", "cohere", "granite", "starcoder2", "smollm3", "glm", "opt", "helium",
]  # fmt: skip
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]
TINY = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def random_sizes(family: str, seed: int) -> tuple[Any, Sizes]:
    """A small configuration, with heads, widths and lengths of all proportions, and the sizes of its passes."""
    draw = random.Random(f"{family} {seed}")
    heads, groups, head = (
        draw.choice([(2, 1), (4, 2), (8, 8), (12, 3)]),
        draw.choice([1, 2]),
        draw.choice([8, 16, 64]),
    )
    config = AutoConfig.for_model(
        family,
        hidden_size=heads[0] * head,
        head_dim=head * (1 if family in ("phi", "gpt_neox", "opt", "gpt2", "helium", "olmoe") else groups),
        intermediate_size=draw.choice([32, 200, 1024]),
        ffn_dim=draw.choice([32, 1024]),
        num_hidden_layers=draw.choice([1, 3]),
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=draw.choice([64, 1000, 5000]),
        word_embed_proj_dim=heads[0] * head,
        max_position_embeddings=512,
        **TINY,
    )
    if family in EXPERTS:
        count = draw.choice([4, 16])
        for name in ("num_experts", "num_local_experts"):
            setattr(config, name, count)
        config.num_experts_per_tok = draw.choice([1, 2, 4])
        config.moe_intermediate_size = config.shared_expert_intermediate_size = draw.choice([32, 200])
    config.dtype = torch.float32
    prompt = draw.choice([1, 7, 64, 300])
    return config, Sizes(batch=draw.choice([1, 3]), prompt=prompt, total=prompt + draw.choice([1, 40]), chunk=prompt)


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder
