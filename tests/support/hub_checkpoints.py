"""Headers of published checkpoints, by the formats of their makers: names, types and shapes of all tensors.

Written from published files and from the quantizers' documentation, never by building a model: so they check what
brim says of the same configuration. ``weights_of`` gives a family's weights; a ``Scheme`` stores its linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

Shape = tuple[int, ...]
Entry = tuple[str, Shape]
Tensors = dict[str, Entry]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Weight:
    """A tensor of the full-precision checkpoint; ``linear``: quantizers replace it. ``dtype``: not the model's."""

    name: str
    shape: Shape
    linear: bool = False
    dtype: str = ""


Weights = Iterator[Weight]


def linear(name: str, out: int, inside: int, *, bias: bool = False) -> Weights:
    yield Weight(f"{name}.weight", (out, inside), linear=True)
    if bias:
        yield Weight(f"{name}.bias", (out,))


def norms(path: str, size: int, *names: str) -> Weights:
    for name in names:
        yield Weight(f"{path}.{name}.weight", (size,))


# -- families --------------------------------------------------------------------------------------------------------


def _attention(c: Config, path: str, kind: str) -> Weights:
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    kv, dim = c.get("num_key_value_heads", heads), c.get("head_dim") or hidden // heads
    if kind == "phi3":
        yield from linear(f"{path}.qkv_proj", (heads + 2 * kv) * dim, hidden)
        yield from linear(f"{path}.o_proj", hidden, heads * dim)
        return
    bias = kind.startswith("qwen2") or kind in ("glm4_moe", "gpt_oss")
    gate = 2 if c.get("attn_output_gate", kind == "qwen3_next") else 1  # Qwen3.5's q_proj has a gate for each output
    yield from linear(f"{path}.q_proj", heads * dim * gate, hidden, bias=bias)
    yield from linear(f"{path}.k_proj", kv * dim, hidden, bias=bias)
    yield from linear(f"{path}.v_proj", kv * dim, hidden, bias=bias)
    yield from linear(f"{path}.o_proj", hidden, heads * dim, bias=kind == "gpt_oss")
    if kind in ("olmo2", "olmo3", "minimax_m2"):  # over all heads at once
        yield from norms(path, heads * dim, "q_norm")
        yield from norms(path, kv * dim, "k_norm")
    elif kind.startswith(("qwen3", "gemma3")):
        yield from norms(path, dim, "q_norm", "k_norm")


def _delta_net(c: Config, path: str, *, joined: bool) -> Weights:
    """The linear attention of Qwen3-Next (``joined``) and Qwen3.5."""
    hidden, values = c["hidden_size"], c["linear_num_value_heads"]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value = values * c["linear_value_head_dim"]
    yield Weight(f"{path}.conv1d.weight", (2 * key + value, 1, c["linear_conv_kernel_dim"]))
    yield Weight(f"{path}.A_log", (values,), dtype="" if joined else "F32")
    yield Weight(f"{path}.dt_bias", (values,))
    yield Weight(f"{path}.norm.weight", (c["linear_value_head_dim"],), dtype="" if joined else "F32")
    if joined:
        yield from linear(f"{path}.in_proj_qkvz", 2 * key + 2 * value, hidden)
        yield from linear(f"{path}.in_proj_ba", 2 * values, hidden)
    else:
        yield from linear(f"{path}.in_proj_qkv", 2 * key + value, hidden)
        yield from linear(f"{path}.in_proj_z", value, hidden)
        yield from linear(f"{path}.in_proj_b", values, hidden)
        yield from linear(f"{path}.in_proj_a", values, hidden)
    yield from linear(f"{path}.out_proj", hidden, value)


