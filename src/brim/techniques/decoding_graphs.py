"""Decode by CUDA graphs: the host launches a token's pass at once, not kernel by kernel.

A pass of a small batch is a few hundred kernels that take less time than their launches. So ``generate`` is replaced:
after the first token's pass the KV cache gets its final addresses and shapes, a pass over it is captured as a graph,
and later passes replay it. transformers' own loop still prepares the inputs, chooses the tokens and stops.

Attention reads the unused tokens of the cache, too, and a mask excludes them. PyTorch has another kernel for that,
which may round differently. What is captured is compared first: a pass over such a cache with a plain one, and a
replay with the next pass, bit for bit. A model that differs, or cannot be captured, is decoded as without graphs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from brim import accelerator
from brim.core import Plan
from brim.memory.tiers import Memory
from brim.model_cache import cache_argument
from brim.techniques.kv_offload.cache import PlannedLayer, TensorStorage

GRAPH_BYTES = "graph_bytes"  # in a plan's settings: most VRAM that graphs take beside what plain passes take
# Relative to the scores' spread: fp32, and types whose own rounding is as large.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
_GROWN_TOKENS = 256  # a cache of transformers' own grows by so many tokens, or by half
_WORKSPACE_BYTES, _SEGMENTS_BYTES = 32 << 20, 64 << 20  # of cuBLAS on the capturing stream; unused parts of segments
_COPIES = 16  # of a token's widest tensor in fp32: more than any pass has at once


def graph_bytes(model: nn.Module, batch: int, tokens: int, *, planned: bool) -> int:
    """The most VRAM that graphs may take for ``batch`` sequences of ``tokens``, beside what plain passes take.

    ``planned``: layers without a window have a cache of that size already.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_attention_heads", 1))
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    windows = getattr(text, "sliding_window", None) is not None
    parameters = [p for p in model.parameters() if p.dim() == 2]
    widest = max((max(p.shape) for p in parameters), default=0)
    cache = 2 * kv_heads * dim * int(text.num_hidden_layers) * max((p.dtype.itemsize for p in parameters), default=4)
    copies = 0 if planned and not windows else batch * tokens * cache
    return _WORKSPACE_BYTES + _SEGMENTS_BYTES + _COPIES * 4 * batch * (widest + heads * tokens) + copies


def apply(model: nn.Module, plan: Plan, memory: Memory) -> DecodingGraphs | None:
    """Decode by graphs in ``model.generate`` where ``plan`` has bytes for them. The handle's ``remove`` ends it."""
    room_bytes = plan.settings.get(GRAPH_BYTES, 0)
    if not room_bytes or memory.device.type != accelerator.CUDA:
        return None
    return DecodingGraphs(model, room_bytes, plan.settings.get("total_tokens", 0), memory)


class DecodingGraphs:
    """The handle. ``refused``: why passes are not replayed; empty while they are.

    The timeline's fact ``graph_replays`` counts the passes that were.
    """

    def __init__(self, model: Any, room_bytes: int, tokens: int, memory: Memory) -> None:
        self.model = model
        self.room_bytes, self.tokens, self.on = room_bytes, tokens, accelerator.of(memory.device)
        self.stream, self.refused, self.replays = self.on.new_stream(), "", 0
        self._facts = memory.recorder.timeline.facts
        self._lock, self._generate = threading.Lock(), model.generate

        @functools.wraps(self._generate)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self._decode(*args, **kwargs)

        vars(generate)["graphs"] = self
        vars(model)["generate"] = generate

    def remove(self) -> None:
        """Decode without graphs. A second call does nothing."""
        vars(self.model).pop("generate", None)

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        changed = "forward" in vars(self.model) or self.model._compiled_call_impl is not None
        if self.refused or changed or not self._lock.acquire(blocking=False):
            return self._generate(*args, **kwargs)
        passes = _Passes(self)
        vars(self.model)["forward"] = functools.wraps(passes.forward)(passes)
        try:
            return self._generate(*args, **kwargs)
        finally:
            del vars(self.model)["forward"]
            self._lock.release()
            passes.leave()
            self._facts["graph_replays"] = self.replays

    def refuse(self, why: object) -> None:
        """Decode without graphs from now on."""
        self.refused = " ".join(str(why).split())[:300]
        warnings.warn(f"{type(self.model).__name__} is decoded without CUDA graphs: {self.refused}", stacklevel=2)


