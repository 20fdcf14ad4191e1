"""The closed forms of one model: its parameters by layer type, and what training or generating with it takes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brim.errors import ModelError
from brim.predict.formulas.activations import activations_per_layer
from brim.predict.formulas.cache import kv_cache_of_config
from brim.predict.formulas.checkpoint import weights
from brim.predict.formulas.optimizers import optimizer_state
from brim.predict.formulas.result import Result, result

if TYPE_CHECKING:
    from torch import nn  # annotations only: the formulas must answer before torch is imported

Shapes = tuple[tuple[int, ...], ...]


def parameters_by_type(model: nn.Module) -> dict[str, Result]:
    """Parameters by layer type and shape, each shared one once: ``"Linear [[8, 8], [8]]"`` -> ``2 x (8 x 8 + 8)``.

    The values sum to the model's count.
    """
    counts: dict[tuple[str, Shapes], int] = defaultdict(int)
    for kind, shapes in _owners(model):
        counts[kind, shapes] += 1
    formulas = {}
    for (kind, shapes), count in counts.items():
        shape_text = " + ".join(" x ".join(f"{n:,}" for n in shape) or "1" for shape in shapes)
        elements = sum(map(math.prod, shapes))
        formulas[f"{kind} {list(map(list, shapes))}"] = result(
            count * elements, "parameters", f"{count} x ({shape_text})"
        )
    return formulas


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


def _owners(model: nn.Module) -> Iterator[tuple[str, Shapes]]:
    """Every module that owns parameters, as its type and the shapes of those that no earlier one owned."""
    seen: set[int] = set()
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen]
        seen.update(map(id, own))
        if own:
            yield type(module).__name__, tuple(tuple(parameter.shape) for parameter in own)


def _transformer_sizes(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(layers, hidden, heads) of a decoder or encoder; None where the configuration has none of that shape."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads")
    return (layers, hidden, heads) if layers and hidden and heads else None


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
