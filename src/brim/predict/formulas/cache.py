"""Bytes of the key-value cache: multi-head, grouped-query, multi-query, latent (MLA) and sliding-window attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brim.errors import ModelError, UsageError
from brim.predict.formulas.result import Result, at_least_one, item_bytes, result, written_bytes


def kv_cache(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    tokens: int = 1,
    batch: int = 1,
    dtype: str = "bfloat16",
    window: int | None = None,
    windowed_layers: int = 0,
) -> Result:
    """Keys and values of ``tokens`` tokens; ``kv_heads`` is 1 for multi-query and all heads for multi-head attention.

    ``windowed_layers`` of the layers keep the last ``window`` tokens only.
    """
    at_least_one(layers=layers, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, batch=batch)
    if windowed_layers and (window is None or not 0 < windowed_layers <= layers or window < 1):
        raise UsageError(
            f"Cannot give {windowed_layers} of {layers} layers a window of {window}.",
            "The window must be at least 1, and windowed_layers at most layers.",
        )
    kept = min(tokens, window) if window is not None else tokens
    full = layers - windowed_layers
    positions = full * tokens + windowed_layers * kept
    heads = f"{kv_heads} head{'s' * (kv_heads > 1)} x {head_dim} x {written_bytes(dtype)}"
    if kept < tokens and windowed_layers:
        parts = [f"{full} layers x {tokens:,} tokens"] * bool(full)
        parts.append(f"{windowed_layers} layers x {kept:,} tokens")
        text = f"2 x ({' + '.join(parts)}) x {heads}"
    else:
        text = f"2 x {layers} layers x {heads}" + (f" x {tokens:,} tokens" if tokens > 1 else "")
    text += f" x {batch} sequences" if batch > 1 else ""
    per = "per token" if tokens == batch == 1 else ""
    return result(2 * positions * kv_heads * head_dim * batch * item_bytes(dtype), "B", text, per=per)


def latent_kv_cache(
    *,
    layers: int,
    kv_lora_rank: int,
    rope_head_dim: int,
    tokens: int = 1,
    batch: int = 1,
    dtype: str = "bfloat16",
) -> Result:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, Table 1): one latent and one rotary key per token.

    An implementation that absorbs the up-projections keeps this; transformers expands the latent and keeps all heads.
    """
    at_least_one(layers=layers, kv_lora_rank=kv_lora_rank, rope_head_dim=rope_head_dim, tokens=tokens, batch=batch)
    count = layers * (kv_lora_rank + rope_head_dim) * tokens * batch * item_bytes(dtype)
    text = f"{layers} layers x ({kv_lora_rank} + {rope_head_dim}) x {written_bytes(dtype)}"
    text += f" x {tokens:,} tokens" if tokens > 1 else ""
    text += f" x {batch} sequences" if batch > 1 else ""
    per = "per token" if tokens == batch == 1 else ""
    return result(count, "B", text, source="DeepSeek-AI, arXiv 2405.04434, Table 1", per=per)


def kv_cache_of_config(
    config: Mapping[str, Any], *, tokens: int = 1, batch: int = 1, dtype: str = "bfloat16"
) -> Result:
    """The decoder's self-attention cache of a Hugging Face ``config``; latent where it has ``kv_lora_rank``.

    Raises ModelError if the configuration lacks the number of layers or heads.
    """
    layers = _read(config, "num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    if config.get("kv_lora_rank"):
        rank, rope = _read(config, "kv_lora_rank"), _read(config, "qk_rope_head_dim")
        return latent_kv_cache(
            layers=layers, kv_lora_rank=rank, rope_head_dim=rope, tokens=tokens, batch=batch, dtype=dtype
        )
    heads = _read(config, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
    hidden = _read(config, "hidden_size", "n_embd", "d_model")
    grouped = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    kv_heads = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else grouped
    head_dim = config.get("head_dim") or config.get("d_kv") or hidden // heads
    windowed = _windowed_layers(config, layers)
    return kv_cache(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tokens=tokens,
        batch=batch,
        dtype=dtype,
        window=_read(config, "sliding_window", "window_size") if windowed else None,
        windowed_layers=windowed,
    )


def _windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers attend to a window: by ``layer_types``, GPT-Neo's or Gemma 2's pattern, or all of them."""
    kinds = config.get("layer_types") or config.get("attention_layers")
    if kinds:
        return sum(kind in ("sliding_attention", "local") for kind in kinds)
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if config.get("model_type") == "gemma2":  # every other layer, beginning with the first
        return (layers + 1) // 2
    return layers


def _read(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelError("Cannot size the key-value cache of this configuration.", f"It has none of {', '.join(names)}.")
