"""``BrimCallback`` on a GPU: the peak that it predicts before the first step is the one that PyTorch measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from brim.integrations.transformers import BrimCallback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("more", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_the_predicted_peak_is_the_measured_one(more: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    set_seed(12)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (32, 128))]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=3, save_strategy="no", report_to=[], **more
    )
    callback = BrimCallback()
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    first, last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("brim: ")]
    assert "which fits in" in first and last.startswith("brim: the training's peak on the GPU: ")
    assert callback.predicted is not None
    measured, predicted = torch.cuda.max_memory_allocated(), callback.predicted.peak_bytes.allocated
    assert predicted == pytest.approx(measured, rel=0.02), (measured, predicted)
