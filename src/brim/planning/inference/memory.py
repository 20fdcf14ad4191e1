"""Memory of a generation's passes beside weights and KV cache, observed on fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from brim.core import Category, Timeline
from brim.core.hardware import RAM
from brim.estimation.step_memory import PROMPT, TOKEN, Observation, StepWatch, watch_step
from brim.memory.tiers import fake_memory
from brim.model_cache import cache_argument, cache_input, cache_of, keeps_keys
from brim.techniques.kv_offload import cache as kv_cache

_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the largest passes: ``batch`` sequences, the longest with ``prompt`` tokens at first and ``total`` at
    last.

    ``chunk`` tokens of the prompt go through the model at once; ``padded``: prompts of several lengths; ``drawn``:
    tokens are drawn, which sorts all scores.
    """

    batch: int = 1
    prompt: int
    total: int
    chunk: int
    padded: bool = False
    drawn: bool = False

    @property
    def cached(self) -> int:
        """Tokens in the cache at the end: the last token is not given to the model any more."""
        return max(self.prompt, self.total - 1)

    def placement(self, shape: kv_cache.CacheShape, resting: int) -> kv_cache.Placement:
        """Placement of a KV cache of that ``shape``, with the oldest ``resting`` tokens in RAM."""
        return kv_cache.Placement(
            shape=shape, batch=self.batch, tokens=self.cached, resting=min(resting, self.cached)
        )

    def passes(self) -> Iterator[tuple[int, bool]]:
        """(tokens, is_largest) of each pass; passes that are not among the largest only fill the cache."""
        chunks, rest = divmod(self.prompt, self.chunk)
        if chunks > 1:
            yield (chunks - 1) * self.chunk, False
        yield self.chunk, True
        if rest:
            yield rest, True
        new = self.cached - self.prompt
        if new > 1:
            yield new - 1, False
        if new:
            yield 1, True


def cache_shape(module: nn.Module) -> kv_cache.CacheShape | None:
    """The KV cache of a decoder; None if the model's own cache is used."""
    model: Any = module
    name = cache_argument(model)
    plain = name in ("cache", "past_key_values") and model._supports_default_dynamic_cache()
    cache = kv_cache.own_cache(module) if plain and not model.config.is_encoder_decoder else None
    filled: list[object] = [None]

    def run(call: Callable[..., Any], watch: StepWatch) -> None:
        ids = torch.zeros(1, 1, dtype=torch.long)
        inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        state = {str(name): cache, "use_cache": True} if cache is not None else {}
        output = call(input_ids=ids, **inputs, **state)
        filled[0] = cache_of(output) if cache is not None else None

    watch_step(module, run)
    return kv_cache.shape_of(filled[0])


def watch_generation(module: nn.Module, sizes: Sizes, shape: kv_cache.CacheShape | None) -> Observation:
    """Observe the largest passes of a generation. A planned cache (``shape``) is not counted, the model's own is.

    Raises UnsupportedError if the forward pass needs values of tensors.
    """
    config: Any = module.config
    if config.is_encoder_decoder:
        return watch_step(module, lambda call, watch: _encode_and_decode(module, call, watch, sizes))
    takes = set(inspect.signature(module.forward).parameters)
    name = cache_argument(module)
    passes = list(sizes.passes()) if name else [(sizes.cached, True)]  # without a cache: all tokens

    def run(call: Callable[..., Any], watch: StepWatch) -> None:
        state: dict[str, Any] = {}
        if shape is not None:
            state = {str(name): _fake_cache(module, shape, sizes, watch)}
        begin, cache = 0, next(iter(state.values()), None)
        for tokens, counted in passes:
            # A recurrent state includes the padding already: only the prompt has a mask.
            masked = begin == 0 or keeps_keys(module, cache)
            name_of_pass = PROMPT if begin + tokens <= sizes.prompt else TOKEN
            with watch.named(name_of_pass) if counted else watch.uncounted():
                output = call(**_inputs(sizes, begin, tokens, takes, masked), **state, use_cache=True)
                begin += tokens
                if shape is None and name:
                    cache = cache_of(output)
                    state = {name: cache}
                del output

    seen = watch_step(module, run)
    return replace(seen, step_bytes=seen.step_bytes + scores_bytes(module, sizes))


def _fake_cache(
    module: nn.Module, shape: kv_cache.CacheShape, sizes: Sizes, watch: StepWatch
) -> kv_cache.PlannedCache:
    timeline = Timeline("a cache without bytes", measured=False)
    memory = fake_memory(timeline, compute_tier=RAM, compute_bytes=_NO_LIMIT_BYTES, ram_bytes=_NO_LIMIT_BYTES)
    cache = kv_cache.apply(module, sizes.placement(shape, 0), memory)
    for tensor in cache.tensors:  # inputs of a step are not counted among its allocations
        watch.adopt(tensor, Category.INPUT)
    return cache


def _inputs(sizes: Sizes, begin: int, tokens: int, takes: set[str], masked: bool) -> dict[str, Any]:
    """transformers' inputs of a model for the next ``tokens`` tokens."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(sizes.batch, tokens, dtype=torch.long)}
    if "position_ids" in takes:
        inputs["position_ids"] = torch.zeros(sizes.batch, tokens, dtype=torch.long)
    if sizes.padded and masked and "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones(sizes.batch, begin + tokens, dtype=torch.long)
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = 1
    return inputs


def _encode_and_decode(module: nn.Module, call: Callable[..., Any], watch: StepWatch, sizes: Sizes) -> None:
    """Observe the encoder's pass with the first token, and the last token's with a cache of all earlier ones."""
    ids = torch.zeros(sizes.batch, sizes.prompt, dtype=torch.long)
    mask = {"attention_mask": torch.ones_like(ids)} if sizes.padded else {}
    with watch.named(PROMPT):
        output = call(input_ids=ids, **mask, decoder_input_ids=ids[:, :1], use_cache=True)
    encoded = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
    del output
    new = sizes.total - sizes.prompt
    if new > 1:
        before = torch.zeros(sizes.batch, new - 1, dtype=torch.long)
        with watch.uncounted():
            output = call(encoder_outputs=encoded, **mask, decoder_input_ids=before, use_cache=True)
            state = cache_input(module, cache_of(output))
            del output
        last = {"decoder_input_ids": before[:, :1], **state}
        with watch.named(TOKEN):
            call(encoder_outputs=encoded, **mask, **last, use_cache=True)


def scores_bytes(module: nn.Module, sizes: Sizes) -> int:
    """Bytes of copies of the last token's logits: generation copies them in fp32, and its processors again.

    Drawing sorts them (4 bytes a score and 8 for its index), sums their probabilities (4 and 4), marks excluded
    tokens (1 and 1), and makes another copy and its probabilities (4 and 4).
    """
    config: Any = module.config
    each = 2 * 4 + (30 if sizes.drawn else 0)
    return each * sizes.batch * int(getattr(config.get_text_config(decoder=True), "vocab_size", 0))
