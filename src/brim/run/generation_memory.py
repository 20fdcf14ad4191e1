"""What the passes of a generation take beside weights and KV cache, seen on fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from brim.core import Timeline
from brim.core.hardware import RAM
from brim.memory.tiers import fake_memory
from brim.run.step_memory import Observation, _Watch, watch_step
from brim.techniques import kv_cache

_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The largest passes of a generation: ``batch`` sequences, the longest of ``prompt`` tokens, ``total`` in the end.

    ``chunk`` tokens of the prompt go through the model at once; ``padded``: prompts of several lengths.
    """

    batch: int = 1
    prompt: int
    total: int
    chunk: int
    padded: bool = False

    @property
    def cached(self) -> int:
        """Tokens that the cache holds in the end: the last one is not given to the model any more."""
        return max(self.prompt, self.total - 1)

    def passes(self) -> Iterator[tuple[int, bool]]:
        """Tokens of each pass, and whether it is one of the largest: the others only fill the cache."""
        whole, rest = divmod(self.prompt, self.chunk)
        if whole > 1:
            yield (whole - 1) * self.chunk, False
        yield self.chunk, True
        if rest:
            yield rest, True
        new = self.cached - self.prompt
        if new > 1:
            yield new - 1, False
        if new:
            yield 1, True


def cache_shape(module: nn.Module) -> kv_cache.CacheShape | None:
    """The KV cache that a decoder makes; None for one whose cache stays as the model makes it."""
    found: list[kv_cache.CacheShape | None] = [None]
    config: Any = module.config

    def run(call: Callable[..., Any], watch: _Watch) -> None:
        made = call(input_ids=torch.zeros(1, 1, dtype=torch.long), **_decoder_start(config, 1), use_cache=True)
        found[0] = kv_cache.shape_of(getattr(made, "past_key_values", None))

    watch_step(module, run)
    return found[0]


def _decoder_start(config: Any, batch: int) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": torch.zeros(batch, 1, dtype=torch.long)} if config.is_encoder_decoder else {}


def watch_generation(module: nn.Module, sizes: Sizes, shape: kv_cache.CacheShape | None) -> Observation:
    """The largest passes of a generation. A planned cache (``shape``) is not counted, the model's own is.

    Raises UnsupportedError when the forward needs values that only a real run has.
    """
    config: Any = module.config
    if config.is_encoder_decoder:
        return watch_step(module, lambda call, watch: _encode_and_decode(call, watch, sizes))
    takes = set(inspect.signature(module.forward).parameters)

    def run(call: Callable[..., Any], watch: _Watch) -> None:
        state: dict[str, Any] = {}
        if shape is not None:
            state = {"past_key_values": _pretended(module, shape, sizes, watch)}
        begin = peak_bytes = 0
        for tokens, counted in sizes.passes():
            watch.peak_bytes = watch.live_bytes
            made = call(**_inputs(sizes, begin, tokens, takes), **state, use_cache=True)
            begin += tokens
            if counted:
                peak_bytes = max(peak_bytes, watch.peak_bytes)
            name = "cache_params" if "cache_params" in takes else "past_key_values"
            state = state if shape is not None else {name: getattr(made, name)}
            del made
        watch.peak_bytes = peak_bytes + _scores_bytes(module, sizes.batch)

    return watch_step(module, run)


def _pretended(
    module: nn.Module, shape: kv_cache.CacheShape, sizes: Sizes, watch: _Watch
) -> kv_cache.PlannedCache:
    placement = kv_cache.Placement(shape=shape, batch=sizes.batch, tokens=sizes.cached)
    timeline = Timeline("a cache without bytes", measured=False)
    memory = fake_memory(timeline, compute_tier=RAM, compute_bytes=_NO_LIMIT_BYTES, ram_bytes=_NO_LIMIT_BYTES)
    cache = kv_cache.apply(module, placement, memory)
    watch.know(cache.tensors)
    return cache


def _inputs(sizes: Sizes, begin: int, tokens: int, takes: set[str]) -> dict[str, Any]:
    """What transformers gives to a model for the next ``tokens`` tokens."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(sizes.batch, tokens, dtype=torch.long)}
    if "position_ids" in takes:
        inputs["position_ids"] = torch.zeros(sizes.batch, tokens, dtype=torch.long)
    if sizes.padded and "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones(sizes.batch, begin + tokens, dtype=torch.long)
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = 1
    return inputs


def _encode_and_decode(call: Callable[..., Any], watch: _Watch, sizes: Sizes) -> None:
    """The encoder's pass with the first token, and the last token's on a cache of all before it."""
    ids = torch.zeros(sizes.batch, sizes.prompt, dtype=torch.long)
    mask = {"attention_mask": torch.ones_like(ids)} if sizes.padded else {}
    made = call(input_ids=ids, **mask, decoder_input_ids=ids[:, :1], use_cache=True)
    peak_bytes = watch.peak_bytes
    encoded = BaseModelOutput(last_hidden_state=made.encoder_last_hidden_state)
    del made
    new = sizes.total - sizes.prompt
    if new > 1:
        before = torch.zeros(sizes.batch, new - 1, dtype=torch.long)
        made = call(encoder_outputs=encoded, **mask, decoder_input_ids=before, use_cache=True)
        past = made.past_key_values
        del made
        watch.peak_bytes = watch.live_bytes
        call(
            encoder_outputs=encoded,
            **mask,
            decoder_input_ids=before[:, :1],
            past_key_values=past,
            use_cache=True,
        )
    watch.peak_bytes = max(watch.peak_bytes, peak_bytes)


def _scores_bytes(module: nn.Module, batch: int) -> int:
    """Of the last token's logits, generation makes a copy in fp32, and its processors another."""
    config: Any = module.config
    return 2 * 4 * batch * int(getattr(config.get_text_config(decoder=True), "vocab_size", 0))
