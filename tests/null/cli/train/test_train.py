"""``brim train``: the same course as plain PyTorch, whatever happens on the way, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from brim.cli import main
from brim.core import Plan
from brim.errors import BudgetError, ModelError, UsageError
from brim.planning.strategy.step import Fitted
from brim.run.train.loop import train
from support.tiny_model import save_llama
from support.trainings import plain, quick_trainings, request, weights, write_text

__all__ = ["quick_trainings"]

KEYS = {"compute", "losses", "promised_bytes", "measured_bytes", "step_s", "plan", "output", "notes", "truncated"}
KEYS |= {"precision_origin"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


def test_json_is_one_object_with_exactly_what_is_documented(
    llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(llama), "--data", str(text), "--output", str(tmp_path), "--seq", "32", "--batch", "2"]
    assert main([*arguments, "--steps", "2", "--ram", "1GiB", "--device", "cpu", "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert set(document) == KEYS
    assert len(document["losses"]) == 2
    assert Plan.from_json(document["plan"]).task == "train"
    assert set(document["promised_bytes"]) == set(document["measured_bytes"]) == {"ram", "disk"}
    assert document["step_s"] > 0
    assert document["precision_origin"] == "brim train's default on CPUs"
    assert document["output"] == str(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == document["losses"]
    assert {"tokens_per_s", "peak_bytes", "moved_bytes", "written_bytes", "step_s", "lr"} <= set(lines[0])


@pytest.mark.parametrize("option", ["--batch", "--seq"])
def test_a_step_whose_tokens_alone_are_too_many_is_refused(
    llama: Path, text: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(llama), "--data", str(text), "--output", str(tmp_path / "out"), "--seq", "32"]
    assert main([*arguments, option, str(10**9), "--ram", "1GiB", "--device", "cpu"]) not in (0, None)
    told = capsys.readouterr().err
    assert (
        f"{option} 1000000000" in told
        and "with 1 GiB of RAM" in told
        and "Give a larger --ram, or a smaller --batch or --seq" in told
    )
    assert "Traceback" not in told


@pytest.mark.thorough
@pytest.mark.parametrize(
    "orders",
    [
        {},
        {"checkpointing": "full"},
        {"checkpointing": "selective", "offload_optimizer": "disk"},
        {"offload_activations": 2, "checkpointing": "none"},
    ],
    ids=["resident", "full checkpointing", "selective, states on disk", "activations offloaded"],
)
def test_losses_and_weights_are_those_of_plain_pytorch(
    orders: dict[str, Any], llama: Path, text: Path, tmp_path: Path
) -> None:
    losses, parameters = plain(llama, text, 3)
    result = train(request(llama, text, tmp_path, **orders))
    assert result.losses == losses
    assert result.notes == []
    trained = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


def test_micro_batches_have_the_losses_of_the_whole_batch(llama: Path, text: Path, tmp_path: Path) -> None:
    losses, _ = plain(llama, text, 3)
    result = train(request(llama, text, tmp_path, micro_batch=1))
    assert Plan.from_json(result.plan.to_json()).settings["micro_batch"] == 1
    assert result.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own, of transformers
def test_a_lora_adapter_is_read_by_peft(llama: Path, text: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    result = train(request(llama, text, tmp_path, method="lora", lr=0.02))
    assert result.losses[-1] < result.losses[0]
    base = AutoModelForCausalLM.from_pretrained(llama)
    tuned = PeftModel.from_pretrained(base, str(tmp_path))
    moved = [p for name, p in tuned.named_parameters() if "lora_B" in name]
    assert moved and all(p.abs().sum() > 0 for p in moved)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"method": "lora"}, {"offload_optimizer": "disk"}])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    options: dict[str, Any], llama: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    whole = train(request(llama, text, tmp_path / "whole", steps=4, save_every=2, **options))
    first = train(request(llama, text, tmp_path / "parts", steps=2, save_every=2, **options))
    rest = train(request(llama, text, tmp_path / "parts", steps=4, save_every=2, resume=True, **options))
    assert first.losses + rest.losses == whole.losses
    name = "adapter_model.safetensors" if options.get("method") == "lora" else "model.safetensors"
    found, wanted = load_file(tmp_path / "parts" / name), load_file(tmp_path / "whole" / name)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_a_damaged_newest_checkpoint_is_passed_over_told_of_and_written_again(
    llama: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    whole = train(request(llama, text, tmp_path / "whole", steps=4))
    output = tmp_path / "out"
    train(request(llama, text, output, steps=2, save_every=1))
    damaged = output / "step-000002" / "model.safetensors"
    raw = bytearray(damaged.read_bytes())
    raw[-100] ^= 2
    damaged.write_bytes(raw)
    resumed = train(request(llama, text, output, steps=4, save_every=1, resume=True))
    assert resumed.losses == whole.losses[1:]  # from the first checkpoint on
    assert any("step-000002 is skipped" in note for note in resumed.notes)
    found, wanted = weights(output), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (output / "tokenizer.json").exists() and (output / "step-000004" / "tokenizer.json").exists()


def test_checkpoints_are_not_overwritten_by_another_training(llama: Path, text: Path, tmp_path: Path) -> None:
    train(request(llama, text, tmp_path, steps=2, save_every=1))
    with pytest.raises(UsageError, match="--resume"):
        train(request(llama, text, tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError(), BudgetError("a pool is full")])
def test_a_step_that_runs_out_of_memory_is_repeated_one_rung_down(
    error: Exception, llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, parameters = plain(llama, text, 3)
    step, calls = Fitted.step, []

    def failing(self: Fitted, *args: Any, **options: Any) -> torch.Tensor:
        if self.memory.fake:  # a prediction
            return step(self, *args, **options)
        calls.append(self.plan)
        if len(calls) == 2:
            torch.rand(3)  # a part of the step has been done
            raise error
        return step(self, *args, **options)

    monkeypatch.setattr(Fitted, "step", failing)
    notes: list[str] = []
    result = train(request(llama, text, tmp_path, micro_batch=2), on_note=notes.append)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert len(calls) == 4
    assert calls[1] == calls[0] != calls[2] == calls[3]
    assert len(notes) == 1 and "step 2: memory ran out" in notes[0] and "the same step" in notes[0]
    assert result.notes == notes
    for name, value in weights(tmp_path).items():
        assert torch.allclose(value, parameters[name], rtol=1e-4, atol=1e-6), name


def test_a_loss_that_is_no_number_names_the_step(llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Cannot train step [23].\nIts loss is nan"):
        train(request(llama, text, tmp_path, lr=1e30, steps=5))


@pytest.mark.thorough
def test_a_budget_that_is_too_small_says_what_would_do(llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        train(request(llama, text, tmp_path, ram=8 * MIB, micro_batch=1, checkpointing="full", stream_weights=False))
    assert caught.value.smallest_bytes["ram"] > 8 * MIB


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"steps": 1, "epochs": 1}, "--epochs"),
        ({"micro_batch": 3}, "micro-batch"),
        ({"optimizer": "adamx"}, "adamx"),
        ({"precision": "fp31"}, "fp31"),
        ({"offload_activations": 99}, "99 blocks"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: dict[str, Any], word: str, llama: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=word):
        train(request(llama, text, tmp_path, **options))
