"""Checkpointing changes memory and nothing else: losses, parameters and buffers are bit for bit those of plain
training."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

import brim
from brim.core import Category
from brim.errors import UnsupportedError, UsageError
from brim.model_cache import cache_input
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.checkpointing.technique import ALTERNATE, FULL, NONE, SELECTIVE, selective_contexts
from support import trained


@pytest.mark.parametrize("family", trained.FAMILIES)
def test_blocks_are_the_repeated_parts(family: str) -> None:
    assert checkpointing.blocks(trained.make(family)) == trained.BLOCKS[family]


def test_blocks_of_a_model_without_repeated_parts() -> None:
    assert checkpointing.blocks(nn.Sequential(nn.Linear(3, 3), nn.ReLU())) == []
    assert checkpointing.blocks(nn.Linear(3, 3)) == []


def test_parts_of_several_kinds_are_one_block() -> None:
    config = transformers.T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    found = checkpointing.blocks(transformers.T5ForConditionalGeneration(config))
    assert found == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def choices_of(model: nn.Module, kind: str) -> dict[str, str]:
    if kind == "every other":
        return checkpointing.every(model, 2)
    if kind == "mixed":
        return dict(zip(checkpointing.blocks(model), [FULL, SELECTIVE, NONE] * 2, strict=False))
    return dict.fromkeys(checkpointing.blocks(model), kind)


@pytest.mark.parametrize("kind", [FULL, SELECTIVE, ALTERNATE, "every other", "mixed"])
@pytest.mark.parametrize("family", trained.FAMILIES)
def test_five_steps_are_bit_for_bit_the_same(family: str, kind: str) -> None:
    plain, other = trained.make(family), trained.make(family)
    checkpointing.apply(other, choices_of(other, kind))
    assert trained.train(other, family) == trained.train(plain, family)
    assert trained.same_state(other, plain)


@pytest.mark.parametrize("kind", [FULL, SELECTIVE, ALTERNATE])
def test_gradients_are_bit_for_bit_the_same(kind: str) -> None:
    plain, other = trained.make("llama"), trained.make("llama")
    checkpointing.apply(other, choices_of(other, kind))
    for model in (plain, other):
        torch.manual_seed(1)
        model(**trained.batch("llama", 0)).loss.backward()
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None, name
        assert two.grad is not None and torch.equal(one.grad, two.grad), name


def test_every_other_product_is_the_same_ones_where_pytorch_asks_again_as_it_computes_again() -> None:
    """Versions before 2.13 do; a Llama's block has seven products, so that one counter for both would be off."""
    forward: Any = selective_contexts(alternate=True)[0]
    product = torch.ops.aten.mm.default

    def asked(is_recompute: bool) -> list[CheckpointPolicy]:
        context = SelectiveCheckpointContext(is_recompute=is_recompute)
        return [forward.policy_fn(context, product) for _ in range(7)]

    kept, given_up = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert asked(False) == asked(True) == [kept, given_up] * 3 + [kept]


@pytest.mark.parametrize("kind", [FULL, SELECTIVE])
def test_under_autocast(kind: str) -> None:
    plain, other = trained.make("llama"), trained.make("llama")
    checkpointing.apply(other, choices_of(other, kind))
    losses = []
    for model in (plain, other):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(trained.train(model, "llama"))
    assert losses[0] == losses[1]
    assert trained.same_state(other, plain)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", [FULL, SELECTIVE])
def test_lora_on_a_frozen_base(kind: str) -> None:
    models = []
    for _ in range(2):
        config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2, task_type="CAUSAL_LM")
        models.append(peft.get_peft_model(trained.make("llama"), config).train())
    plain, other = models
    other.load_state_dict(plain.state_dict())
    checkpointing.apply(other, choices_of(other, kind))
    assert trained.train(other, "llama") == trained.train(plain, "llama")
    assert trained.same_state(other, plain)


