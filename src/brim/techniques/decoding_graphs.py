"""Decode by CUDA graphs: the host launches a token's pass at once, not kernel by kernel.

A pass of a small batch is a few hundred kernels that take less time than their launches. So ``generate`` is replaced:
after the first token's pass the KV cache gets its final addresses and shapes, a pass over it is captured as a graph,
and later passes replay it. transformers' own loop still prepares the inputs, chooses the tokens and stops. Where
weights are streamed, each block is a graph for every slot that it is loaded into, and hooks still load it before.

Attention reads the unused tokens of the cache, too, and a mask excludes them. PyTorch has another kernel for that,
which may round differently. What is captured is compared first: a pass over such a cache with a plain one, and a
replay with the next call, bit for bit. A model that differs, or cannot be captured, is decoded as without graphs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from brim import accelerator
from brim.model_cache import cache_argument
from brim.techniques.kv_offload.cache import PlannedLayer, TensorStorage
from brim.techniques.streaming.placement import NAME, RESIDENT, loading_triggers
from brim.techniques.streaming.weight_streaming import WeightStreaming

GRAPH_BYTES = "graph_bytes"  # in a plan's settings: most VRAM that graphs take beside what plain passes take
# Relative to the scores' spread: fp32, and types whose own rounding is as large.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
_GROWN_TOKENS = 256  # a cache of transformers' own grows by so many tokens, or by half
_MOST_GRAPHS = 16  # of a module: one for each slot
_WORKSPACE_BYTES, _SEGMENTS_BYTES = 32 << 20, 64 << 20  # of cuBLAS on the capturing stream; unused parts of segments
_COPIES = 16  # of a token's widest tensor in fp32: more than any pass has at once


def graph_bytes(model: nn.Module, batch: int, tokens: int, *, planned: bool) -> int:
    """The most VRAM that graphs may take for ``batch`` sequences of ``tokens``, beside what plain passes take.

    ``planned``: layers without a window have a cache of that size already. 0 where the configuration does not tell.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    layers = list(getattr(text, "per_layer_config", None) or [text])  # Gemma 4's have heads of several sizes
    if not all(hasattr(layer, name) for layer in layers for name in ("hidden_size", "num_hidden_layers")):
        return 0
    heads = max(int(getattr(layer, "num_attention_heads", 1)) for layer in layers)
    kv_heads = max(int(getattr(layer, "num_key_value_heads", None) or heads) for layer in layers)
    dim = max(int(getattr(layer, "head_dim", None) or layer.hidden_size // heads) for layer in layers)
    windows = any(getattr(layer, "sliding_window", None) is not None for layer in layers)
    parameters = [p for p in model.parameters() if p.dim() == 2]
    widest = max((max(p.shape) for p in parameters), default=0)
    cache = 2 * kv_heads * dim * int(text.num_hidden_layers) * max((p.dtype.itemsize for p in parameters), default=4)
    copies = 0 if planned and not windows else batch * tokens * cache
    return _WORKSPACE_BYTES + _SEGMENTS_BYTES + _COPIES * 4 * batch * (widest + heads * tokens) + copies


def apply(handle: WeightStreaming) -> None:
    """Decode by graphs in ``generate`` of a fitted model whose plan has bytes for them, until it is removed."""
    if handle.plan.settings.get(GRAPH_BYTES, 0) and handle.memory.device.type == accelerator.CUDA:
        handle.at_end.callback(DecodingGraphs(handle).remove)


def units(handle: WeightStreaming) -> list[nn.Module]:
    """The modules whose calls are graphs: the model, or each block of one that is streamed."""
    if set(handle.plan.choices(NAME).values()) <= {RESIDENT}:
        return [handle.model]
    paths = {path for block in handle.partition.blocks for path in loading_triggers(block)}
    inner = [path for path in paths if path and not any(other.startswith(f"{path}.") for other in paths)]
    modules = map(handle.model.get_submodule, sorted(inner))
    return [module for module in modules if any(True for _ in module.children())]  # else a single kernel


class DecodingGraphs:
    """The handle. ``refused``: why calls are not replayed; empty while they are.

    The timeline's fact ``graph_replays`` counts the graphs that were launched.
    """

    def __init__(self, handle: WeightStreaming) -> None:
        model: Any = handle.model
        self.model, self.units, self.on = model, units(handle), accelerator.of(handle.memory.device)
        self.room_bytes = handle.plan.settings.get(GRAPH_BYTES, 0)
        self.tokens = handle.plan.settings.get("total_tokens", 0)
        self.stream, self.refused, self.replays = self.on.new_stream(), "", 0
        self._facts = handle.memory.recorder.timeline.facts
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
        modules: list[Any] = list({id(module): module for module in (self.model, *self.units)}.values())
        changed = any("forward" in vars(m) or m._compiled_call_impl is not None for m in modules)
        if self.refused or changed or not self._lock.acquire(blocking=False):
            return self._generate(*args, **kwargs)
        passes = _Passes(self)
        try:
            for module, forward in passes.replacements():
                vars(module)["forward"] = functools.wraps(module.forward)(forward)
            return self._generate(*args, **kwargs)
        finally:
            for module in modules:
                vars(module).pop("forward", None)
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
        self.graphs, self.forward = graphs, graphs.model.forward
        self._name, self._thread = cache_argument(graphs.model) or "", threading.get_ident()
        self._cache: Cache | None = None
        self._static: _StaticCache | None = None
        self._compared = False  # a pass over the static cache, with a plain one
        self._mask: torch.Tensor | None = None  # of all tokens so far, without the cache's unused ones
        self.pool = torch.cuda.graph_pool_handle()  # of all graphs, which run one after the other
        self.limit_bytes = 0  # of what the allocator may reserve for the cache and the graphs
        self.replays = False  # in a pass over the static cache, until something fails
        self.failed = ""
        # In the present pass: inputs that graphs have in memory of their own, and what that memory was filled from.
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.filled: dict[int, torch.Tensor] = {}
        self._units = [_Unit(module, self) for module in graphs.units]
        self._pass = self._units[0] if graphs.units[:1] == [graphs.model] else self.forward

    def replacements(self) -> list[tuple[Any, Any]]:
        """Each module with the replacement of its ``forward``."""
        blocks = [(unit.module, unit) for unit in self._units if unit.module is not self.graphs.model]
        return [(self.graphs.model, self), *blocks]

    def fail(self, why: object) -> None:
        self.failed, self.replays = self.failed or str(why) or type(why).__name__, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ids, cache = kwargs.get("input_ids", kwargs.get("decoder_input_ids")), kwargs.get(self._name)
        decodes = isinstance(ids, torch.Tensor) and ids.shape[-1] == 1
        recorded = kwargs.get("output_attentions") or kwargs.get("output_hidden_states")
        if threading.get_ident() != self._thread or self.graphs.refused:
            return self.forward(*args, **kwargs)
        if args or not decodes or recorded or torch.is_grad_enabled():
            self.leave()
            return self.forward(*args, **kwargs)
        if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
            self.graphs.refuse(f"its cache is of type {type(cache).__name__}.")
            return self.forward(*args, **kwargs)
        if self._static is not None and cache is self._cache and not self._static.full:
            return self._step(kwargs)
        self.leave()
        output = self.forward(**kwargs)
        self._mask = kwargs.get("attention_mask")
        self._enter(cache)
        return output

    def leave(self) -> None:
        """Give the cache back its own layers, and free the graphs."""
        if self._static is not None:
            self._static.leave()
            self.own.clear()
            self.filled.clear()
            for unit in self._units:
                unit.graphs.clear()
            self.graphs.on.empty_cache()
        self._cache, self._static, self._compared = None, None, False

    def _enter(self, cache: Cache) -> None:
        planned = [layer for layer in cache.layers if isinstance(layer, PlannedLayer)]
        if any(layer.get_seq_length() >= layer.get_max_length() for layer in planned):
            return  # no other token has room
        self.graphs.on.empty_cache()
        self.limit_bytes = self.graphs.on.reserved_bytes() + self.graphs.room_bytes
        try:
            with self.graphs.on.limited(self.limit_bytes):
                self._static = _StaticCache(cache, self.graphs.tokens, self.graphs.on.device)
        except (_Unsuitable, torch.OutOfMemoryError) as error:
            self.graphs.refuse(error)
            return
        self._cache = cache

    def _step(self, kwargs: dict[str, Any]) -> Any:
        static, cache, plain = self._static, self._cache, None
        assert static is not None and cache is not None
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=-1)
        if not self._compared:
            with static.growing():
                plain = self.forward(**(kwargs | {"attention_mask": self._mask}))
        self.own.clear()
        self.filled.clear()
        self.replays = self._compared = True
        try:
            output = self._pass(**kwargs)
            if plain is not None and not _agree(plain.logits, output.logits):
                self.fail("its scores depend on unused tokens of the cache.")
        except Exception as error:
            if plain is None:
                raise
            self.fail(error)
        finally:
            self.replays = False
        static.advance()
        if self.failed:
            self.leave()
            self.graphs.refuse(self.failed)
        elif static.full and static.grows:
            self.leave()
            self._enter(cache)
        return output if plain is None else plain


class _Unit:
    """The calls of a module: the first is captured, the second compared with a replay, later ones are replays."""

    def __init__(self, module: nn.Module, passes: _Passes) -> None:
        self.module, self.forward, self._passes = module, module.forward, passes
        self.graphs: list[_Graph] = []
        self._weights = [] if module is passes.graphs.model else list(module.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        passes = self._passes
        if not passes.replays:
            return self.forward(*args, **kwargs)
        leaves, rest = tree_flatten((args, kwargs), is_leaf=_is_cache)
        form = ([weight.data_ptr() for weight in self._weights], rest, [_form(leaf) for leaf in leaves])
        graph = next((graph for graph in self.graphs if graph.form == form), None)
        if graph is not None and graph.proved:
            passes.graphs.replays += 1
            return graph.replay(leaves)
        output = self.forward(*args, **kwargs)
        try:
            if graph is None and len(self.graphs) == _MOST_GRAPHS:
                raise _Unsuitable("its inputs change from token to token.")
            if graph is None:
                with passes.graphs.on.limited(passes.limit_bytes):
                    self.graphs.append(_Graph(self.forward, leaves, form, passes))
            else:
                expected = [tensor.clone() for tensor in _tensors(output)]
                pairs = zip(expected, _tensors(graph.replay(leaves)), strict=True)
                if not all(torch.equal(one, other) for one, other in pairs):
                    raise _Unsuitable("the results of a replay differ from those of its next call.")
                graph.proved = True
        except Exception as error:
            passes.fail(error)
        return output


class _Unsuitable(Exception):
    """A model, or its cache, cannot be decoded by graphs."""


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
    """A captured call. ``form``: what it has of weights and inputs. ``proved``: a replay gave the bits of a call."""

    def __init__(
        self, forward: Callable[..., Any], leaves: list[Any], form: tuple[Any, ...], passes: _Passes
    ) -> None:
        self.form, self.proved, self._passes = form, False, passes
        self._leaves = [self._own(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(self._leaves, form[1])
        stream, current = passes.graphs.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # whose libraries then have their memory
            forward(*args, **kwargs)
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=passes.pool, stream=stream, capture_error_mode="thread_local"):
            self._output = forward(*args, **kwargs)

    def _own(self, given: torch.Tensor) -> torch.Tensor:
        """Memory of the graphs' own, one for an input of several graphs."""
        _, own = self._passes.own.setdefault(id(given), (given, given.clone()))
        self._passes.filled[id(own)] = given
        return own

    def replay(self, leaves: list[Any]) -> Any:
        """The output for these inputs, in memory that the next replay overwrites."""
        filled = self._passes.filled
        for own, given in zip(self._leaves, leaves, strict=True):
            if isinstance(own, torch.Tensor) and filled.get(id(own)) is not given:
                own.copy_(given)
                filled[id(own)] = given
        self._graph.replay()
        return self._output


def _is_cache(value: object) -> bool:
    return isinstance(value, Cache)


def _tensors(output: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output, is_leaf=_is_cache) if isinstance(leaf, torch.Tensor)]


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
