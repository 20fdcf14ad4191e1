"""Quantized weights on a real CUDA device: made wide there, and streamed as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import brim
from brim.estimation.step_memory import Inputs
from brim.techniques.quantization.technique import SCHEMES, apply
from brim.techniques.streaming.weight_streaming import RESIDENT
from support.tiny_model import save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("wide_bytes", [1 << 16, 32 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_product_is_that_with_the_wide_weight(
    scheme: str, dtype: torch.dtype, wide_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brim.techniques.quantization.linear._WIDE_BYTES", wide_bytes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 192, dtype=dtype, device="cuda"))
    apply(model, scheme)
    layer: Any = model[0]
    for rows in (1, 7, 300):
        x = torch.randn(rows, 256, dtype=dtype, device="cuda")
        with torch.no_grad():
            wanted = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
            size = x.double().norm(dim=1, keepdim=True) * layer.weight.double().norm(dim=1) + 1
            assert ((model(x) - wanted).abs() <= 2**-7 * size).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_streamed_from_ram_and_disk_is_resident(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_llama(tmp_path / "llama", layers=6)
    twin = AutoModelForCausalLM.from_pretrained(folder).eval()
    apply(twin, scheme)
    twin = twin.cuda()
    ids = torch.arange(12, device="cuda")[None]
    module = brim.load(
        folder, quantization=scheme, vram="76MiB", ram="2GiB", inputs=Inputs(prompt=12, total=16), host_compute=False
    )
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(ids).logits, twin(ids).logits)
    assert set(module.brim.plan.choices("weight_streaming").values()) - {RESIDENT}  # type: ignore[operator, union-attr]
    module.brim.close()  # type: ignore[operator, union-attr]
