"""transformers as it was for the xMem runs (4.51), where a newer one takes other memory in a training step.

Each replacement names what differed; everything else is the installed transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from transformers import cache_utils, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.t5 import modeling_t5

# Models whose attention went through the shared function then; the others still had classes of their own.
_SHARED = ("gpt2", "gpt_neox", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3", "gemma", "gemma2", "smollm3")


@contextmanager
def transformers_4_51() -> Iterator[None]:
    """Attention and caches of 4.51 while the context is open."""
    attention = {**modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa": _contiguous_sdpa}
    with mock.patch.object(cache_utils.DynamicLayer, "update", _update), \
         mock.patch.object(type(modeling_utils.ALL_ATTENTION_FUNCTIONS), "_global_mapping", attention), \
         mock.patch.object(modeling_t5, "eager_attention_forward", _t5_attention):  # fmt: skip
        yield


def from_config(family: Any, config: Any) -> nn.Module:
    """A model in float32 with the buffers and the default attention of 4.51: T5 had no other than its own."""
    if config.model_type in ("t5", "mt5"):
        config._attn_implementation = "eager"
    model: nn.Module = family.from_config(config, dtype=torch.float32)
    if config.model_type == "gpt2":
        for block in model.transformer.h:  # type: ignore[union-attr]
            tokens = config.n_positions
            block.attn.register_buffer("bias", torch.ones(1, 1, tokens, tokens, dtype=torch.bool), persistent=False)
            block.attn.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
    return model


_newer_update = cache_utils.DynamicLayer.update


def _update(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A layer's first keys and values were kept as they are; since 4.56 they are copied behind an empty tensor."""
    if layer.is_initialized:
        return _newer_update(layer, keys, values, *args, **kwargs)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return keys, values


def _contiguous_sdpa(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The shared function made its inputs contiguous (a bug in PyTorch's memory-efficient attention)."""
    if getattr(getattr(module, "config", None), "model_type", "") in _SHARED:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def _t5_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask was added to the position bias once for all layers, and the sum to the scores in place."""
    scores = torch.matmul(query, key.transpose(3, 2))
    assert position_bias is not None
    bias = getattr(position_bias, "with_mask", None)
    if bias is None:
        bias = position_bias if attention_mask is None else position_bias + attention_mask
        position_bias.with_mask = bias  # type: ignore[attr-defined]
    scores += bias
    weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