class _Passes:
    """The passes of one call of ``generate``."""

    def __init__(self, graphs: DecodingGraphs) -> None:
        self._graphs, self.forward = graphs, graphs.model.forward
        self._name, self._thread = cache_argument(graphs.model) or "", threading.get_ident()
        self._cache: Cache | None = None
        self._static: _StaticCache | None = None
        self._graph: _Graph | None = None
        self._mask: torch.Tensor | None = None  # of all tokens so far, without the cache's unused ones
        self._limit_bytes = 0  # of what the allocator may reserve for the cache and the graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ids, cache = kwargs.get("input_ids", kwargs.get("decoder_input_ids")), kwargs.get(self._name)
        decodes = isinstance(ids, torch.Tensor) and ids.shape[-1] == 1
        recorded = kwargs.get("output_attentions") or kwargs.get("output_hidden_states")
        if threading.get_ident() != self._thread or self._graphs.refused:
            return self.forward(*args, **kwargs)
        if args or not decodes or recorded or torch.is_grad_enabled():
            self.leave()
            return self.forward(*args, **kwargs)
        if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
            self._graphs.refuse(f"its cache is of type {type(cache).__name__}.")
            return self.forward(*args, **kwargs)
        if self._static is not None and cache is self._cache and not self._static.full:
            return self._step(kwargs)
        self.leave()
        output = self.forward(**kwargs)
        self._mask = kwargs.get("attention_mask")
        self._enter(cache)
        return output

    def leave(self) -> None:
        """Give the cache back its own layers, and free the graph."""
        if self._static is not None:
            self._static.leave()
        if self._graph is not None:
            self._graph = None
            self._graphs.on.empty_cache()
        self._cache = self._static = None

    def _enter(self, cache: Cache) -> None:
        planned = [layer for layer in cache.layers if isinstance(layer, PlannedLayer)]
        if any(layer.get_seq_length() >= layer.get_max_length() for layer in planned):
            return  # no other token has room
        self._graphs.on.empty_cache()
        self._limit_bytes = self._graphs.on.reserved_bytes() + self._graphs.room_bytes
        try:
            with self._graphs.on.limited(self._limit_bytes):
                self._static = _StaticCache(cache, self._graphs.tokens, self._graphs.on.device)
        except (_Unsuitable, torch.OutOfMemoryError) as error:
            self._graphs.refuse(error)
            return
        self._cache = cache

    def _step(self, kwargs: dict[str, Any]) -> Any:
        static, graph, graphs = self._static, self._graph, self._graphs
        assert static is not None
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=-1)
        why = ""
        try:
            if graph is None:
                output = self._compared(kwargs)
            elif graph.proved:
                output = graph.replay(kwargs)
                graphs.replays += 1
            else:
                output = self._proved(graph, kwargs)
        except _Unsuitable as error:
            why, output = str(error), error.output
        static.advance()  # also where a plain pass wrote the token
        if why:
            self.leave()
            graphs.refuse(why)
        elif static.full and static.grows:
            cache = self._cache
            self.leave()
            assert cache is not None
            self._enter(cache)
        return output

    def _compared(self, kwargs: dict[str, Any]) -> Any:
        """The output of a plain pass; a pass over the static cache agrees with it, and is captured."""
        static = self._static
        assert static is not None
        with static.growing():
            plain = self.forward(**(kwargs | {"attention_mask": self._mask}))
        try:
            with self._graphs.on.limited(self._limit_bytes):
                graph = _Graph(self.forward, kwargs, self._name, self._graphs.stream)
                if not _agree(plain.logits, graph.warm_up().logits):
                    raise _Unsuitable("its scores depend on unused tokens of the cache.")
                graph.capture()
        except Exception as error:
            raise _Unsuitable(error, plain) from error
        self._graph = graph
        return plain

    def _proved(self, graph: _Graph, kwargs: dict[str, Any]) -> Any:
        """The output of a pass; a replay gives the same bits."""
        output = self.forward(**kwargs)
        scores = output.logits.clone()
        if not torch.equal(graph.replay(kwargs).logits, scores):
            raise _Unsuitable("a replay's scores differ from those of its next pass.", output)
        graph.proved = True
        return output


class _Unsuitable(Exception):
    """A pass cannot be replayed; ``output`` is that of a plain one."""

    def __init__(self, why: object, output: Any = None) -> None:
        super().__init__(why)
        self.output = output


