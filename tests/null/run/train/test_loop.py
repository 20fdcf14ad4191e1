"""``train`` with every optimizer and precision, and what it says of itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import brim
from brim.errors import UnsupportedError, UsageError
from brim.memory.pool import Pool
from brim.run.train.loop import Request, Training, train
from brim.run.train.report import StepReport
from brim.techniques import optimizers
from support.tiny_model import save_llama, save_tokenizer
from support.trainings import quick_trainings

__all__ = ["quick_trainings"]

SEQ, BATCH, MIB = 32, 2, 1 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=192, layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{number} little pieces of text, one after another. " for number in range(60)))
    return path


def run(llama: Path, data: Path, output: Path, **options: Any) -> Training:
    settings = {"batch": BATCH, "seq": SEQ, "steps": 3, "lr": 1e-3, "ram": "4GiB", "device": "cpu"}
    return train(Request(model=llama, data=data, output=output, **{**settings, **options}))


def test_memory_that_the_heap_held_free_before_is_not_counted(
    llama: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    run(llama, text, tmp_path / "first", steps=1)  # libraries' code is loaded
    blocks = [b"x" * (16 << 10) for _ in range(4096)]
    del blocks[:-1]  # the last one keeps the heap from shrinking
    result = run(llama, text, tmp_path / "second", steps=1)
    assert result.measured_bytes["ram"] < result.promised_bytes["ram"] < 64 * MIB


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_base_is_in_the_precision_that_was_asked_for(
    precision: str, dtype: torch.dtype, text: Path, tmp_path: Path
) -> None:
    half = save_llama(tmp_path / "half", hidden=64, layers=2, dtype=torch.float16)
    cast = AutoModelForCausalLM.from_pretrained(half, dtype=dtype)
    cast.save_pretrained(tmp_path / "cast")
    save_tokenizer(tmp_path / "cast")
    ours, plain = (
        run(folder, text, tmp_path / f"trained {folder.name}", method="lora", precision=precision)
        for folder in (half, tmp_path / "cast")
    )
    assert ours.losses == plain.losses
    assert ours.measured_bytes["ram"] <= ours.promised_bytes["ram"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "offload"),
    [("adafactor", None), ("adafactor", "disk"), ("lion", "disk"), ("sgd", None), ("sgd-momentum", "disk")],
)
def test_an_optimizer_that_takes_less_learns_and_is_counted(
    name: str, offload: Any, llama: Path, text: Path, tmp_path: Path
) -> None:
    result = run(llama, text, tmp_path, optimizer=name, offload_optimizer=offload, lr=0.1 if "sgd" in name else 1e-3)
    assert len(result.losses) == 3
    assert result.losses[-1] < result.losses[0]
    if offload == "disk":
        parameters = _parameters(tmp_path)
        counters = 4 * len(parameters) * (name == "adafactor")  # single numbers stay in memory
        states = optimizers.state_bytes(name, parameters) - counters
        assert states <= result.measured_bytes["disk"] <= states + 4096 * 3 * len(parameters)  # pages
        assert result.measured_bytes["disk"] == result.promised_bytes["disk"]


def _parameters(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler uses what PyTorch deprecates
def test_adamw_of_8_bits(llama: Path, text: Path, tmp_path: Path) -> None:
    result = run(llama, text, tmp_path, optimizer="adamw8bit")
    assert result.losses[-1] < result.losses[0]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_adamw_of_8_bits_names_what_is_missing(llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Install torchao"):
        run(llama, text, tmp_path, optimizer="adamw8bit")


@pytest.fixture(scope="module")
def losses(llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """In plain float32."""
    return run(llama, text, tmp_path_factory.mktemp("plain")).losses


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-stochastic", "bf16-master"])
def test_a_precision_trains_as_float32_does_but_for_its_rounding(
    precision: str, losses: list[float], llama: Path, text: Path, tmp_path: Path
) -> None:
    result = run(llama, text, tmp_path, precision=precision)
    assert result.losses == pytest.approx(losses, rel=0.02)
    assert result.losses != losses
    assert result.plan.choices("precision")[""] == precision
    saved = {value.dtype for value in _parameters(tmp_path)}
    assert saved == {torch.float32 if "mixed" in precision else torch.bfloat16}


def test_fp8_is_refused_where_the_device_has_none(llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="fp8"):
        run(llama, text, tmp_path, precision="fp8")


def test_examples_that_were_cut_are_counted(llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "lines.jsonl"
    lines = ["short", "a rather long line " * 10, "another rather long line " * 10]
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    with pytest.warns(UserWarning, match="is cut to 32"):
        result = run(llama, data, tmp_path / "out", batch=3, steps=1)
    assert result.truncated == result.to_json()["truncated"] == 2


def test_traffic_and_the_gpu_are_on_the_line_of_a_step() -> None:
    report = StepReport(
        step=1, steps=2, loss=1.0, lr=0.1, tokens=10, step_s=1.0, peak_bytes={"vram": MIB},
        moved_bytes={"ram->vram": 3 * MIB, "ram->disk": 0}, gpu_use=0.875,
    )  # fmt: skip
    assert "ram->vram 3 MiB" in report.line() and "ram->disk" not in report.line()
    assert "GPU 88%" in report.line()
    assert report.to_json()["gpu_use"] == 0.875


@pytest.mark.thorough
@pytest.mark.parametrize("save_every", [None, 2], ids=["from the beginning", "from the last checkpoint"])
def test_memory_that_runs_out_in_the_middle_of_an_update_changes_no_bit(
    save_every: int | None, llama: Path, text: Path, tmp_path: Path, quick_trainings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Blocks that backward has updated cannot be taken back: it goes on from what was saved, to the same end."""
    options: dict[str, Any] = {"offload_optimizer": "disk", "micro_batch": 1, "save_every": save_every, "steps": 4}
    wanted = run(llama, text, tmp_path / "whole", **options)

    from brim.techniques.optimizer_offload.technique import OptimizerOffload

    update, calls, broken = OptimizerOffload._update, [0], []

    def failing(self: OptimizerOffload, index: int, *args: Any, **kwargs: Any) -> None:
        calls[0] += not self.memory.fake
        if not self.memory.fake and calls[0] == 3 * len(self.blocks) + 3:  # in the fourth step
            broken.append(self.partly_updated)
            monkeypatch.setattr(Pool, "_enter", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            try:
                self.memory.ram.allocate(1, "anything")
            finally:
                monkeypatch.setattr(Pool, "_enter", enter)
        update(self, index, *args, **kwargs)

    enter = Pool._enter
    monkeypatch.setattr(OptimizerOffload, "_update", failing)
    found = run(llama, text, tmp_path / "broken", **options)
    assert broken == [True]
    assert found.losses == wanted.losses
    assert len(found.notes) == 1 and "memory ran out" in found.notes[0]
    assert ("after the last checkpoint" in found.notes[0]) == (save_every is not None), found.notes
    assert ("from the beginning" in found.notes[0]) == (save_every is None), found.notes
    ours, theirs = _parameters(tmp_path / "broken"), _parameters(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_resuming_without_a_checkpoint_says_that_the_training_begins_anew(
    llama: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    for output, resume in (("first", False), ("second", True)):
        notes = run(llama, text, tmp_path / output, steps=1, resume=resume).notes
        assert any("begins anew" in note for note in notes) is resume


@pytest.mark.thorough
def test_more_tokens_than_learned_positions_are_refused_alike(text: Path, tmp_path: Path) -> None:
    """Models with rotary positions take longer sequences than their configuration says; a table has no more rows."""
    sizes = {"vocab_size": 260, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder := tmp_path / "gpt2")
    save_tokenizer(folder)
    calls = (
        lambda seq: brim.estimate(folder, seq=seq),
        lambda seq: brim.plan(folder, task="train", gpu="RTX 3060", seq=seq, top=1),
        lambda seq: run(folder, text, tmp_path / f"out{seq}", steps=1, seq=seq),
    )
    for call in calls:
        call(16)
        with pytest.raises(UsageError, match=r"GPT2LMHeadModel cannot take 17 tokens(.|\n)*wpe has 16 positions"):
            call(17)
