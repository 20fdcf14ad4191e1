"""A decoder's sizes, read from its configuration under whatever names it has there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brim.errors import UnsupportedError
from brim.estimation.models import Source, transformers_config
from brim.estimation.parallel import Sizes

# Decoders whose layer is norm, attention, norm, feed-forward, in that order, and what is special about each.
_GATED = ("llama", "mistral", "qwen2", "phi3", "gemma")
_PLAIN = ("gpt2", "opt", "starcoder2")
_LEARNED = ("gpt2", "opt")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a dense decoder is made of. ``positions`` is the length of a table of learned ones, 0 with rotary ones."""

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

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all keys; of all values too."""
        return self.kv_heads * self.head_dim

    def sizes(self, sequence: int) -> Sizes:
        return Sizes(
            layers=self.layers, heads=self.heads, kv_heads=self.kv_heads, hidden=self.hidden, ffn=self.ffn,
            sequence=sequence,
        )  # fmt: skip


def shape_of(source: Source) -> Shape:
    """Raises UnsupportedError for what is not a dense decoder of the usual kind."""
    if source.library != "transformers":
        raise UnsupportedError(
            f"{source.name} was to be split over several GPUs.", "That is known of transformers' language models only."
        )
    config: Any = transformers_config(source)
    kind = str(config.model_type)
    if kind not in (*_GATED, *_PLAIN):
        what = "a mixture of experts" if _experts(config) else f"a {kind}"
        raise UnsupportedError(
            f"{source.name} was to be split over several GPUs.", f"It is {what}, which is not known to split.",
            f"Known are dense decoders: {', '.join((*_GATED, *_PLAIN))}.",
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
    )


def _experts(config: Any) -> int:
    return int(_first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
