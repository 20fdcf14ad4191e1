"""The KV cache as a planned storage: taken from brim's pools once, as large as it will become.

transformers' own cache grows by ``torch.cat``: with every token each layer is copied, and for a moment is held twice.
Here a layer has its room from the start and a token is written to its place. Where the compute tier is too small, the
``resting`` oldest tokens of every layer rest in RAM. A layer's call finds them in a slot of a ring, brought there
while the layer before it computes; the newer tokens stay in the compute tier and join them in the slot.

Attention reads the same values in the same order either way, so the results are those of transformers' cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from brim.core.hardware import RAM
from brim.core.trace import Category
from brim.errors import UnsupportedError, UsageError
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory
from brim.techniques.kv_offload.host_tokens import Resting, RestingLayers

__all__ = ["NAME", "OLDER_IN_RAM", "RESIDENT", "CacheShape", "LayerShape", "Placement", "PlannedCache"]
__all__ += ["apply", "own_cache", "restings", "shape_of"]

NAME = "kv_cache"
# What stands for a layer that uses another's keys and values; older ones have none such.
_SHARING: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
RESIDENT, OLDER_IN_RAM = "resident", "older:ram"
RESTING_TOKENS = "kv_resting_tokens"  # in a plan's settings
SLOTS = 2  # one in use, one being filled
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the tokens, worth trying as those that rest in RAM


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One attention layer's part per token: ``heads`` keys of ``key_dim`` and as many values of ``value_dim``."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def joined_bytes(self) -> int:
        """What transformers' own cache takes per token beside ``token_bytes`` while it grows: keys are copied to what
        holds one token more, then values are.
        """
        return self.heads * max(self.key_dim, self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """What a model's cache has per layer; None: a layer of another kind (a window, a recurrent state, none at all).

    Those keep transformers' own form. ``only_attention``: no layer carries a recurrent state. ``shared``: layers read
    what others were given, at a time of their own, so that it must stay where it is.
    """

    layers: tuple[LayerShape | None, ...]
    only_attention: bool = True
    shared: bool = False

    @property
    def planned(self) -> tuple[tuple[int, LayerShape], ...]:
        return tuple((index, layer) for index, layer in enumerate(self.layers) if layer is not None)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token of one sequence takes in all planned layers."""
        return sum(layer.token_bytes for _, layer in self.planned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Room for ``tokens`` of ``batch`` sequences; the oldest ``resting`` of them rest in RAM."""

    shape: CacheShape
    batch: int
    tokens: int
    resting: int = 0

    def held_bytes(self, compute: str) -> dict[str, int]:
        """What the cache takes in each tier, from its making to its end."""
        each = self.shape.token_bytes * self.batch
        if not self.resting:
            return {compute: each * self.tokens}
        slot = max(layer.token_bytes for _, layer in self.shape.planned) * self.batch * self.tokens
        return {compute: each * (self.tokens - self.resting) + SLOTS * slot, RAM: each * self.resting}

    @property
    def moved_bytes(self) -> int:
        """What comes from RAM with every token once the resting part is full."""
        return self.shape.token_bytes * self.batch * self.resting


def own_cache(model: nn.Module) -> DynamicCache:
    """An empty cache as transformers' generation makes it for a decoder."""
    config: Any = model.config
    return DynamicCache(config=config.get_text_config(decoder=True))


def shape_of(cache: object) -> CacheShape | None:
    """The shape of a cache that a model has filled; None for one without attention, or of another kind."""
    if type(cache) is not DynamicCache or not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return None
    return CacheShape(
        layers=tuple(_layer_shape(layer) for layer in cache.layers),
        only_attention=not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers),
        shared=any(isinstance(layer, _SHARING) for layer in cache.layers),
    )


def _layer_shape(layer: Any) -> LayerShape | None:
    if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
        return None
    (_, heads, _, key_dim), (_, value_heads, _, value_dim) = layer.keys.shape, layer.values.shape
    if heads != value_heads or layer.keys.dtype != layer.values.dtype:
        return None
    return LayerShape(heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=layer.keys.dtype)


def restings(shape: CacheShape, tokens: int) -> tuple[int, ...]:
    """How many of ``tokens`` it is worth trying to let rest in RAM; none where they cannot."""
    if shape.shared or not shape.planned:
        return ()
    return tuple(dict.fromkeys(max(1, int(tokens * share)) for share in _SHARES))


def apply(model: nn.Module, placement: Placement, memory: Memory) -> PlannedCache:
    """An empty cache to call ``model`` with. Raises BudgetError where pools lack room."""
    return PlannedCache(own_cache(model).layers, placement, memory)


