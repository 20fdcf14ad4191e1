"""Models that certainly fit: the bound of their memory, and the same results as with a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import brim
from brim.core.hardware import RAM
from brim.errors import TransferError
from brim.estimation.step_memory import Inputs, watch_inference
from brim.measure.probe import known
from brim.memory.checkpoint_files import read_checkpoint
from brim.model_cache import cache_input, cache_of
from brim.planning.inference.ample import Bound
from brim.planning.inference.memory import Sizes
from brim.requests.generate import Request
from brim.run.generate.request import chat, generate
from brim.run.ranks.memory import TensorMeter
from support.ample import FAMILIES, random_sizes, save
from support.generating import save_words_llama

PLANNED = "400MiB"  # too little to be ample for any model: libraries alone may take more than half of it


def bound_of(config: Any, stored: Any, sizes: Sizes) -> Bound:
    return Bound(
        config=config, stored=stored, sizes=sizes, hardware=known("cpu"), budget={RAM: 1 << 40}, open=pytest.fail
    )


def measured_bytes(model: Any, sizes: Sizes) -> int:
    """The peak of real tensors beside the weights: the prompt's pass, and the last token's."""
    meter = TensorMeter("passes", torch.device("cpu"))
    meter.hold([*model.parameters(), *model.buffers()], "parameter")
    before = sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    ids = torch.ones(sizes.batch, sizes.prompt, dtype=torch.long)
    with meter, torch.no_grad():
        cache = cache_of(model(input_ids=ids, use_cache=True))
        for _ in range(sizes.total - sizes.prompt):
            cache = cache_of(model(input_ids=ids[:, :1], **cache_input(model, cache), use_cache=True))
    return meter.peak_bytes[RAM] - before


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_is_not_below_the_peak_of_random_configurations(family: str, tmp_path: Path) -> None:
    for seed in range(4):
        config, sizes = random_sizes(family, seed)
        model: Any = brim.load(save(tmp_path / str(seed), config), device="cpu")
        stored = read_checkpoint(tmp_path / str(seed))
        bound = bound_of(model.config, stored, sizes)
        assert bound.fits(type(model), None)
        assert measured_bytes(model, sizes) <= bound.step_bytes()
        model.brim.remove()
        inputs = Inputs(batch=sizes.batch, prompt=sizes.prompt, total=sizes.total)
        assert watch_inference(model, inputs).step_bytes <= bound.step_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_planned_model(family: str, tmp_path: Path) -> None:
    config, _ = random_sizes(family, 9)
    folder, ids = save(tmp_path, config), torch.arange(20)[None] % 60
    ample, planned = brim.load(folder, device="cpu"), brim.load(folder, ram=PLANNED, device="cpu")
    assert ["prefill_chunk" in model.brim.plan.settings for model in (ample, planned)] == [False, True]
    with torch.no_grad():
        assert torch.equal(ample(input_ids=ids).logits, planned(input_ids=ids).logits)
        plain = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        assert torch.equal(ample(input_ids=ids).logits, plain)


def test_text_is_that_of_a_plan_and_memory_is_as_promised(tmp_path: Path) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    results = [
        generate(Request(model=folder, prompt="a b", max_new_tokens=9, ram=ram, device="cpu"))
        for ram in (PLANNED, "2GiB")
    ]
    assert results[0].token_ids == results[1].token_ids
    assert ["prefill_chunk" in result.plan.settings for result in results] == [True, False]
    ample = results[1]
    assert not ample.plan.exceeded({RAM: ample.measured_bytes[RAM]})
    assert ample.measured_bytes[RAM] > 0


@pytest.mark.thorough
def test_many_tokens_and_turns_have_a_planned_cache_and_the_tokens_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    results = [
        generate(Request(model=folder, prompt="a b", max_new_tokens=600, ram=ram, device="cpu"))
        for ram in (PLANNED, "2GiB")
    ]
    assert results[0].token_ids == results[1].token_ids
    assert ["prefill_chunk" in result.plan.settings for result in results] == [True, False]
    assert not results[1].plan.exceeded({RAM: results[1].measured_bytes[RAM]})
    answers = []
    for ram in (PLANNED, "2GiB"):
        if ram != PLANNED:
            monkeypatch.setattr("brim.run.generate.request.machine", None)
        with chat(Request(model=folder, max_new_tokens=5, ram=ram, device="cpu"), context=100) as talk:
            turns = [talk.answer("a b"), talk.answer("c")]
            answers.append([turn.text for turn in turns])
            assert turns[1].reused_tokens > 0
    assert answers[0] == answers[1]


def test_the_type_may_be_that_of_the_files_against_the_configuration(tmp_path: Path) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model = brim.load(folder, ram="2GiB", device="cpu", dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "prefill_chunk" not in model.brim.plan.settings


def test_nothing_is_traced_measured_or_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loading = "brim.run.generate.load."
    for name in ("machine", "warm_up", "watch_inference", "search_generation"):
        monkeypatch.setattr(loading + name, None)
    model = brim.load(folder, ram="2GiB", device="cpu")
    assert model.brim.plan.promise.step_s == 0
    assert list((tmp_path / "cache" / "brim").iterdir()) == []


def test_a_mixture_of_experts_a_state_space_model_and_another_type_are_planned(tmp_path: Path) -> None:
    config, sizes = random_sizes("llama", 0)
    model, stored = AutoModelForCausalLM.from_config(config), read_checkpoint(save(tmp_path, config))
    source = next(iter(stored.values()))

    def fits(stored: Any, dtype: torch.dtype = torch.float32) -> bool:
        return bound_of(config, stored, sizes).fits(type(model), dtype)

    assert fits(stored)
    assert not fits(stored, torch.bfloat16)
    for name in ("model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.A_log"):
        odd = (
            source if "experts" in name else type(source)(name=name, dtype=source.dtype, shape=(2, 1, 4), extents=())
        )
        assert not fits({**stored, name: odd})


def test_a_file_that_changed_after_its_header_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from brim.run.generate import load as loading

    folder = save_words_llama(tmp_path / "llama", layers=2)
    reading = loading.read_checkpoint

    def read_and_change(directory: Path) -> Any:
        stored = reading(directory)
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"x")
        return stored

    monkeypatch.setattr(loading, "read_checkpoint", read_and_change)
    with pytest.raises(TransferError, match="written to since its header was read"):
        brim.load(folder, ram="2GiB", device="cpu")
