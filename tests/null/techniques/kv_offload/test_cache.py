"""The planned KV cache: transformers' results, exactly the bytes that it says, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from brim.core import EventKind, Timeline
from brim.core.hardware import RAM, VRAM
from brim.core.trace import Category
from brim.errors import BudgetError, TransferError, UnsupportedError, UsageError
from brim.memory.tiers import Memory, cpu_memory, emulated_memory
from brim.memory.transfer import Ticket
from brim.model_cache import cache_input, cache_of
from brim.techniques.kv_offload import cache as kv_cache
from generating import make

MIB = 1 << 20
PROMPT, NEW = 11, 6
TOKENS = PROMPT + NEW


def shape_of(model: Any) -> kv_cache.CacheShape:
    with torch.no_grad():
        found = kv_cache.shape_of(cache_of(model(torch.zeros(1, 1, dtype=torch.long))))
    assert found is not None
    return found


def memory_of(tier: str) -> Memory:
    timeline = Timeline("test", measured=True)
    if tier == RAM:
        return cpu_memory(timeline, ram_bytes=8 * MIB)
    return emulated_memory(timeline, vram_bytes=8 * MIB, ram_bytes=8 * MIB)


def steps(model: Any, cache: Any, pieces: list[int], batch: int = 2) -> list[torch.Tensor]:
    """Logits of every pass: the prompt in ``pieces``, then one token after another."""
    ids = torch.randint(3, 300, (batch, TOKENS), generator=torch.Generator().manual_seed(1))
    found, begin = [], 0
    with torch.inference_mode():
        for count in [*pieces, *[1] * NEW]:
            out = model(ids[:, begin : begin + count], **cache_input(model, cache), use_cache=True)
            found.append(out.logits)
            begin += count
    return found


@pytest.mark.parametrize("resting", [0, 4, PROMPT, 15, TOKENS])
@pytest.mark.parametrize("pieces", [[PROMPT], [4, 4, 3]], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["llama", "multi-head", "multi-query", "gpt2", "qwen3-moe", "gemma2", "mistral"])
def test_logits_are_those_of_transformers_cache(name: str, pieces: list[int], resting: int) -> None:
    model = make(name)
    shape = shape_of(model)
    if resting and not shape.planned:
        pytest.skip("every layer has a window")
    memory = memory_of(VRAM)
    placement = kv_cache.Placement(shape=shape, batch=2, tokens=TOKENS, resting=resting)
    cache = kv_cache.apply(model, placement, memory)
    try:
        found = steps(model, cache, pieces)
        expected = steps(model, DynamicCache(config=model.config), pieces)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        assert cache.get_seq_length() == TOKENS
    finally:
        cache.remove()
        memory.close()


@pytest.mark.parametrize(("tier", "resting"), [(RAM, 0), (VRAM, 0), (VRAM, 5), (VRAM, TOKENS)])
def test_pools_hold_what_the_placement_says_and_get_it_back(tier: str, resting: int) -> None:
    model, memory = make("llama"), memory_of(tier)
    placement = kv_cache.Placement(shape=shape_of(model), batch=3, tokens=TOKENS, resting=resting)
    cache = kv_cache.apply(model, placement, memory)
    pools = {pool.tier: pool for pool in (memory.compute, memory.ram)}
    said = placement.held_bytes(tier)
    assert {name: pool.held_bytes for name, pool in pools.items() if pool.held_bytes} == said
    assert {e.category for e in memory.recorder.timeline if e.kind is EventKind.ALLOC} == {Category.KV_CACHE}
    steps(model, cache, [PROMPT], batch=3)
    assert {name: pool.peak_bytes for name, pool in pools.items() if pool.peak_bytes} == said
    cache.remove()
    cache.remove()
    assert all(pool.held_bytes == 0 for pool in pools.values())
    memory.close()


def test_layers_of_other_kinds_keep_transformers_own_form() -> None:
    model = make("gemma2")  # every other layer has a window
    shape, memory = shape_of(model), memory_of(RAM)
    assert [layer is None for layer in shape.layers] == [True, False, True, False]
    cache = kv_cache.apply(model, kv_cache.Placement(shape=shape, batch=1, tokens=TOKENS), memory)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds[::2] == [type(layer) for layer in DynamicCache(config=model.config).layers][::2]
    assert cache.is_sliding == [True, False, True, False]
    cache.remove()
    assert kv_cache.shape_of(make("mamba")(torch.zeros(1, 1, dtype=torch.long)).cache_params) is None
    assert kv_cache.shape_of(None) is None


def test_what_moves_is_what_rests() -> None:
    model, memory = make("llama"), memory_of(VRAM)
    resting = 7
    placement = kv_cache.Placement(shape=shape_of(model), batch=2, tokens=TOKENS, resting=resting)
    cache = kv_cache.apply(model, placement, memory)
    steps(model, cache, [PROMPT])
    cache.remove()  # and waits for what is under way
    moved = memory.recorder.copied_bytes
    assert moved[VRAM, RAM] == placement.moved_bytes  # once, when it came
    layers = len(placement.shape.planned)
    # Of every token after the prompt, and what was brought for the next one: two slots ahead at most.
    full, ahead = NEW * placement.moved_bytes, kv_cache.SLOTS * placement.moved_bytes // layers
    assert full <= moved[RAM, VRAM] <= full + ahead
    memory.close()


def test_a_pool_without_room_refuses_and_holds_nothing() -> None:
    model, memory = make("llama"), memory_of(VRAM)
    for resting in (0, 2000):
        placement = kv_cache.Placement(shape=shape_of(model), batch=16, tokens=4000, resting=resting)
        with pytest.raises(BudgetError, match="kv_cache"):
            kv_cache.apply(model, placement, memory)
        assert (memory.compute.held_bytes, memory.ram.held_bytes) == (0, 0)
    memory.close()


def test_more_tokens_than_planned_and_other_than_greedy_generation_are_refused() -> None:
    model, memory = make("llama"), memory_of(RAM)
    cache = kv_cache.apply(model, kv_cache.Placement(shape=shape_of(model), batch=1, tokens=4), memory)
    with torch.inference_mode(), pytest.raises(UsageError, match="planned for 4"):
        model(torch.zeros(1, 5, dtype=torch.long), **cache_input(model, cache))
    for act in (
        lambda: cache.reorder_cache(torch.zeros(1, dtype=torch.long)),
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.zeros(1, dtype=torch.long)),
    ):
        with pytest.raises(UnsupportedError):
            act()
    cache.remove()


@pytest.mark.parametrize("resting", [0, 5])
def test_a_cache_that_is_reset_begins_anew(resting: int) -> None:
    model, memory = make("llama"), memory_of(VRAM)
    placement = kv_cache.Placement(shape=shape_of(model), batch=2, tokens=TOKENS, resting=resting)
    cache = kv_cache.apply(model, placement, memory)
    first = steps(model, cache, [PROMPT])
    cache.reset()
    assert cache.get_seq_length() == 0
    again = steps(model, cache, [PROMPT])
    assert torch.equal(first[-1], again[-1])
    cache.remove()
    memory.close()


@pytest.mark.parametrize("way", [(RAM, VRAM), (VRAM, RAM)])
def test_a_copy_that_fails_is_told_and_leaves_nothing(way: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = make("llama"), memory_of(VRAM)
    copy = memory.engine.copy

    def failing(source: Any, target: Any, label: str, after: Any, asked: tuple[str, str]) -> Any:
        if asked != way or "kv_cache 2" not in label:
            return copy(source, target, label, after, asked)
        ticket = Ticket()
        ticket.finish(TransferError("Cannot move bytes between tiers.", "The link is broken."))
        return ticket

    monkeypatch.setattr(memory.engine, "copy", failing)
    placement = kv_cache.Placement(shape=shape_of(model), batch=2, tokens=TOKENS, resting=5)
    cache = kv_cache.apply(model, placement, memory)
    with pytest.raises(TransferError, match="broken"):
        steps(model, cache, [PROMPT])
    cache.remove()
    assert (memory.compute.held_bytes, memory.ram.held_bytes) == (0, 0)
    memory.close()
