"""Generation from weights that stream to a GPU: the tokens of the whole model, no more reserved than said."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from brim.run.generate.request import Request, generate
from support.generating import save_words_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20
PROMPT, NEW = "one more thing to go on from", 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 135 MiB. Its tokens are far enough apart that rounding changes none."""
    return save_words_llama(tmp_path_factory.mktemp("llama"), layers=12)


@pytest.fixture(scope="module")
def expected(saved: Path) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(saved).cuda()
    ids = AutoTokenizer.from_pretrained(saved)(PROMPT, return_tensors="pt").input_ids.cuda()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return [int(token) for token in out[0][ids.shape[1] :]]


@pytest.mark.parametrize(
    ("vram_bytes", "host_compute"),
    [(104 * MIB, False), (128 * MIB, True), (168 * MIB, False)],
    ids=["104 MiB", "128 MiB, the processor may compute", "168 MiB"],
)
def test_every_token_fits_the_planned_cache_and_the_budget(
    saved: Path, expected: list[int], vram_bytes: int, host_compute: bool
) -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # they count too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    made = generate(
        Request(
            model=saved,
            prompt=PROMPT,
            max_new_tokens=NEW,
            vram=vram_bytes,
            ram="2GiB",
            device="cuda",
            host_compute=host_compute,
        )
    )
    assert made.token_ids == expected
    assert len(made.token_ids) == NEW  # as many as the cache was planned for
    choices = set(made.plan.choices("weight_streaming").values())
    assert {"resident"} < choices  # some stay, some do not
    assert host_compute or len(choices) == 2
    assert torch.cuda.max_memory_reserved() - before <= vram_bytes
