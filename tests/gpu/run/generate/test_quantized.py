"""Quantized weights on a real CUDA device: streamed as they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import brim
from brim.estimation.step_memory import Inputs
from brim.requests.plan import LOSSY
from brim.techniques.streaming.weight_streaming import RESIDENT
from support.tiny_model import save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@torch.no_grad()
@pytest.mark.parametrize("precision", LOSSY)
def test_streamed_from_ram_and_disk_is_resident(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, inputs = save_llama(tmp_path / "llama", layers=6), Inputs(prompt=12, total=16)
    ids = torch.arange(12, device="cuda")[None]
    whole = brim.load(folder, quantization=precision, inputs=inputs, host_compute=False)
    assert set(whole.brim.plan.choices("weight_streaming").values()) == {RESIDENT}  # type: ignore[operator, union-attr]
    wanted = whole(ids).logits
    whole.brim.close()  # type: ignore[operator, union-attr]
    module = brim.load(folder, quantization=precision, vram="76MiB", ram="2GiB", inputs=inputs, host_compute=False)
    for _ in range(3):
        assert torch.equal(module(ids).logits, wanted)
    assert set(module.brim.plan.choices("weight_streaming").values()) - {RESIDENT}  # type: ignore[operator, union-attr]
    module.brim.close()  # type: ignore[operator, union-attr]
