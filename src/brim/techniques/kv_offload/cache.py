"""The KV cache in memory of brim's pools, allocated once in its final size.

transformers' own cache grows by ``torch.cat``: with every token each layer is copied, and is in memory twice for a
moment. Here a layer has its storage from the start and a token is written to its place. Where the compute tier is too
small, the ``resting`` oldest tokens of every layer rest in RAM. They are loaded into a slot of a ring while the
layer before computes; the newer tokens stay in the compute tier and are copied to the slot.

Attention reads the same values in the same order either way, so the results are those of transformers' cache.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from brim.memory.pool import Buffer, Pool
from brim.memory.tiers import Memory
from brim.memory.transfer import All, Done, Settled, Waitable
from brim.techniques.streaming.ring import Ring

NAME = "kv_cache"
# The class of layers that use another layer's keys and values; older versions have none.
_SHARING: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
RESIDENT, OLDER_IN_RAM = "resident", "older:ram"
RESTING_TOKENS = "kv_resting_tokens"  # in a plan's settings
SLOTS = 2  # one in use, one being filled
_SHARES = (0.25, 0.5, 0.75, 1.0)  # shares of the tokens to try in RAM


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """The shape of a token in an attention layer: ``heads`` keys of ``key_dim`` and values of ``value_dim``."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def joined_bytes(self) -> int:
        """The bytes per token, beside ``token_bytes``, of transformers' own cache while keys or values are copied to
        a tensor for one token more.
        """
        return self.heads * max(self.key_dim, self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """The shapes of a model's layers; None for layers with another cache (a window, a recurrent state) or none.

    Those keep transformers' own cache. ``only_attention``: no layer has a recurrent state. ``shared``: layers read
    the keys and values of others later, which must stay where they are.
    """

    layers: tuple[LayerShape | None, ...]
    only_attention: bool = True
    shared: bool = False

    @property
    def planned(self) -> tuple[tuple[int, LayerShape], ...]:
        return tuple((index, layer) for index, layer in enumerate(self.layers) if layer is not None)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token of one sequence in all planned layers."""
        return sum(layer.token_bytes for _, layer in self.planned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The memory for ``tokens`` of ``batch`` sequences; the oldest ``resting`` of them rest in RAM."""

    shape: CacheShape
    batch: int
    tokens: int
    resting: int = 0

    def held_bytes(self, compute: str) -> dict[str, int]:
        """The bytes of the cache in each tier, from its creation to its end."""
        each = self.shape.token_bytes * self.batch
        if not self.resting:
            return {compute: each * self.tokens}
        slot = max(layer.token_bytes for _, layer in self.shape.planned) * self.batch * self.tokens
        return {compute: each * (self.tokens - self.resting) + SLOTS * slot, RAM: each * self.resting}

    @property
    def moved_bytes(self) -> int:
        """The bytes that every token copies from RAM once the resting part is full."""
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


def resting_token_choices(shape: CacheShape, tokens: int) -> tuple[int, ...]:
    """The numbers of ``tokens`` to try as resting ones; none where tokens cannot rest in RAM."""
    if shape.shared or not shape.planned:
        return ()
    return tuple(dict.fromkeys(max(1, int(tokens * share)) for share in _SHARES))


def apply(model: nn.Module, placement: Placement, memory: Memory) -> PlannedCache:
    """An empty cache to call ``model`` with. Raises BudgetError where pools lack room."""
    return PlannedCache(own_cache(model).layers, placement, memory)


class PlannedCache(Cache):
    """transformers' cache in brim's memory, which ``remove`` frees."""

    def __init__(self, layers: list[Any], placement: Placement, memory: Memory) -> None:
        self.placement, self._memory = placement, memory
        self.buffers: list[Buffer] = []
        self._resting: _RestingTokens | None = None
        try:
            if placement.resting:
                self._resting = _RestingTokens(memory, placement)
            for index, shape in placement.shape.planned:
                layers[index] = PlannedLayer(self._storage(index, shape), placement.tokens)
        except BaseException:
            self.remove()
            raise
        super().__init__(layers=layers)

    def _storage(self, index: int, shape: LayerShape) -> _LayerStorage:
        placement = self.placement
        if self._resting is not None:
            return self._resting.layers[index]
        size = shape.token_bytes * placement.batch * placement.tokens
        label = f"{NAME} {index}"
        buffer = self._memory.compute.allocate(size, label, category=Category.KV_CACHE)
        self.buffers.append(buffer)
        return TensorStorage.within(buffer, shape, placement.batch, placement.tokens)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        resting = self._resting.tensors if self._resting is not None else []
        return [buffer.tensor for buffer in self.buffers] + list(resting)

    def keep(self, tokens: int) -> int:
        """Keep the first ``tokens`` tokens, for another text with the same beginning.

        Returns the number of tokens kept: 0 where a layer with another cache cannot be cut back.
        """
        own = [layer for layer in self.layers if isinstance(layer, PlannedLayer)]
        count = min(tokens, int(self.get_seq_length())) if len(own) == len(self.layers) else 0
        if not count:
            self.reset()  # type: ignore[no-untyped-call]
        for layer in own if count else ():
            layer.keep(count)
        return count

    def pretend(self, tokens: int) -> None:
        """Set the length to ``tokens``, for a trace of a later step on fake tensors."""
        for layer in self.layers:
            if isinstance(layer, PlannedLayer):
                layer.keep(tokens)

    def remove(self) -> None:
        """Wait for all copies and free the memory. A second call does nothing."""
        if self._resting is not None:
            self._resting.free()
        for buffer in self.buffers:
            buffer.free()
        self.buffers.clear()


@dataclass(eq=False)
class TensorStorage:
    """A layer's tokens in the compute tier: keys and values, each [batch, heads, tokens, dim]."""

    _keys: torch.Tensor
    _values: torch.Tensor

    @classmethod
    def within(cls, buffer: Buffer, shape: LayerShape, batch: int, tokens: int) -> TensorStorage:
        """Storage in ``buffer``: keys, then values."""
        flat = buffer.tensor.view(shape.dtype)
        split = batch * shape.heads * tokens * shape.key_dim
        keys = flat[:split].view(batch, shape.heads, tokens, shape.key_dim)
        return cls(keys, flat[split:].view(batch, shape.heads, tokens, shape.value_dim))

    def open(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys, self._values

    def written(self, begin: int, end: int) -> None:
        """Do nothing: the tokens are in place."""

    def keep(self, tokens: int) -> None:
        """Do nothing: later tokens are overwritten."""

    def forget(self) -> None:
        """Do nothing: all tokens are overwritten."""


class _RestingTokens:
    """The layers of a cache whose oldest tokens rest in RAM, and the ring of slots that these pass through.

    A slot has room for all tokens of a layer.
    """

    def __init__(self, memory: Memory, placement: Placement) -> None:
        self.memory, self.placement = memory, placement
        self.buffers: list[Buffer] = []
        self.layers: dict[int, _RestingLayer] = {}
        self._ring: Ring | None = None
        self._open: int | None = None
        tokens, resting = placement.tokens, placement.resting
        sizes = {index: shape.token_bytes * placement.batch for index, shape in placement.shape.planned}
        try:
            for index, shape in placement.shape.planned:
                older = self._allocate(memory.ram, sizes[index] * resting, f"{NAME} {index}, older")
                newer = self._allocate(memory.compute, sizes[index] * (tokens - resting), f"{NAME} {index}, newer")
                self.layers[index] = _RestingLayer(self, index, shape, older, newer)
            size = max(sizes.values()) * tokens
            slots = [self._allocate(memory.compute, size, f"{NAME} slot {number}") for number in range(SLOTS)]
        except BaseException:
            self.free()
            raise
        self._ring = Ring(memory, self.layers, {index: f"{NAME} {index}" for index in sizes}, slots)

    def _allocate(self, pool: Pool, size: int, label: str) -> Buffer:
        buffer = pool.allocate(size, label, category=Category.KV_CACHE)
        self.buffers.append(buffer)
        return buffer

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [buffer.tensor for buffer in self.buffers]

    def acquire(self, index: int) -> Buffer:
        """The slot of layer ``index``. It releases that of the layer before, whose compute has been queued."""
        assert self._ring is not None
        if self._open is not None:
            opened, self._open = self._open, None
            self._ring.release(opened)
        buffer = self._ring.acquire(index)
        self._open = index
        return buffer

    def save(self, index: int) -> None:
        assert self._ring is not None
        self._ring.save(index)

    def forget(self, index: int) -> None:
        """Drop a layer's copies in slots, which are outdated."""
        if self._ring is None:
            return
        if self._open == index:
            self._open = None
            self._ring.release(index)
        self._ring.forget({index})

    def free(self) -> None:
        """Wait for all copies and free the memory. A second call does nothing."""
        for layer in self.layers.values():
            layer.finish()
        for buffer in self.buffers:
            buffer.free()
        self.buffers.clear()


class _RestingLayer:
    """A layer's tokens, ``[0, resting)`` in RAM and the others in VRAM; for the ring it is a backing store.

    They come together in a slot, token by token, so that the older part is one run of bytes. A token is the keys of
    all sequences and heads, then their values.
    """

    tier = RAM

    def __init__(self, owner: _RestingTokens, index: int, shape: LayerShape, older: Buffer, newer: Buffer) -> None:
        self._owner, self._index, self._shape, self._memory = owner, index, shape, owner.memory
        self._batch, self._resting = owner.placement.batch, owner.placement.resting
        self._token_bytes, self._older, self._newer = shape.token_bytes * self._batch, older, newer
        self._length = 0  # tokens that are stored
        self._unsaved = (0, 0)
        self._slot: torch.Tensor | None = None
        self._loaded: Waitable = Done()
        self._saved: Waitable = Done()

    # -- for the cache

    def open(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the slot, with the first ``count`` tokens."""
        slot = self._slot = self._owner.acquire(self._index).tensor
        newer = count - self._resting
        if newer > 0:
            begin, size = self._resting * self._token_bytes, newer * self._token_bytes
            slot[begin : begin + size].copy_(self._newer.tensor[:size])
        shape, heads = self._shape, (self._batch, self._shape.heads)
        tokens = slot[: slot.numel() // self._token_bytes * self._token_bytes].view(shape.dtype)
        tokens = tokens.view(-1, self._token_bytes // shape.dtype.itemsize)
        split = self._batch * shape.heads * shape.key_dim
        keys = tokens[:, :split].unflatten(1, (*heads, shape.key_dim))
        values = tokens[:, split:].unflatten(1, (*heads, shape.value_dim))
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    def written(self, begin: int, end: int) -> None:
        """Store tokens ``[begin, end)``, which were written to the slot."""
        self._length = end
        slot = self._slot
        assert slot is not None, "it was not opened"
        first = max(begin, self._resting)
        if end > first:
            size, at = self._token_bytes, first - self._resting
            stored = self._newer.tensor[at * size : (end - self._resting) * size]
            stored.copy_(slot[first * size : end * size])
        if begin < self._resting:
            self._unsaved = (begin, min(end, self._resting))
            self._owner.save(self._index)

    def keep(self, tokens: int) -> None:
        """Keep the first ``tokens`` only."""
        self._length = tokens

    def forget(self) -> None:
        self.finish()
        self._length = 0
        self._owner.forget(self._index)

    def finish(self) -> None:
        for move in (self._loaded, self._saved):
            self._memory.engine.finish(Settled(move))

    # -- for the ring

    def stage(self) -> bool:
        """Do nothing: the tokens are in RAM already."""
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        size = min(self._length, self._resting) * self._token_bytes
        if not size:
            return All(after)  # compute writes to the slot, from which a copy may still read
        link = (RAM, self._memory.compute.tier)
        source = self._older.tensor[:size]
        self._loaded = self._memory.engine.copy(source, slot, label, [*after, self._saved], link)
        return self._loaded

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        begin, end = (tokens * self._token_bytes for tokens in self._unsaved)
        place, link = self._older.part(begin, end), (self._memory.compute.tier, RAM)
        waits = [*after, Settled(self._saved)]
        self._saved = self._memory.engine.copy(slot.tensor[begin:end], place, label, waits, link)
        return self._saved


_LayerStorage = TensorStorage | _RestingLayer


class PlannedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """A layer of transformers' cache; ``keys`` and ``values`` are the result of the last ``update``.

    ``position`` (a tensor, for a CUDA graph): where the next token is written; ``update`` then gives all storage, and
    a mask excludes what is not written yet. None: ``update`` gives the tokens so far.
    """

    is_sliding = False
    position: torch.Tensor | None = None

    def __init__(self, storage: _LayerStorage, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage, self._tokens, self._length = storage, tokens, 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.position is not None:
            keys, values = self.stored()
            keys.index_copy_(2, self.position, key_states)
            values.index_copy_(2, self.position, value_states)
            return keys, values
        begin, end = self._length, self._length + key_states.shape[-2]
        if end > self._tokens:
            raise UsageError(
                f"The KV cache cannot hold {end} tokens.",
                f"It was planned for {self._tokens}.",
                "Generate fewer new tokens, or plan for more.",
            )
        keys, values = self._storage.open(begin)
        keys[:, :, begin:end].copy_(key_states)
        values[:, :, begin:end].copy_(value_states)
        self._storage.written(begin, end)
        self._length = end
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # to generate: the mask has the shape of the storage
        return self.position is not None

    @property
    def resident(self) -> bool:
        """True where all tokens are in the compute tier."""
        return isinstance(self._storage, TensorStorage)

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with room for all tokens."""
        return self._storage.open(self._length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens if self.position is not None else self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length if self.position is None else self.position[0]  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return self._tokens

    def reset(self) -> None:
        self._length, self.keys, self.values = 0, None, None
        self._storage.forget()

    def keep(self, tokens: int) -> None:
        self._length = tokens
        self._storage.keep(tokens)

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
        f"A planned KV cache cannot be {what}.",
        "Its memory is laid out for one continuation of each sequence.",
        "Use DynamicCache.",
    )
