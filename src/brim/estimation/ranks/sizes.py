"""A decoder's sizes, from its configuration, under any of the names in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brim.errors import UnsupportedError
from brim.estimation.extrapolation import on_meta
from brim.estimation.models import Source, transformers_config
from brim.estimation.ranks.split import Sizes
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel.context_parallel import narrow
from brim.techniques.parallel.tensor_parts import has_transposed, why_not_split

# Decoders whose layer is norm, attention, norm, feed-forward, in that order, and what is special about each.
_GATED = ("llama", "mistral", "qwen2", "phi3", "gemma", "mixtral", "deepseek_v2", "deepseek_v3")
_PLAIN = ("gpt2", "opt", "starcoder2")
_LEARNED = ("gpt2", "opt")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks, and widths of a head. ``query_rank`` 0:
    queries come from the hidden states."""

    query_rank: int
    key_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """``chosen`` of ``count`` experts of width ``inner`` for each token, beside shared ones of width ``shared``;
    the first ``dense_layers`` layers have none."""

    count: int
    chosen: int
    inner: int
    shared: int
    dense_layers: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes and features. ``positions`` is the length of a learned table, 0 with rotary ones;
    ``windowed``: attention is limited to a window. ``whole_tensors``: ``brim train`` does not split its layers'
    products (``techniques.parallel.tensor_parts``)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int
    gated: bool
    layer_norm: bool
    bias: bool
    qkv_bias: bool
    tied: bool
    dropout: bool
    latent: Latent | None = None
    experts: Experts | None = None
    windowed: bool = False
    whole_tensors: bool = False

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    def sizes(self, sequence: int) -> Sizes:
        return Sizes(
            layers=self.layers, heads=self.heads, kv_heads=self.kv_heads, hidden=self.hidden, ffn=self.ffn,
            sequence=sequence, experts=self.experts.count if self.experts else 0,
        )  # fmt: skip


def shape_of(source: Source) -> Shape:
    """Read a decoder's sizes. Raises UnsupportedError for any other kind of model."""
    if source.library != "transformers":
        raise UnsupportedError(
            f"Cannot split {source.name} over several GPUs.",
            "brim can split the language models of transformers only.",
        )
    config: Any = transformers_config(source)
    kind = str(config.model_type)
    if kind not in (*_GATED, *_PLAIN):
        raise UnsupportedError(
            f"Cannot split {source.name} over several GPUs.", f"It is a {kind}, which brim cannot split.",
            f"Known decoders: {', '.join((*_GATED, *_PLAIN))}.",
        )  # fmt: skip
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    plain = kind in _PLAIN
    ffn = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    dropout = _first(config, "resid_pdrop", "dropout", "hidden_dropout") or 0.0
    return Shape(
        name=source.name,
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        ffn=int(ffn),
        vocabulary=int(config.vocab_size),
        positions=int(config.max_position_embeddings) if kind in _LEARNED else 0,
        gated=not plain,
        layer_norm=plain,
        bias=plain,
        qkv_bias=plain or kind == "qwen2" or bool(getattr(config, "attention_bias", False)),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        dropout=dropout > 0,
        latent=_latent(config),
        experts=_experts(config),
        windowed=narrow(config) is not None,
        whole_tensors=_has_whole_tensors(source, config),
    )


def _has_whole_tensors(source: Source, config: Any) -> bool:
    """Ask the layers themselves: a configuration does not say."""
    model = on_meta(source, config)
    if model is None:
        return False
    layers = [model.get_submodule(path) for path in blocks(model)[:1]]
    return any(why_not_split(layer) or has_transposed(layer) for layer in layers)


def _latent(config: Any) -> Latent | None:
    if not getattr(config, "kv_lora_rank", None):
        return None
    return Latent(
        query_rank=int(config.q_lora_rank or 0),
        key_rank=int(config.kv_lora_rank),
        plain=int(config.qk_nope_head_dim),
        rotary=int(config.qk_rope_head_dim),
        value=int(config.v_head_dim),
    )


def _experts(config: Any) -> Experts | None:
    count = _first(config, "num_local_experts", "n_routed_experts")
    if not count:
        return None
    inner = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    return Experts(
        count=int(count), chosen=int(config.num_experts_per_tok), inner=inner,
        shared=inner * int(getattr(config, "n_shared_experts", None) or 0),
        dense_layers=int(getattr(config, "first_k_dense_replace", None) or 0),
    )  # fmt: skip


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
