"""Closed forms: formulas that can be computed on paper, with the arithmetic shown."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.core.files import regular
from brim.errors import ModelError, UsageError
from brim.predict.formulas.optimizers import optimizer_state
from brim.predict.formulas.result import Result as Result
from brim.predict.formulas.result import at_least_one, item_bytes, result, written_bytes

if TYPE_CHECKING:
    from torch import nn  # annotations only: the formulas must answer before torch is imported

_LARGEST_HEADER_BYTES = 100_000_000  # the format's own limit
_ACTIVATIONS = "Korthikanti et al., arXiv 2205.05198"


def weights(parameters: int, dtype: str = "float32") -> Result:
    """Bytes of that many parameters, in decimal and binary gigabytes too, since papers mix the two."""
    at_least_one(parameters=parameters)
    size = result(parameters * item_bytes(dtype), "B", f"{parameters:,} x {written_bytes(dtype)}")
    if size.value < 1e7:
        return size
    gigabytes = f"{size.arithmetic} = {size.value / 1e9:,.2f} GB = {size.value / 2**30:,.2f} GiB"
    return Result(value=size.value, unit="B", arithmetic=gigabytes)


def parameters_from_size(file_bytes: int, dtype: str) -> Result:
    """Parameters in a weights file of that size: its header (some KB in gigabytes) is counted as weights."""
    at_least_one(file_bytes=file_bytes)
    count = Fraction(file_bytes) / item_bytes(dtype)
    return result(count, "parameters", f"{file_bytes:,} B / {written_bytes(dtype)}")


def checkpoint_weights(path: str | Path) -> Result:
    """Bytes of all tensors in a ``.safetensors`` file, or in all of them in a directory, from the headers alone.

    Raises ModelError where there is none or a header is damaged.
    """
    where = Path(path)
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    if not files:
        raise ModelError(f"Cannot find the weights in {where}.", "It has no .safetensors file.")
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for file in files:
        for entry in _header(file).values():
            first, last = entry["data_offsets"]
            tensors[entry["dtype"]] += 1
            sizes[entry["dtype"]] += last - first
    text = " + ".join(f"{tensors[kind]:,} {kind} tensors of {sizes[kind]:,} B" for kind in sorted(sizes))
    return result(sum(sizes.values()), "B", text or "no tensors", source=f"{len(files)} safetensors headers")


def _header(file: Path) -> Mapping[str, Any]:
    """The header: 8 bytes of its length, then JSON of name -> dtype, shape, data_offsets."""
    try:
        with regular(file).open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError(f"it announces a header of {length:,} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not (type(first) is type(last) is int and 0 <= first <= last and isinstance(entry["dtype"], str)):
                raise ValueError(f"tensor {name!r} lies at {entry['data_offsets']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelError(f"Cannot read the safetensors header of {file}.", f"{error}.") from error
    return dict(header)


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
    *, layers: int, kv_lora_rank: int, rope_head_dim: int, tokens: int = 1, batch: int = 1, dtype: str = "bfloat16"
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


def activations_per_layer(
    *, sequence: int, micro_batch: int, hidden: int, heads: int, recompute: str = "none"
) -> Result:
    """Bytes that one layer of a transformer trained in 16 bits keeps for backward.

    One layer of a GPT with dropout masks of one byte keeps ``sbh (34 + 5 a s / h)`` bytes (Table 2): 11 sbh in
    attention beside the ``5 a s^2 b`` of softmax, its dropout mask and its output, 19 sbh in the MLP and 4 sbh in the
    two layer norms.

    ``recompute``: ``none``, ``selective`` (the attention core is computed again) or ``full`` (only the layer's input
    is kept).
    """
    at_least_one(sequence=sequence, micro_batch=micro_batch, hidden=hidden, heads=heads)
    core = Fraction(5 * heads * sequence, hidden)
    kinds: dict[str, tuple[Fraction | int, str]] = {
        "none": (34 + core, f"(34 + 5 x {heads} x {sequence:,} / {hidden:,})"),
        "selective": (34, "34"),
        "full": (2, "2"),
    }
    if recompute not in kinds:
        raise UsageError(f"Unknown recompute {recompute!r}.", f"Known: {', '.join(kinds)}.")
    each, text = kinds[recompute]
    return result(
        sequence * micro_batch * hidden * each, "B", f"{sequence:,} x {micro_batch} x {hidden:,} x {text}",
        source=f"{_ACTIVATIONS}, Table 2", per="per layer",
    )  # fmt: skip


def megatron_states(parameters: int, *, data_parallel: int = 1, distributed_optimizer: bool = False) -> Result:
    """Bytes of Megatron-LM's states for the ``parameters`` that one GPU holds.

    18 B per parameter: 2 of bfloat16 weights, 4 of float32 gradients, 4 of float32 weights and 8 of moments. The
    distributed optimizer splits the last 12 over the data-parallel GPUs: ``6 + 12 / dp``
    (Megatron-LM ``docs/source/api-guide/dist_optimizer.md``).
    """
    at_least_one(parameters=parameters, data_parallel=data_parallel)
    source = "Megatron-LM, dist_optimizer"
    if not distributed_optimizer:
        return result(18 * parameters, "B", f"{parameters:,} x 18 B", source=source)
    each = 6 + Fraction(12, data_parallel)
    return result(parameters * each, "B", f"{parameters:,} x (6 + 12 / {data_parallel}) B", source=source)


def explain_training(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    batch: int,
    sequence: int,
    dtype: str,
    optimizer: str,
    recompute: str = "none",
) -> dict[str, Result]:
    """Bytes of a training step, by category. Activations only where ``config`` is a transformer's.

    Gradients and optimizer state have the weights' ``dtype``, as in plain PyTorch. Activations are those of a GPT
    layer in 16 bits (``activations_per_layer``); for other layers this is a rough figure, and a trace is exact.
    """
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    count = sum(map(math.prod, shapes))
    formulas = {
        "parameters": weights(count, dtype),
        "gradients": weights(count, dtype),
        "optimizer_state": optimizer_state(optimizer, shapes, dtype=dtype),
    }
    sizes = _transformer_sizes(config)
    if sizes is not None:
        layers, hidden, heads = sizes
        per_layer = activations_per_layer(
            sequence=sequence, micro_batch=batch, hidden=hidden, heads=heads, recompute=recompute
        )
        per_layer = replace(per_layer, source=f"of a GPT layer in 16 bits: {per_layer.source}")
        formulas["activations_per_layer"] = per_layer
        text = f"{layers} layers x {per_layer.value:,} B"
        formulas["activations"] = result(layers * per_layer.value, "B", text, source=per_layer.source)
    return formulas


def explain_generation(
    model: nn.Module, config: Mapping[str, Any], *, batch: int, tokens: int, dtype: str
) -> dict[str, Result]:
    """Bytes of generation: the weights, and the key-value cache of ``tokens`` tokens where there is one."""
    formulas = {"parameters": weights(sum(math.prod(p.shape) for p in model.parameters()), dtype)}
    try:
        formulas["kv_cache_per_token"] = kv_cache_of_config(config, dtype=dtype)
        formulas["kv_cache"] = kv_cache_of_config(config, tokens=tokens, batch=batch, dtype=dtype)
    except ModelError:
        return formulas  # no attention, no cache: a state-space or convolutional model
    return formulas


def _transformer_sizes(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(layers, hidden, heads) of a decoder or encoder; None where the configuration has none of that shape."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    return (layers, hidden, heads) if layers and hidden and heads else None


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
