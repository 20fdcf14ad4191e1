"""``--resume``: bit for bit under every precision, optimizer and schedule, and refused for another training."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from brim.cli import main
from brim.errors import ModelError, TransferError, UsageError
from brim.run.checkpoint import contents as checkpoint_contents
from brim.run.checkpoint import reading as checkpoint_reading
from brim.run.checkpoint.reading import latest, steps
from brim.run.train.loop import train
from support.tiny_model import held, save_llama
from support.trainings import course, request, same_weights

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"precision": "bf16-mixed"},
    "fp16-mixed": {"precision": "fp16-mixed", "clip_norm": 0.5},
    "bf16": {"precision": "bf16", "lr": 1e-2},
    "bf16-stochastic": {"precision": "bf16-stochastic", "lr": 1e-2},
    "bf16-master": {"precision": "bf16-master"},
    "sgd": {"optimizer": "sgd"},
    "sgd-momentum": {"optimizer": "sgd-momentum"},
    "adam": {"optimizer": "adam"},
    "adagrad": {"optimizer": "adagrad"},
    "rmsprop": {"optimizer": "rmsprop"},
    "lion": {"optimizer": "lion"},
    "adafactor": {"optimizer": "adafactor"},
    "lion on disk": {"optimizer": "lion", "offload_optimizer": "disk"},
    "adafactor on disk": {"optimizer": "adafactor", "offload_optimizer": "disk"},
    "clipped, on disk": {"clip_norm": 0.1, "offload_optimizer": "disk"},
    "cosine and warm-up": {"schedule": "cosine", "warmup": 2},
    "an adapter in halves": {"method": "lora", "precision": "bf16-mixed"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_training_is_the_one_that_was_not_interrupted(
    name: str, tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None
) -> None:
    """It is interrupted by an error after a step, as schedules need the number of steps from the start."""

    class Interrupted(Exception):
        pass

    def on_step(report: Any) -> None:
        if report.step == 3:
            raise Interrupted

    options = {"steps": 4, "save_every": 2, **SETTINGS[name]}
    whole = train(request(tiny, text, tmp_path / "whole", **options))
    with pytest.raises(Interrupted):
        train(request(tiny, text, tmp_path / "parts", **options), on_step=on_step)
    rest = train(request(tiny, text, tmp_path / "parts", resume=True, **options))
    assert rest.losses == whole.losses[2:]
    assert course(tmp_path / "parts") == course(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")
    states = [load_file(latest(tmp_path / run).folder / "optimizer.safetensors") for run in ("parts", "whole")] if (
        latest(tmp_path / "whole").layout("optimizer")
    ) else [{}, {}]  # fmt: skip
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


@pytest.fixture(scope="module")
def begun(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training that is to go on, by method."""
    made = {}
    for method in ("full", "lora"):
        made[method] = tmp_path_factory.mktemp("begun") / method
        train(request(tiny, text, made[method], steps=2, save_every=1, method=method))
    return made


@pytest.mark.parametrize(
    ("method", "options", "word"),
    [
        ("full", {"method": "lora"}, "--method differs: that training began with full, not with lora"),
        ("lora", {"method": "full"}, "--method differs"),
        ("full", {"optimizer": "sgd"}, "--optimizer differs: that training began with adamw, not with sgd"),
        ("full", {"optimizer": "sgd", "offload_optimizer": "disk"}, "--optimizer differs"),
        ("full", {"precision": "bf16-mixed"}, "--precision differs"),
        ("full", {"seq": 16}, "--seq"),
        ("lora", {"seq": 16}, "--seq"),
    ],
)
def test_another_setting_than_the_training_began_with_is_refused(
    method: str, options: dict[str, Any], word: str, begun: dict[str, Path], tiny: Path, text: Path
) -> None:
    before = sorted(begun[method].rglob("*"))
    with pytest.raises(UsageError, match=word):
        train(request(tiny, text, begun[method], **{"method": method, "resume": True, "steps": 4, **options}))
    assert sorted(begun[method].rglob("*")) == before
    assert held()["threads"] == []