class PlannedCache(Cache):
    """transformers' cache over brim's memory. ``remove`` gives the memory back."""

    def __init__(self, layers: list[Any], placement: Placement, memory: Memory) -> None:
        self.placement, self._memory = placement, memory
        self.buffers: list[Buffer] = []
        self._resting: RestingLayers | None = None
        try:
            if placement.resting:
                self._resting = RestingLayers(memory, self._records(), placement.tokens, placement.resting, SLOTS)
            for index, shape in placement.shape.planned:
                layers[index] = PlannedLayer(self._room(index, shape), placement.tokens)
        except BaseException:
            self.remove()
            raise
        super().__init__(layers=layers)

    def _records(self) -> Mapping[int, int]:
        """Layer -> bytes that a token of all sequences takes."""
        return {index: shape.token_bytes * self.placement.batch for index, shape in self.placement.shape.planned}

    def _room(self, index: int, shape: LayerShape) -> _Room:
        placement = self.placement
        if self._resting is not None:
            return _RestingRoom(self._resting.layers[index], shape, placement.batch)
        size = shape.token_bytes * placement.batch * placement.tokens
        label = f"{NAME} {index}"
        buffer = self._memory.compute.allocate(size, label, category=Category.KV_CACHE)
        self.buffers.append(buffer)
        return _WholeRoom(buffer, shape, placement.batch, placement.tokens)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The memory in the compute tier that it holds, as bytes."""
        resting = self._resting.tensors if self._resting is not None else []
        return [buffer.tensor for buffer in self.buffers] + list(resting)

    def keep(self, tokens: int) -> int:
        """Forget what comes after the first ``tokens`` tokens, for another text that begins alike.

        Returns how many are held then: none where a layer of another kind cannot be cut back.
        """
        own = [layer for layer in self.layers if isinstance(layer, PlannedLayer)]
        kept = min(tokens, int(self.get_seq_length())) if len(own) == len(self.layers) else 0
        if not kept:
            self.reset()  # type: ignore[no-untyped-call]
        for layer in own if kept else ():
            layer.keep(kept)
        return kept

    def pretend(self, tokens: int) -> None:
        """Be as if ``tokens`` tokens were held, whatever their values: to see on fake tensors what comes then."""
        for layer in self.layers:
            if isinstance(layer, PlannedLayer):
                layer.keep(tokens)

    def remove(self) -> None:
        """Give the memory back; what is under way is waited for. A second call does nothing."""
        if self._resting is not None:
            self._resting.free()
        for buffer in self.buffers:
            buffer.free()
        self.buffers.clear()


class _WholeRoom:
    """All tokens of a layer in the compute tier: keys, then values, each [batch, heads, tokens, dim]."""

    def __init__(self, buffer: Buffer, shape: LayerShape, batch: int, tokens: int) -> None:
        flat = buffer.tensor.view(shape.dtype)
        split = batch * shape.heads * tokens * shape.key_dim
        self._keys = flat[:split].view(batch, shape.heads, tokens, shape.key_dim)
        self._values = flat[split:].view(batch, shape.heads, tokens, shape.value_dim)

    def open(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys, self._values

    def written(self, begin: int, end: int) -> None:
        """It is where it belongs."""

    def keep(self, tokens: int) -> None:
        """What comes after is written over."""

    def forget(self) -> None:
        """Nothing is kept of what it held."""


class _RestingRoom:
    """A layer's tokens come together in a slot: token by token, so that the older part is one run of bytes.

    A token is the keys of all sequences and heads, then their values.
    """

    def __init__(self, layer: Resting, shape: LayerShape, batch: int) -> None:
        self._layer, self._shape, self._batch = layer, shape, batch

    def open(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, slot = self._shape, self._layer.open(count)
        heads = (self._batch, shape.heads)
        records = slot.view(shape.dtype).view(-1, self._batch * shape.heads * (shape.key_dim + shape.value_dim))
        split = self._batch * shape.heads * shape.key_dim
        keys = records[:, :split].unflatten(1, (*heads, shape.key_dim))
        values = records[:, split:].unflatten(1, (*heads, shape.value_dim))
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    def written(self, begin: int, end: int) -> None:
        self._layer.written(begin, end)

    def keep(self, tokens: int) -> None:
        self._layer.keep(tokens)

    def forget(self) -> None:
        self._layer.forget()


_Room = _WholeRoom | _RestingRoom


class PlannedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One layer as transformers sees it. ``keys`` and ``values``: what the last call was given."""

    is_sliding = False

    def __init__(self, room: _Room, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room, self._tokens, self._length = room, tokens, 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It has its memory already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self._length, self._length + key_states.shape[-2]
        if end > self._tokens:
            raise UsageError(
                f"The KV cache cannot hold {end} tokens.",
                f"It was planned for {self._tokens}.",
                "Generate fewer new tokens, or plan for more.",
            )
        keys, values = self._room.open(begin)
        keys[:, :, begin:end].copy_(key_states)
        values[:, :, begin:end].copy_(value_states)
        self._room.written(begin, end)
        self._length = end
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._tokens

    def reset(self) -> None:
        self._length, self.keys, self.values = 0, None, None
        self._room.forget()

    def keep(self, tokens: int) -> None:
        self._length = tokens
        self._room.keep(tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise _refused("reordered for a beam search")

    def crop(self, tokens_to_remove: int) -> None:
        raise _refused("cropped")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _refused("repeated")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise _refused("reduced to some sequences")


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"A planned KV cache cannot be {what}.", "Its memory is laid out for greedy generation.", "Use DynamicCache."
    )