def kept_bytes(model: nn.Module, family: str) -> int:
    """What autograd holds at the end of a forward pass, each storage once."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**trained.batch(family, 0))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for pointer, size in held.items() if pointer not in own)


@pytest.mark.parametrize("family", trained.FAMILIES)
def test_full_keeps_less_than_half(family: str) -> None:
    model = trained.make(family)
    plain = kept_bytes(model, family)
    checkpointing.apply(model, choices_of(model, FULL))
    assert kept_bytes(model, family) < plain / 2


def test_nothing_is_recomputed_in_evaluation_or_without_gradients() -> None:
    model, calls = trained.make("gpt2"), []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointing.apply(model, choices_of(model, FULL))
    with torch.no_grad():
        model(**trained.batch("gpt2", 0))
    model.eval()(**trained.batch("gpt2", 0)).loss.backward()
    assert len(calls) == 2
    model.train()(**trained.batch("gpt2", 0)).loss.backward()
    assert len(calls) == 4


class Counting(nn.Module):
    """Reads and writes a buffer in forward, as spectral norm does; takes keywords, gives several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("calls", torch.zeros(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, extra: dict[str, torch.Tensor]):
        self.calls += 1
        x = self.drop(self.inner(x) * scale * self.calls + extra["shift"]).tanh()
        return x, {"mean": x.mean()}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0
        for part in self.parts:
            x, made = part(x, scale=x.detach().abs().mean(), extra={"shift": x * 0.1})
            total = total + made["mean"]
        return total + x.sum()


def test_buffers_keywords_and_several_outputs() -> None:
    results = []
    for kind in (None, FULL, SELECTIVE):
        torch.manual_seed(0)
        model = Stack()
        if kind:
            checkpointing.apply(model, choices_of(model, kind))
        x = torch.randn(4, 6, requires_grad=True)
        for _ in range(3):
            model(x).backward()
        results.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_backward_twice_and_gradients_of_gradients() -> None:
    results = []
    for kind in (None, FULL):
        torch.manual_seed(0)
        model = Stack()
        if kind:
            checkpointing.apply(model, choices_of(model, kind))
        x = torch.randn(4, 6, requires_grad=True)
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([x.grad, *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [FULL, SELECTIVE, "every other"])
def test_a_cache_keeps_what_it_had_and_is_not_appended_to_twice(kind: str) -> None:
    """As with prefix tuning: keys and values from before, with gradients."""
    losses = []
    for checkpointed in (False, True):
        model = trained.make("llama")
        if checkpointed:
            checkpointing.apply(model, choices_of(model, kind))
        torch.manual_seed(3)
        prefix = torch.randn(3, 1, 4, 8, requires_grad=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                cache = transformers.DynamicCache()
                for layer in range(3):
                    cache.update(prefix, prefix * 2, layer)
                model(**trained.batch("llama", 0), **cache_input(model, cache), use_cache=True).loss.backward()
        assert [str(w.message) for w in told if "use_cache" in str(w.message)][1:] == []
        assert bool(told) == checkpointed
        losses.append([prefix.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_a_cache_that_is_written_to_in_place_is_refused() -> None:
    model = trained.make("llama")
    checkpointing.apply(model, choices_of(model, FULL))
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(**trained.batch("llama", 0), **cache_input(model, cache), use_cache=True)  # fills and makes its tensors
    with pytest.raises(UnsupportedError, match="in place"), pytest.warns(UserWarning, match="use_cache"):
        model(**trained.batch("llama", 0), **cache_input(model, cache), use_cache=True)


@pytest.mark.parametrize("family", trained.FAMILIES)
def test_remove_restores_exactly(family: str) -> None:
    model = trained.make(family)
    before = trained.surface(model)
    handle = checkpointing.apply(model, choices_of(model, FULL))
    model(**trained.batch(family, 0)).loss.backward()
    model.zero_grad()
    handle.remove()
    handle.remove()
    assert trained.surface(model) == before


def test_remove_below_another_technique_passes_on() -> None:
    model = trained.make("resnet")
    part = model.get_submodule("stages.0.0")
    handle = checkpointing.apply(model, {"stages.0.0": FULL})
    below, seen = vars(part)["forward"], []
    vars(part)["forward"] = lambda x: seen.append(1) or below(x)
    handle.remove()
    model(**trained.batch("resnet", 0)).loss.backward()
    assert seen == [1]


def test_a_copy_of_the_model_is_checkpointed_and_apart() -> None:
    model = trained.make("resnet")
    checkpointing.apply(model, choices_of(model, FULL))
    copied, plain = copy.deepcopy(model), trained.make("resnet")
    trained.train(copied, "resnet", steps=1)
    assert trained.same_state(model, plain)
    with pytest.raises(UsageError, match="already"):
        checkpointing.apply(copied, choices_of(copied, FULL))


def test_misuse() -> None:
    model = trained.make("llama")
    with pytest.raises(UsageError, match=r"model\.layers\.0"):
        checkpointing.apply(model, {"layers.0": FULL})
    with pytest.raises(UsageError, match="some"):
        checkpointing.apply(model, {"model.layers.0": "some"})
    with pytest.raises(UsageError, match="inside"):
        checkpointing.apply(model, {"model.layers.0": FULL, "model.layers.0.mlp": FULL})
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UsageError):
            checkpointing.every(model, wrong)
    model.model.layers[0].gradient_checkpointing = True  # as transformers turns its own on
    with pytest.raises(UsageError, match="gradient_checkpointing_disable"):
        checkpointing.apply(model, {"model.layers.0": FULL})


def test_options_say_what_a_trace_then_shows(known_machine) -> None:
    """The saving that is told is that of the peak, up to what the recomputed block itself needs."""

    def trace(kind: str):
        def build():
            model = trained.make("gpt2").train()
            checkpointing.apply(model, choices_of(model, kind))
            inputs = trained.batch("gpt2", 0)
            return lambda: model(**inputs).loss.backward()

        return brim.trace(build, target="cpu", steps=1)

    plain = trace(NONE)
    names = trained.BLOCKS["gpt2"]
    rows = checkpointing.options(plain, known_machine, names)
    assert [(row.block, row.choice) for row in rows] == [(n, c) for n in names for c in (SELECTIVE, FULL)]

    def held(made) -> int:
        return sum(
            s.bytes for s in made.storages if s.category is Category.ACTIVATION and "transformer.h" in s.module
        )

    for kind in (SELECTIVE, FULL):
        told = sum(row.saves_bytes for row in rows if row.choice == kind)
        assert 0 < told < held(plain)
    of = {row.choice: row for row in rows if row.block == names[1]}
    assert of[FULL].saves_bytes > of[SELECTIVE].saves_bytes
    assert of[FULL].compute_s > of[SELECTIVE].compute_s > 0


class Restless(nn.Module):
    """A block whose forward draws numbers of every kind and changes its own attributes."""

    def __init__(self, generator: torch.Generator, numbers: np.random.Generator) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.draws = lambda: float(torch.rand((), generator=generator)) + numbers.random()
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.latest = x.detach().sum()
        if random.random() < 0.4:  # else the block is left out
            return x
        scale = self.calls + len(self.seen) + np.random.rand() + self.draws()
        return self.last(torch.tanh(self.first(x) * scale))


@pytest.mark.parametrize("kind", [NONE, FULL, SELECTIVE])
def test_recomputation_repeats_every_draw_and_leaves_all_as_one_forward_does(kind: str) -> None:
    def trained_once(kind: str) -> list[Any]:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        generator, numbers = torch.Generator().manual_seed(1), np.random.default_rng(2)
        model = nn.ModuleList(Restless(generator, numbers) for _ in range(4))
        checkpointing.apply(model, {f"{index}": kind for index in range(4)})
        x = torch.randn(3, 4)
        for _ in range(3):
            y = x
            for block in model:
                y = block(y)
            y.sum().backward()
        parts: Any = list(model)
        return [
            *[None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            *[(part.calls, part.seen, part.latest.item()) for part in parts],
            random.getstate(), np.random.get_state()[2], generator.get_state().tolist(), numbers.random(),
        ]  # fmt: skip

    assert trained_once(kind) == trained_once(NONE)