def _latent_attention(c: Config, path: str) -> Weights:
    """DeepSeek's attention over compressed keys and values."""
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"]
    nope, rope, kv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    yield from linear(f"{path}.q_a_proj", rank, hidden)
    yield from norms(path, rank, "q_a_layernorm")
    yield from linear(f"{path}.q_b_proj", heads * (nope + rope), rank)
    yield from linear(f"{path}.kv_a_proj_with_mqa", kv + rope, hidden)
    yield from norms(path, kv, "kv_a_layernorm")
    yield from linear(f"{path}.kv_b_proj", heads * (nope + c["v_head_dim"]), kv)
    yield from linear(f"{path}.o_proj", hidden, heads * c["v_head_dim"])


def _mlp(path: str, hidden: int, inner: int, names: str = "gate up down") -> Weights:
    gate, up, down = names.split()
    suffix = "" if names == "w1 w3 w2" else "_proj"
    yield from linear(f"{path}.{gate}{suffix}", inner, hidden)
    yield from linear(f"{path}.{up}{suffix}", inner, hidden)
    yield from linear(f"{path}.{down}{suffix}", hidden, inner)


def _feed_forward(c: Config, path: str, kind: str, layer: int) -> Weights:
    hidden, inner = c["hidden_size"], c.get("intermediate_size", 0)
    experts = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts") or 0
    if kind == "phi3":
        yield from linear(f"{path}.mlp.gate_up_proj", 2 * inner, hidden)
        yield from linear(f"{path}.mlp.down_proj", hidden, inner)
    elif not experts or layer < c.get("first_k_dense_replace", 0):
        yield from _mlp(f"{path}.mlp", hidden, inner)
    elif kind in ("mixtral", "minimax_m2"):
        path = f"{path}.block_sparse_moe"
        yield Weight(f"{path}.gate.weight", (experts, hidden))
        for number in range(experts):
            yield from _mlp(f"{path}.experts.{number}", hidden, inner, "w1 w3 w2")
        if kind == "minimax_m2":
            yield Weight(f"{path}.e_score_correction_bias", (experts,))
    elif kind == "gpt_oss":  # MXFP4, the only form in which it is published
        yield Weight(f"{path}.mlp.router.weight", (experts, hidden))
        yield Weight(f"{path}.mlp.router.bias", (experts,))
        for name, out, inside in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield Weight(f"{path}.mlp.experts.{name}_bias", (experts, out))
            yield Weight(f"{path}.mlp.experts.{name}_blocks", (experts, out, inside // 32, 16), dtype="U8")
            yield Weight(f"{path}.mlp.experts.{name}_scales", (experts, out, inside // 32), dtype="U8")
    else:
        path, inner = f"{path}.mlp", c["moe_intermediate_size"]
        yield Weight(f"{path}.gate.weight", (experts, hidden))
        if kind in ("deepseek_v3", "glm4_moe"):
            yield Weight(f"{path}.gate.e_score_correction_bias", (experts,), dtype="F32")
        for number in range(experts):
            yield from _mlp(f"{path}.experts.{number}", hidden, inner)
        if c.get("n_shared_experts"):
            yield from _mlp(f"{path}.shared_experts", hidden, c["n_shared_experts"] * inner)
        if shared := c.get("shared_expert_intermediate_size"):
            yield from _mlp(f"{path}.shared_expert", hidden, shared)
            yield Weight(f"{path}.shared_expert_gate.weight", (1, hidden))


_NORMS = {
    "gemma3_text": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                    "post_feedforward_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
}  # fmt: skip


def _layer(c: Config, path: str, layer: int) -> Weights:
    kind = c["model_type"]
    if "linear_num_value_heads" in c and (layer + 1) % c["full_attention_interval"]:
        yield from _delta_net(c, f"{path}.linear_attn", joined=kind == "qwen3_next")
    elif "kv_lora_rank" in c:
        yield from _latent_attention(c, f"{path}.self_attn")
    else:
        yield from _attention(c, f"{path}.self_attn", kind)
    if kind == "gpt_oss":
        yield Weight(f"{path}.self_attn.sinks", (c["num_attention_heads"],))
    yield from _feed_forward(c, path, kind, layer)
    yield from norms(path, c["hidden_size"], *_NORMS.get(kind, ("input_layernorm", "post_attention_layernorm")))


def decoder(c: Config, prefix: str = "model", head: str | None = "lm_head") -> Weights:
    """A language model; ``head``: None where it has that of its embeddings."""
    table = c["vocab_size"], c["hidden_size"]
    yield Weight(f"{prefix}.embed_tokens.weight", table)
    for layer in range(c["num_hidden_layers"]):
        yield from _layer(c, f"{prefix}.layers.{layer}", layer)
    yield from norms(prefix, c["hidden_size"], "norm")
    if head is not None:
        yield Weight(f"{head}.weight", table)


def next_token_module(c: Config, layer: int) -> Weights:
    """DeepSeek's and GLM's multi-token prediction, stored as one more layer; transformers leaves it out."""
    path, hidden = f"model.layers.{layer}", c["hidden_size"]
    yield from _layer(c, path, layer)
    yield from norms(path, hidden, "enorm", "hnorm", "shared_head.norm")
    yield from linear(f"{path}.eh_proj", hidden, 2 * hidden)
    yield Weight(f"{path}.embed_tokens.weight", (c["vocab_size"], hidden))
    yield Weight(f"{path}.shared_head.head.weight", (c["vocab_size"], hidden))


def qwen35_next_token(c: Config) -> Weights:
    hidden = c["hidden_size"]
    yield from linear("mtp.fc", hidden, 2 * hidden)
    yield from _layer(c, "mtp.layers.0", c["full_attention_interval"] - 1)
    yield from norms("mtp", hidden, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def qwen3_vision(c: Config, path: str) -> Weights:
    """The encoder of Qwen3-VL and Qwen3.5."""
    hidden, merged = c["hidden_size"], c["hidden_size"] * c["spatial_merge_size"] ** 2
    patch = c["patch_size"]
    yield Weight(
        f"{path}.patch_embed.proj.weight", (hidden, c["in_channels"], c["temporal_patch_size"], patch, patch)
    )
    yield Weight(f"{path}.patch_embed.proj.bias", (hidden,))
    yield Weight(f"{path}.pos_embed.weight", (c["num_position_embeddings"], hidden))
    for block in range(c["depth"]):
        inside = f"{path}.blocks.{block}"
        yield from _layer_norms(inside, hidden, "norm1", "norm2")
        yield from linear(f"{inside}.attn.qkv", 3 * hidden, hidden, bias=True)
        yield from linear(f"{inside}.attn.proj", hidden, hidden, bias=True)
        yield from linear(f"{inside}.mlp.linear_fc1", c["intermediate_size"], hidden, bias=True)
        yield from linear(f"{inside}.mlp.linear_fc2", hidden, c["intermediate_size"], bias=True)
    mergers = [f"{path}.deepstack_merger_list.{n}" for n in range(len(c["deepstack_visual_indexes"]))]
    for merger in (f"{path}.merger", *mergers):
        yield from _layer_norms(merger, hidden if merger == f"{path}.merger" else merged, "norm")
        yield from linear(f"{merger}.linear_fc1", merged, merged, bias=True)
        yield from linear(f"{merger}.linear_fc2", c["out_hidden_size"], merged, bias=True)


def _layer_norms(path: str, size: int, *names: str) -> Weights:
    for name in names:
        yield Weight(f"{path}.{name}.weight", (size,))
        yield Weight(f"{path}.{name}.bias", (size,))


def qwen25_vision(c: Config, path: str) -> Weights:
    hidden, inner, merged = c["hidden_size"], c["intermediate_size"], c["hidden_size"] * c["spatial_merge_size"] ** 2
    patch = c["patch_size"]
    yield Weight(f"{path}.patch_embed.proj.weight", (hidden, c["in_chans"], c["temporal_patch_size"], patch, patch))
    for block in range(c["depth"]):
        inside = f"{path}.blocks.{block}"
        yield from norms(inside, hidden, "norm1", "norm2")
        yield from linear(f"{inside}.attn.qkv", 3 * hidden, hidden, bias=True)
        yield from linear(f"{inside}.attn.proj", hidden, hidden, bias=True)
        yield from linear(f"{inside}.mlp.gate_proj", inner, hidden, bias=True)
        yield from linear(f"{inside}.mlp.up_proj", inner, hidden, bias=True)
        yield from linear(f"{inside}.mlp.down_proj", hidden, inner, bias=True)
    yield from norms(f"{path}.merger", hidden, "ln_q")
    yield from linear(f"{path}.merger.mlp.0", merged, merged, bias=True)
    yield from linear(f"{path}.merger.mlp.2", c["out_hidden_size"], merged, bias=True)


def siglip(c: Config, path: str) -> Weights:
    """The encoder of Gemma 3."""
    hidden, inner, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    path = f"{path}.vision_model"
    yield Weight(f"{path}.embeddings.patch_embedding.weight", (hidden, 3, patch, patch))
    yield Weight(f"{path}.embeddings.patch_embedding.bias", (hidden,))
    yield Weight(f"{path}.embeddings.position_embedding.weight", ((c["image_size"] // patch) ** 2, hidden))
    for layer in range(c["num_hidden_layers"]):
        inside = f"{path}.encoder.layers.{layer}"
        yield from _layer_norms(inside, hidden, "layer_norm1", "layer_norm2")
        for name in ("q", "k", "v"):
            yield from linear(f"{inside}.self_attn.{name}_proj", hidden, hidden, bias=True)
        yield from linear(f"{inside}.self_attn.out_proj", hidden, hidden, bias=True)
        yield from linear(f"{inside}.mlp.fc1", inner, hidden, bias=True)
        yield from linear(f"{inside}.mlp.fc2", hidden, inner, bias=True)
    yield from _layer_norms(path, hidden, "post_layernorm")


def gemma3(c: Config) -> Weights:
    # The makers' configurations leave out what their configuration class has by default.
    defaults = {"vocab_size": 262208, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    text = {**defaults, **c["text_config"]}
    yield from decoder(text, "language_model.model", None)
    yield from siglip(c["vision_config"], "vision_tower")
    hidden, seen = text["hidden_size"], c["vision_config"]["hidden_size"]
    yield Weight("multi_modal_projector.mm_input_projection_weight", (seen, hidden))
    yield from norms("multi_modal_projector", seen, "mm_soft_emb_norm")


def pixtral(c: Config, path: str) -> Weights:
    hidden, inner, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    yield Weight(f"{path}.patch_conv.weight", (hidden, c["num_channels"], patch, patch))
    yield from norms(path, hidden, "ln_pre")
    for layer in range(c["num_hidden_layers"]):
        inside = f"{path}.transformer.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            yield from linear(f"{inside}.attention.{name}_proj", hidden, hidden)
        yield from _mlp(f"{inside}.feed_forward", hidden, inner)
        yield from norms(inside, hidden, "attention_norm", "ffn_norm")


def mistral3(c: Config) -> Weights:
    text, vision = c["text_config"], c["vision_config"]
    yield from decoder(text, "language_model.model", "language_model.lm_head")
    yield from pixtral(vision, "vision_tower")
    hidden, seen = text["hidden_size"], vision["hidden_size"]
    yield from norms("multi_modal_projector", seen, "norm")
    yield from linear("multi_modal_projector.patch_merger.merging_layer", seen, seen * c["spatial_merge_size"] ** 2)
    yield from linear("multi_modal_projector.linear_1", hidden, seen)
    yield from linear("multi_modal_projector.linear_2", hidden, hidden)


def qwen3_vl(c: Config) -> Weights:
    yield from decoder(c["text_config"], "model.language_model")
    yield from qwen3_vision(c["vision_config"], "model.visual")


def qwen35(c: Config) -> Weights:
    yield from qwen3_vl(c)
    yield from qwen35_next_token(c["text_config"])


def qwen25_vl(c: Config) -> Weights:
    yield from decoder(c)
    yield from qwen25_vision(c["vision_config"], "visual")


def deepseek(c: Config) -> Weights:
    yield from decoder(c)
    for number in range(c["num_nextn_predict_layers"]):
        yield from next_token_module(c, c["num_hidden_layers"] + number)


FAMILIES: dict[str, Callable[[Config], Weights]] = {
    "gemma3": gemma3, "mistral3": mistral3, "qwen3_vl": qwen3_vl, "qwen3_5": qwen35, "qwen2_5_vl": qwen25_vl,
    "deepseek_v3": deepseek, "glm4_moe": deepseek,
}  # fmt: skip


def weights_of(config: Config) -> Weights:
    """The tensors of the full-precision checkpoint; a tied head is stored once."""
    family = FAMILIES.get(config["model_type"])
    if family is not None:
        return family(config)
    return decoder(config, head=None if config.get("tie_word_embeddings") else "lm_head")


# -- schemes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a quantizer stores the linear layers that ``kept`` does not match, and the configuration that says so.

    ``stored``: of a layer without ``.weight`` and its sizes. ``tables``: embeddings and head are stored so too.
    """

    settings: Mapping[str, Any] | None = None
    stored: Callable[[str, int, int], Tensors] | None = None
    kept: str = "lm_head|embed_tokens"
    dtype: str = "BF16"
    tables: bool = False
    rename: Callable[[str], str] = field(default=lambda name: name)

    def headers(self, weights: Weights) -> Tensors:
        tensors: Tensors = {}
        for weight in weights:
            path, name = weight.name.removesuffix(".weight"), self.rename(weight.name)
            table = self.tables and path.endswith(("embed_tokens", "lm_head"))
            if self.stored is None or not (weight.linear or table) or re.search(self.kept, path):
                tensors[name] = weight.dtype or self.dtype, weight.shape
            else:
                tensors |= self.stored(self.rename(path), *weight.shape)
        return tensors


def nf4(path: str, out: int, inside: int) -> Tensors:
    """bitsandbytes, blocks of 64 values, whose scales are quantized in blocks of 256."""
    blocks = ceil(out * inside / 64)
    return {
        f"{path}.weight": ("U8", (ceil(out * inside / 2), 1)),
        f"{path}.weight.absmax": ("U8", (blocks,)),
        f"{path}.weight.nested_absmax": ("F32", (ceil(blocks / 256),)),
        f"{path}.weight.nested_quant_map": ("F32", (256,)),
        f"{path}.weight.quant_map": ("F32", (16,)),
        f"{path}.weight.quant_state.bitsandbytes__nf4": ("U8", (119,)),
    }


def fp4(path: str, out: int, inside: int) -> Tensors:
    return {
        f"{path}.weight": ("U8", (ceil(out * inside / 2), 1)),
        f"{path}.weight.absmax": ("F32", (ceil(out * inside / 64),)),
        f"{path}.weight.quant_map": ("F32", (16,)),
        f"{path}.weight.quant_state.bitsandbytes__fp4": ("U8", (82,)),
    }


def int8(path: str, out: int, inside: int) -> Tensors:
    return {
        f"{path}.weight": ("I8", (out, inside)),
        f"{path}.SCB": ("F32", (out,)),
        f"{path}.weight_format": ("U8", ()),
    }


def gptq(bits: int, group: int = 128) -> Callable[[str, int, int], Tensors]:
    def stored(path: str, out: int, inside: int) -> Tensors:
        groups = ceil(inside / group)
        return {
            f"{path}.qweight": ("I32", (inside * bits // 32, out)),
            f"{path}.qzeros": ("I32", (groups, out * bits // 32)),
            f"{path}.scales": ("F16", (groups, out)),
            f"{path}.g_idx": ("I32", (inside,)),
        }

    return stored


def awq(path: str, out: int, inside: int) -> Tensors:
    groups = ceil(inside / 128)
    return {
        f"{path}.qweight": ("I32", (inside, out // 8)),
        f"{path}.qzeros": ("I32", (groups, out // 8)),
        f"{path}.scales": ("F16", (groups, out)),
    }


def blocks_of_128(scales: str) -> Callable[[str, int, int], Tensors]:
    return lambda path, out, inside: {
        f"{path}.weight": ("F8_E4M3", (out, inside)),
        f"{path}.weight_scale_inv": (scales, (ceil(out / 128), ceil(inside / 128))),
    }


def per_tensor(path: str, out: int, inside: int) -> Tensors:
    """Mistral's FP8, with a scale of the inputs."""
    return {
        f"{path}.weight": ("F8_E4M3", (out, inside)),
        f"{path}.weight_scale_inv": ("BF16", ()),
        f"{path}.activation_scale": ("BF16", ()),
    }


def w4a16(group: int, *, symmetric: bool) -> Callable[[str, int, int], Tensors]:
    def stored(path: str, out: int, inside: int) -> Tensors:
        groups = ceil(inside / group)
        tensors: Tensors = {
            f"{path}.weight_packed": ("I32", (out, ceil(inside / 8))),
            f"{path}.weight_scale": ("BF16", (out, groups)),
            f"{path}.weight_shape": ("I64", (2,)),
        }
        return tensors if symmetric else tensors | {f"{path}.weight_zero_point": ("I32", (ceil(out / 8), groups))}

    return stored


def by_channel(dtype: str, scales: str = "BF16") -> Callable[[str, int, int], Tensors]:
    return lambda path, out, inside: {
        f"{path}.weight": (dtype, (out, inside)),
        f"{path}.weight_scale": (scales, (out, 1)),
    }


def static_fp8(path: str, out: int, inside: int) -> Tensors:
    """compressed-tensors, a scale for each tensor and for its inputs."""
    return {
        f"{path}.weight": ("F8_E4M3", (out, inside)),
        f"{path}.weight_scale": ("BF16", (1,)),
        f"{path}.input_scale": ("BF16", (1,)),
    }


def modelopt_fp8(path: str, out: int, inside: int) -> Tensors:
    return {
        f"{path}.weight": ("F8_E4M3", (out, inside)),
        f"{path}.weight_scale": ("F32", ()),
        f"{path}.input_scale": ("F32", ()),
    }


def compressed_nvfp4(path: str, out: int, inside: int) -> Tensors:
    return {
        f"{path}.weight_packed": ("U8", (out, inside // 2)),
        f"{path}.weight_scale": ("F8_E4M3", (out, inside // 16)),
        f"{path}.weight_global_scale": ("F32", (1,)),
        f"{path}.input_global_scale": ("F32", (1,)),
    }


def modelopt_nvfp4(path: str, out: int, inside: int) -> Tensors:
    return {
        f"{path}.weight": ("U8", (out, inside // 2)),
        f"{path}.weight_scale": ("F8_E4M3", (out, inside // 16)),
        f"{path}.weight_scale_2": ("F32", ()),
        f"{path}.input_scale": ("F32", ()),
    }


def torchao_int4(path: str, out: int, inside: int) -> Tensors:
    """torchao's tensors are stored flat, by the attributes of the subclass."""
    return {
        f"{path}._weight_qdata": ("I8", (out, inside)),
        f"{path}._weight_scale": ("BF16", (out, inside // 32)),
        f"{path}._weight_zero_point": ("I8", (out, inside // 32)),
    }


def torchao_fp8(path: str, out: int, inside: int) -> Tensors:
    return {f"{path}._weight_qdata": ("F8_E4M3", (out, inside)), f"{path}._weight_scale": ("F32", (out, 1))}


def mlx(bits: int) -> Callable[[str, int, int], Tensors]:
    return lambda path, out, inside: {
        f"{path}.weight": ("U32", (out, inside * bits // 32)),
        f"{path}.scales": ("BF16", (out, inside // 64)),
        f"{path}.biases": ("BF16", (out, inside // 64)),
    }
