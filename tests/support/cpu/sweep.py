"""Every architecture of transformers that a few small settings make small. Nothing is chosen for a family.

A configuration class gets those of ``SMALL`` that it knows; what is still large, or refuses them, is named and left
out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from brim.errors import BrimError
from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from support.cpu.truth import measured_peak_bytes
from support.cpu.zoo import Build, Step, image, stepper, text

KINDS: dict[str, dict[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "both": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
_WIDTHS = {
    64: ("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "image_size",
         "shared_intermediate_size"),
    128: ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim", "dff",
          "n_inner", "ffn_hidden_size", "max_position_embeddings", "n_ctx", "n_positions"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "bottleneck_size",
         "intra_bottleneck_size", "true_hidden_size"),
    16: ("head_dim", "d_kv", "v_head_dim", "kv_channels", "kv_lora_rank", "qk_nope_head_dim", "sliding_window",
         "attention_window", "mamba_d_head", "mamba_d_state", "mamba_chunk_size", "chunk_size",
         "linear_key_head_dim", "linear_value_head_dim"),
    8: ("patch_size", "qk_rope_head_dim", "mamba_n_heads"),
    24: ("q_lora_rank",),
    1000: ("vocab_size",),
}  # fmt: skip
_COUNTS = {
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_key_value_heads", "num_experts_per_tok", "moe_k",
        "num_experts_per_token", "moe_topk", "linear_num_key_heads", "eos_token_id", "zero_expert_num"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "num_experts",
        "decoder_attention_heads", "n_routed_experts", "num_local_experts", "moe_num_experts",
        "linear_num_value_heads"),
    1: ("bos_token_id", "decoder_start_token_id", "n_group", "topk_group", "first_k_dense_replace",
        "n_shared_experts", "num_shared_experts", "num_sparse_encoder_layers", "num_sparse_decoder_layers",
        "moe_layer_start_index"),
    0: ("pad_token_id", "encoder_layerdrop", "decoder_layerdrop"),
}  # fmt: skip
SMALL = {name: value for table in (_WIDTHS, _COUNTS) for value, names in table.items() for name in names}
_MOST_PARAMETERS = 30_000_000


def model(family: str, architecture: str) -> Callable[[], nn.Module]:
    """The architecture, made small by those of ``SMALL`` that its configuration takes as a number."""

    def make() -> nn.Module:
        kind: Any = transformers.CONFIG_MAPPING[family]
        known = vars(kind())
        taken = [name for name in SMALL if name in known or name in getattr(kind, "attribute_map", {})]
        given = {name: SMALL[name] for name in taken if not isinstance(known.get(name), list | tuple)}
        made: nn.Module = getattr(transformers, architecture)(kind(**given, num_labels=10))
        return made

    return make


def build(kind: str, make: Callable[[], nn.Module], *, infer: bool) -> Build:
    if kind == "image":
        return image(make, (2, 3, 64, 64), infer=infer)
    if kind != "both":
        return text(make, 2, 32, infer=infer)

    def built() -> Step:
        made, ids = make().train(), torch.randint(3, 1000, (2, 32))
        return stepper(made, lambda: made(input_ids=ids, labels=ids)[0], "adamw", None, infer)

    return built


def relative_error(step: Build) -> float:
    """Of the predicted peak of two steps against the measured one."""
    torch.manual_seed(0)
    random.seed(0)
    measured = measured_peak_bytes(step, steps=2)
    return simulate(trace(step, steps=2, target="cpu")).peak_bytes.allocated / measured - 1


def outcome(kind: str, family: str, architecture: str, *, infer: bool) -> str:
    make = model(family, architecture)
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in make().parameters())
        if count > _MOST_PARAMETERS:
            return f"left out: {count:,} parameters"
        return f"{relative_error(build(kind, make, infer=infer)):+.4%}"
    except BrimError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:  # of the model's own classes, about settings that do not go together
        return f"left out: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
