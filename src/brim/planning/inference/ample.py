"""Bound the memory of a model that certainly fits: it runs without a trace, a plan or measured rates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from brim.core import Decision, Hardware, Plan, Promise
from brim.core.hardware import RAM
from brim.measure.capacity import resident_bytes
from brim.memory.checkpoint_files import TensorSource
from brim.memory.mapped import present_bytes
from brim.models.opening import OpenedModel
from brim.planning.inference.memory import Sizes
from brim.techniques.blocks import Partition, find_blocks, tensor_bytes
from brim.techniques.streaming.placement import NAME, RESIDENT

_ROOM = 2  # a budget of so many times the bound is ample
_COPIES = 4  # of each layer's results, of all scores and logits, that are in memory at once
_NUMBER_BYTES = 4  # norms, scores and logits are computed in float32
_PROGRAM_BYTES = 256 << 20  # code, objects, and buffers per thread of libraries, which no product has warmed up
_LAYER = re.compile(r"(?:^|\.)\d+\.")


@dataclass(frozen=True, kw_only=True)
class AmpleStrategy:
    """A generation that certainly fits: all weights stay in memory, and the model makes its own KV cache."""

    partition: Partition
    plan: Plan
    sizes: Sizes
    shape: None = None
    placement: None = None


def step_bound_bytes(config: Any, stored: Mapping[str, TensorSource], sizes: Sizes) -> int:
    """Return more than a decoder's passes of ``sizes`` take beside its weights, its KV cache included."""
    text = config.get_text_config(decoder=True)
    heads, width = text.num_attention_heads, max(text.hidden_size, getattr(text, "head_dim", None) or 0)
    widths = Counter[str]()  # of the results of all weights in a layer, and outside of layers
    for name, source in stored.items():
        layer = _LAYER.search(name)
        widths[name[: layer.end()] if layer else ""] += max(source.shape, default=1)
    results = widths.pop("", 0) + max(widths.values(), default=0)
    cache = 2 * 2 * text.num_hidden_layers * max(width, heads * (getattr(text, "head_dim", None) or 0))
    numbers = sizes.prompt * _COPIES * (results + (heads + 1) * sizes.total) + cache * sizes.total
    packed_bytes = max(source.bytes for source in stored.values())  # a kernel may reorder a weight for its product
    return int(_NUMBER_BYTES * sizes.batch * numbers) + packed_bytes


def fits_amply(
    kind: Any, config: Any, stored: Mapping[str, TensorSource], dtype: torch.dtype | None, sizes: Sizes, budget: int
) -> bool:
    """Return True for a decoder of class ``kind`` that takes at most half of a ``budget`` of RAM, its weights mapped.

    Only models of matrices and transformers' own attention: others have temporaries that no width bounds.
    """
    wanted = dtype or getattr(config, "dtype", None)
    plain = kind.can_generate() and kind._supports_attention_backend and not config.is_encoder_decoder
    for name, source in stored.items():
        plain = plain and len(source.shape) < 3 and source.dtype == wanted and "expert" not in name
        plain = plain and source.is_mappable and source.bytes > 0
    if not plain or getattr(config, "quantization_config", None):
        return False
    weights = sum(source.bytes for source in stored.values())
    return _ROOM * (weights + step_bound_bytes(config, stored, sizes) + _PROGRAM_BYTES) <= budget


def ample_strategy(
    opened: OpenedModel, hardware: Hardware, budget: Mapping[str, int], sizes: Sizes, start_bytes: int
) -> AmpleStrategy:
    """Return the strategy of a loaded model. The resident set of ``start_bytes`` was before it."""
    model: Any = opened.module
    parameters = list(model.parameters())
    beside_bytes = max(0, resident_bytes() - present_bytes(parameters) - start_bytes) + _PROGRAM_BYTES
    weights_bytes = sum(map(tensor_bytes, parameters))
    peak_bytes = weights_bytes + step_bound_bytes(model.config, opened.sources, sizes) + beside_bytes
    rate = hardware.tier(RAM).bytes_per_s  # 0: not measured yet
    token_s = weights_bytes / rate if rate else 0.0
    partition = find_blocks(model)
    plan = Plan(
        model=opened.name,
        hardware=hardware.name,
        task="generate",
        budget_bytes=budget,
        decisions=tuple(
            Decision(technique=NAME, block=block.name, choice=RESIDENT, bytes=block.bytes)
            for block in partition.blocks
        ),
        promise=Promise(peak_bytes={RAM: peak_bytes}, step_s=token_s, bound_s=token_s, limited_by="compute"),
        settings={"batch": sizes.batch, "prompt_tokens": sizes.prompt, "total_tokens": sizes.total},
    )
    return AmpleStrategy(partition=partition, plan=plan, sizes=sizes)