class _StaticCache:
    """A cache whose layers have room for ``tokens``, and whose passes all have the same shapes.

    ``grows``: it is transformers' own, which has no limit.
    """

    def __init__(self, cache: Cache, tokens: int, device: torch.device) -> None:
        unsuitable = {type(layer).__name__ for layer in cache.layers if not _suits(layer)}
        if unsuitable:
            raise _Unsuitable(f"its cache has layers of type {', '.join(sorted(unsuitable))}.")
        self._cache, self._before = cache, list(cache.layers)
        self._tokens = int(cache.get_seq_length())
        planned = [layer for layer in cache.layers if isinstance(layer, PlannedLayer)]
        self.grows = not planned
        more = self._tokens + max(_GROWN_TOKENS, self._tokens // 2)
        most = tokens if tokens > self._tokens else more
        self._most = min([layer.get_max_length() for layer in planned], default=most)
        self._position = torch.full((1,), self._tokens, device=device)
        try:
            layer: Any
            for index, layer in enumerate(self._before):
                if isinstance(layer, PlannedLayer):
                    for room in layer.stored():
                        room[:, :, self._tokens :].zero_()  # a masked NaN would still make NaN of a sum
                else:
                    cache.layers[index] = self._copied(layer)
                    layer.keys = layer.values = None
        except BaseException:
            self.leave()
            raise
        self._layers: list[Any] = list(cache.layers)
        self._place(self._position)

    @property
    def full(self) -> bool:
        return self._tokens >= self._most

    def _copied(self, layer: Any) -> PlannedLayer:
        stored = layer.keys.shape[-2]  # of a window the last ones
        first = self._tokens - stored
        pair = []
        for values in (layer.keys, layer.values):
            room = values.new_zeros(*values.shape[:2], self._most, values.shape[3])
            room[:, :, first : first + stored].copy_(values)
            pair.append(room)
        copied = PlannedLayer(TensorStorage(*pair), self._most)
        copied.is_sliding = getattr(layer, "is_sliding", False)
        copied.keep(self._tokens)
        return copied

    def _place(self, position: torch.Tensor | None) -> None:
        for layer in self._layers:
            layer.position = position

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Let a pass read and write the cache as without graphs, and come back to the tokens before."""
        self._place(None)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.keep(self._tokens)
            self._place(self._position)

    def advance(self) -> None:
        self._tokens += 1
        self._position.add_(1)

    def leave(self) -> None:
        """Restore the layers as they were, with all tokens."""
        for index, (layer, before) in enumerate(zip(self._cache.layers, self._before, strict=True)):
            if isinstance(layer, PlannedLayer):
                layer.position = None
                layer.keep(self._tokens)
                if layer is not before:
                    _give_back(before, *layer.stored(), self._tokens)
                    self._cache.layers[index] = before


def _suits(layer: object) -> bool:
    if isinstance(layer, PlannedLayer):
        return layer.resident
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and getattr(layer, "keys", None) is not None


def _give_back(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    first = 0
    if isinstance(layer, DynamicSlidingWindowLayer):
        first, layer.cumulative_length = max(0, tokens - layer.sliding_window + 1), tokens
    layer.keys, layer.values = keys[:, :, first:tokens], values[:, :, first:tokens]


class _Graph:
    """A captured pass and its inputs. ``proved``: a replay gave the bits of a pass."""

    def __init__(self, forward: Callable[..., Any], kwargs: Mapping[str, Any], cache: str, stream: Any) -> None:
        self._forward, self._cache, self._stream = forward, cache, stream
        leaves, self._rest = self._parts(kwargs)
        self._leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._kwargs = {cache: kwargs[cache], **tree_unflatten(self._leaves, self._rest)}
        self._graph, self.proved, self._output = torch.cuda.CUDAGraph(), False, None

    def _parts(self, kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        return tree_flatten({name: value for name, value in kwargs.items() if name != self._cache})

    def warm_up(self) -> Any:
        """Run the pass on the stream that captures, whose libraries then have their memory."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = self._forward(**self._kwargs)
        current.wait_stream(self._stream)
        return output

    def capture(self) -> None:
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._output = self._forward(**self._kwargs)

    def replay(self, kwargs: Mapping[str, Any]) -> Any:
        """The output for these inputs, in memory that the next replay overwrites."""
        leaves, rest = self._parts(kwargs)
        if rest != self._rest or any(_form(one) != _form(own) for one, own in zip(leaves, self._leaves, strict=True)):
            raise _Unsuitable("its inputs change from token to token.", self._forward(**kwargs))
        for own, given in zip(self._leaves, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        self._graph.replay()
        return self._output


def _form(leaf: object) -> object:
    """Return what a graph has of an input: all but the values of a tensor."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _agree(plain: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether scores are equal up to rounding."""
    tolerance = _TOLERANCE if plain.dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
    plain, other = plain.float(), other.float()
    known = plain.isfinite() & other.isfinite()
    off, spread = (plain - other)[known].abs().max(), plain[known].std(correction=0)
    return bool((off <= tolerance * spread) & (plain.isfinite() == other.isfinite()).all())
