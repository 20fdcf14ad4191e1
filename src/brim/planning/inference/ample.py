"""Bound the memory of a model that certainly fits: it runs without a trace, a plan or measured rates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from brim.allocator.config import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from brim.core import Decision, Hardware, Plan, Promise
from brim.core.hardware import RAM, VRAM
from brim.measure.capacity import resident_bytes
from brim.memory.checkpoint_files import TensorSource
from brim.memory.mapped import present_bytes
from brim.models.opening import OpenedModel
from brim.planning.inference.choose import with_graphs
from brim.planning.inference.memory import Sizes
from brim.techniques.blocks import Partition, find_blocks
from brim.techniques.decoding_graphs import graph_bytes
from brim.techniques.kv_offload.cache import CacheShape, Placement
from brim.techniques.streaming.placement import NAME, RESIDENT

_ROOM = 2  # a budget of so many times the bound is ample
_COPIES = 4  # of each layer's results, of all scores and logits, that are in memory at once
_NUMBER_BYTES = 4  # norms, scores and logits are computed in float32
_PROGRAM_BYTES = 256 << 20  # code, objects, and buffers per thread of libraries, which no product has warmed up
_DRIVER_BYTES = 1 << 30  # of RAM: a GPU's context, and the code of its kernels
_LAYER = re.compile(r"(?:^|\.)\d+\.")


@dataclass(frozen=True, kw_only=True)
class AmpleStrategy:
    """A generation that certainly fits: all weights stay in memory. ``shape`` None: the model makes its own cache."""

    partition: Partition
    plan: Plan
    sizes: Sizes
    shape: CacheShape | None
    placement: Placement | None


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound of memory, by the configuration and the headers of files. ``open`` opens the model."""

    config: Any
    stored: Mapping[str, TensorSource]
    sizes: Sizes
    hardware: Hardware
    budget: dict[str, int]
    open: Callable[[], OpenedModel]

    def step_bytes(self) -> int:
        """Return more than a decoder's passes take beside its weights, its KV cache included."""
        sizes, text = self.sizes, self.config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        width = max(text.hidden_size, heads * (getattr(text, "head_dim", None) or 0))
        widths = Counter[str]()  # of the results of all weights in a layer, and outside of layers
        for name, source in self.stored.items():
            shape = 1, *source.shape
            called = prod(shape[:-2]) * sum(shape[-2:])  # all experts may be, each on a copy of all rows
            widths[_layer(name)] += called if "expert" in name else max(shape)
        results = widths.pop("", 0) + max(widths.values(), default=0)
        cache = 2 * text.num_hidden_layers * width
        row_bytes = _NUMBER_BYTES * sizes.batch * width
        tokens = sizes.prompt + 2  # sampling takes 42 bytes of a score, less than the copies of two tokens' logits
        # A tensor that grows leaves segments behind, each a little too small for the next.
        copies = 2 + row_bytes * (sizes.total - sizes.prompt) // SMALL_SEGMENT_BYTES * (self.hardware.compute == VRAM)
        numbers: int = tokens * _COPIES * (results + (heads + 1) * sizes.total) + copies * cache * sizes.total
        packed_bytes = max(source.bytes for source in self.stored.values())  # kernels may reorder a weight
        return _NUMBER_BYTES * sizes.batch * numbers + packed_bytes

    def peak_bytes(self, program_bytes: int = _PROGRAM_BYTES) -> dict[str, int]:
        """Return all bytes per tier, of which ``program_bytes`` in RAM are neither weights nor of passes."""
        weights_bytes = sum(source.bytes for source in self.stored.values())
        if self.hardware.compute == RAM:
            return {RAM: weights_bytes + self.step_bytes() + program_bytes}
        blocks = Counter[str]()  # each passes through RAM, and has a segment, or at least half of one
        for name, source in self.stored.items():
            blocks[_layer(name) or name] += source.bytes
        small = sum(count for count in blocks.values() if 2 * count < LARGE_SEGMENT_BYTES)
        unused_bytes = small + SMALL_SEGMENT_BYTES * len(blocks) + LARGE_SEGMENT_BYTES
        return {
            VRAM: weights_bytes + unused_bytes + self.step_bytes() + _PROGRAM_BYTES,
            RAM: program_bytes + _DRIVER_BYTES + 2 * max(blocks.values()),
        }

    def strategy(
        self, opened: OpenedModel, shape: CacheShape | None, start_bytes: int, *, graphs: bool
    ) -> AmpleStrategy:
        """Return an opened model's strategy. ``start_bytes`` were resident before it; ``graphs``: by CUDA graphs."""
        sizes, partition = self.sizes, find_blocks(opened.module)
        present = present_bytes(list(opened.module.parameters()))
        program_bytes = max(0, resident_bytes() - present - start_bytes) + _PROGRAM_BYTES
        rate = self.hardware.tier(self.hardware.compute).bytes_per_s  # 0: not measured yet
        token_s = partition.bytes / rate if rate else 0.0
        peak_bytes = self.peak_bytes(program_bytes)
        plan = Plan(
            model=opened.name,
            hardware=self.hardware.name,
            task="generate",
            budget_bytes=self.budget,
            decisions=tuple(
                Decision(technique=NAME, block=block.name, choice=RESIDENT, bytes=block.bytes)
                for block in partition.blocks
            ),
            promise=Promise(peak_bytes=peak_bytes, step_s=token_s, bound_s=token_s, limited_by="compute"),
            settings={"batch": sizes.batch, "prompt_tokens": sizes.prompt, "total_tokens": sizes.total},
        )
        if graphs and VRAM in peak_bytes:
            planned = shape is not None and bool(shape.planned)
            plan = with_graphs(plan, graph_bytes(opened.module, sizes.batch, sizes.total, planned=planned))
        placement = None if shape is None else sizes.placement(shape, 0)
        return AmpleStrategy(partition=partition, plan=plan, sizes=sizes, shape=shape, placement=placement)

    def fits(self, kind: Any, dtype: torch.dtype | None) -> bool:
        """Return True for a decoder of class ``kind`` that takes at most half of the ``budget``.

        Only models of matrices and transformers' own attention: others have temporaries that no width bounds.
        """
        config, wanted = self.config, dtype or getattr(self.config, "dtype", None)
        plain = kind.can_generate() and kind._supports_attention_backend and not config.is_encoder_decoder
        plain = plain and not getattr(config, "quantization_config", None)
        for name, source in self.stored.items():
            expert = "expert" in name  # those of a layer are merged, which would copy mapped files
            plain = plain and len(source.shape) < 3 + expert and (self.hardware.compute == VRAM or not expert)
            plain = plain and source.dtype == wanted and source.is_mappable and source.bytes > 0
        return plain and all(_ROOM * count <= self.budget[tier] for tier, count in self.peak_bytes().items())


def _layer(name: str) -> str:
    found = _LAYER.search(name)
    return name[: found.end()] if found else ""
