"""Models that certainly fit on a GPU: nothing is traced or measured, and no more is reserved than was promised."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import brim
from brim.core.hardware import RAM, VRAM
from brim.estimation.step_memory import Inputs
from brim.model_cache import cache_input, cache_of
from brim.requests.generate import Request
from brim.run.generate.request import generate
from support.ample import EXPERTS, FAMILIES, random_sizes, save
from support.generating import save_words_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def cleared() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # they count too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
@torch.no_grad()
def test_no_more_is_reserved_than_promised_and_logits_are_transformers_own(family: str, tmp_path: Path) -> None:
    for seed in range(2):
        config, sizes = random_sizes(family, seed)
        folder = save(tmp_path / str(seed), config)
        ids = torch.arange(sizes.batch * sizes.prompt, device="cuda").view(sizes.batch, sizes.prompt) % 60
        before = cleared()
        inputs = Inputs(batch=sizes.batch, prompt=sizes.prompt, total=sizes.total)
        model: Any = brim.load(folder, vram="8GiB", ram="8GiB", device="cuda", inputs=inputs)
        assert "prefill_chunk" not in model.brim.plan.settings
        cache = cache_of(model(input_ids=ids, use_cache=True))
        for _ in range(sizes.total - sizes.prompt):
            cache = cache_of(model(input_ids=ids[:, :1], **cache_input(model, cache), use_cache=True))
        del cache
        logits = model(input_ids=ids).logits.cpu()
        reserved = torch.cuda.max_memory_reserved() - before
        assert reserved <= model.brim.plan.promise.peak_bytes[VRAM]
        model.brim.remove()
        plain = AutoModelForCausalLM.from_pretrained(folder).cuda()
        assert torch.equal(plain(input_ids=ids).logits.cpu(), logits)


def test_nothing_is_traced_or_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    for name in ("machine", "warm_up", "watch_inference", "search_generation"):
        monkeypatch.setattr(f"brim.run.generate.load.{name}", None)
    model = brim.load(folder, vram="2GiB", ram="8GiB", device="cuda")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    model.brim.remove()


def test_text_is_that_of_a_plan_and_the_promise_is_kept(tmp_path: Path) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    before = cleared()
    made = [
        generate(Request(model=folder, prompt="a b", max_new_tokens=9, vram=vram, ram="8GiB", device="cuda"))
        for vram in ("2GiB", "300MiB")
    ]
    assert ["prefill_chunk" in each.plan.settings for each in made] == [False, True]
    assert made[0].token_ids == made[1].token_ids
    assert made[0].measured_bytes[VRAM] - before <= made[0].promised_bytes[VRAM] <= made[0].plan.budget_bytes[VRAM]
    assert made[0].promised_bytes[RAM] <= made[0].plan.budget_bytes[RAM]


@pytest.mark.thorough
def test_a_long_generation_with_a_planned_cache_keeps_the_promise(tmp_path: Path) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    before = cleared()
    made = generate(Request(model=folder, prompt="a b", max_new_tokens=520, vram="2GiB", ram="8GiB", device="cuda"))
    assert len(made.token_ids) == 520 and "prefill_chunk" not in made.plan.settings
    assert made.measured_bytes[VRAM] - before <= made.promised_bytes[VRAM]