@pytest.mark.parametrize("method", ["full", "lora"])
def test_another_model_or_other_data_is_refused(
    method: str, begun: dict[str, Path], tiny: Path, text: Path, tmp_path: Path
) -> None:
    tuned = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(1e-3)
    tuned.save_pretrained(tmp_path / "tuned")
    for file in tiny.glob("*token*"):
        (tmp_path / "tuned" / file.name).write_bytes(file.read_bytes())
    options: dict[str, Any] = {"method": method, "resume": True, "steps": 4}
    for other in (tmp_path / "tuned", save_llama(tmp_path / "wider", hidden=32, layers=2)):
        with pytest.raises(UsageError, match="MODEL differs"):
            train(request(other, text, begun[method], **options))
    (tmp_path / "other.txt").write_text(text.read_text()[1:])
    with pytest.raises(UsageError, match="The data"):
        train(request(tiny, tmp_path / "other.txt", begun[method], **options))


def test_a_checkpoint_that_does_not_say_how_its_training_began_is_one_error(
    begun: dict[str, Path],
    tiny: Path,
    text: Path,
    tmp_path: Path,
    quick_trainings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions before this one did not write it."""
    read = checkpoint_reading.read_manifest

    def older(folder: Path) -> Any:
        manifest = read(folder)
        return replace(manifest, state={key: value for key, value in manifest.state.items() if key != "course"})

    monkeypatch.setattr(checkpoint_reading, "read_manifest", older)
    with pytest.raises(ModelError, match="does not record the model and settings"):
        train(request(tiny, text, shutil.copytree(begun["full"], tmp_path / "run"), resume=True, steps=4))


def test_what_may_change_on_the_way_changes(
    begun: dict[str, Path], tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    """Memory, rate and length are a run's own. The same model elsewhere is the same model."""
    output, moved = shutil.copytree(begun["full"], tmp_path / "run"), shutil.copytree(tiny, tmp_path / "moved")
    found = train(request(moved, text, output, resume=True, steps=5, lr=1e-4, offload_optimizer="disk", batch=1))
    assert [step for step, _ in course(output)] == [1, 2, 3, 4, 5] and len(found.losses) == 3
    assert found.plan.model == "moved"
    assert train(request(tiny, text, output, resume=True, steps=2)).losses == []  # it is done already


def test_when_every_checkpoint_is_damaged_it_says_so_and_when_there_is_none_it_begins(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    whole = train(request(tiny, text, tmp_path, steps=2, save_every=1, resume=True))
    assert len(whole.losses) == 2
    for step in steps(tmp_path):
        (tmp_path / f"step-{step:06d}" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="step-000002 is skipped"):
        train(request(tiny, text, tmp_path, steps=3, resume=True))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["step", "save"])
def test_a_signal_during_a_step_or_a_save_ends_it_cleanly(
    number: signal.Signals, place: str, tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The signal itself, sent to this process in the middle of what it does."""
    command = ["train", str(tiny), "--data", str(text), "--seq", "32", "--batch", "2", "--steps", "4", "--lr", "1e-3"]
    command += ["--ram", "1GiB", "--device", "cpu", "--save-every", "1", "--offload-optimizer", "disk", "--output"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    before = held(scratch)
    owner, name = (torch.nn.functional, "cross_entropy") if place == "step" else (checkpoint_contents, "copy")
    output = tmp_path / "run"

    class Signalled:
        """Stands in for what is about to be called, and lets it go on after the signal."""

        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, attribute: str) -> Any:  # ``copy`` is a module
            self.signal()
            return getattr(self.real, attribute)

        def __call__(self, *args: Any, **options: Any) -> Any:
            self.signal()
            return self.real(*args, **options)

        def signal(self) -> None:
            if len(steps(output)) == 1:
                os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Signalled(getattr(owner, name)))
        capsys.readouterr()
        code = main([*command, str(output)])
    assert code == 128 + number
    assert capsys.readouterr().err.strip().splitlines()[-1] in ("Interrupted.", "Terminated.")
    assert held(scratch) == before
    assert latest(output).step == 1
    assert main([*command, str(output), "--resume"]) == 0
    assert course(output) == course(tmp_path / "whole") and same_weights(output, tmp_path / "whole")


def test_no_room_for_the_model_at_the_end_is_one_error_and_resuming_writes_it(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(TransferError, match="the checkpoints are intact"):
        patch.setattr(Path, "write_bytes", refuse)
        train(request(tiny, text, tmp_path, steps=2, save_every=1))
    left = tmp_path / ".model.partial"  # as a killed process leaves it
    left.mkdir()
    (left / ".model.safetensors.1234.partial").write_bytes(b"half")
    train(request(tiny, text, tmp_path, steps=2, save_every=1, resume=True))
    assert not left.exists()
    assert (tmp_path / "model.safetensors").exists()
