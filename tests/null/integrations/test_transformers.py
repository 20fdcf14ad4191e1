"""``BrimCallback`` in the real Trainer: it predicts a step, changes nothing, and explains failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import brim
from brim.core import Timeline
from brim.integrations.transformers import BrimCallback

pytestmark = pytest.mark.thorough
SIZES: dict[str, Any] = {"n_positions": 32, "n_embd": 160, "n_layer": 4, "n_head": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> GPT2LMHeadModel:
    set_seed(12)
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, **SIZES, **ENDS))


def trained(folder: Path, model: Any, *callbacks: Any, **more: Any) -> list[float]:
    """Losses of two steps over shuffled rows."""
    set_seed(12)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (16, 16))]
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "use_cpu": True}
    arguments = TrainingArguments(str(folder), save_strategy="no", report_to=[], disable_tqdm=True, **settings | more)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=list(callbacks)
    )
    hook = sys.excepthook
    trainer.train()
    assert sys.excepthook is hook
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("brim: ")]


def by_hand(batch: int = 4, passes: int = 1) -> Timeline:
    def build() -> Any:
        model = gpt2().train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(batch, 16, dtype=torch.int64)

        def step() -> None:
            for _ in range(passes):
                model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return brim.simulate(brim.trace(build, steps=2, target="cpu"))


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"eval_on_start": True}])
def test_a_step_is_predicted_and_the_training_is_the_same(more, tmp_path, capsys):
    plain = trained(tmp_path, gpt2(), **more)
    callback = BrimCallback()
    assert trained(tmp_path, gpt2(), callback, **more) == plain
    (line,) = lines(capsys)
    assert line.startswith("brim: a step of GPT2LMHeadModel takes ") and line.endswith("; tensors in RAM")
    assert "optimizer state" in line
    assert callback.predicted is not None
    expected = by_hand(passes=more.get("gradient_accumulation_steps", 1)).peak_bytes.allocated
    assert callback.predicted.peak_bytes.allocated == pytest.approx(expected, rel=0.001)  # the labels' own copy


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
def test_a_larger_batch_and_adapters_are_predicted(tmp_path, capsys):
    peaks = []
    adapted = get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for model, batch in ((gpt2(), 4), (gpt2(), 16), (adapted, 4)):
        callback = BrimCallback()
        trained(tmp_path, model, callback, per_device_train_batch_size=batch)
        assert callback.predicted is not None
        peaks.append(callback.predicted.peak_bytes.allocated)
    assert peaks[2] < peaks[0] < peaks[1]
    assert len(lines(capsys)) == 3


def test_a_step_in_bf16_is_predicted(tmp_path, capsys):
    callback = BrimCallback()
    trained(tmp_path, gpt2(), callback, bf16=True)
    assert callback.predicted is not None, lines(capsys)


class Peculiar(GPT2LMHeadModel):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
        if isinstance(input_ids, FakeTensor):
            raise RuntimeError("It needs values.")
        return super().forward(input_ids=input_ids, labels=labels, **more)


def test_a_step_that_cannot_be_predicted_is_trained(tmp_path, capsys):
    callback = BrimCallback()
    set_seed(12)
    assert len(trained(tmp_path, Peculiar(GPT2Config(vocab_size=512, **SIZES, **ENDS)), callback)) == 2
    assert callback.predicted is None
    (line,) = lines(capsys)
    assert line == "brim: the memory of a step is not predicted: RuntimeError: It needs values"


PROGRAM = """
import sys, tempfile, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from brim.integrations.transformers import BrimCallback

class Large(GPT2LMHeadModel):
    def forward(self, input_ids, labels, **more):
        if not isinstance(input_ids, torch._subclasses.FakeTensor):
            raise {"memory": torch.OutOfMemoryError, "other": ValueError}[sys.argv[1]](
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which "
                "1.00 GiB is free. Of the allocated memory 21.00 GiB is allocated by PyTorch, and 1.20 GiB is "
                "reserved by PyTorch but unallocated.")
        return super().forward(input_ids=input_ids, labels=labels, **more)

model = Large(GPT2Config(vocab_size=512, n_positions=32, n_embd=64, n_layer=1, n_head=4))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (16, 16))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[BrimCallback()]).train()
"""


@pytest.mark.parametrize(("kind", "explained"), [("memory", True), ("other", False)])
def test_an_out_of_memory_error_is_explained_after_its_traceback(kind, explained, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(path), kind], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    before, _, after = done.stderr.partition("unallocated.\n")
    assert "brim: a step of Large takes " in before and "Traceback" in before
    assert ("by hf-trainer, in the phase: forward: exhausted" in after) == explained, after
    assert ("brim: 1. " in after) == explained
