"""``--resume``: bit for bit under every precision, optimizer and schedule, and refused for another training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from brim.cli import main
from brim.errors import ModelError, TransferError, UsageError
from brim.measure.monitor import Usage
from brim.run.checkpoint import contents as checkpoint_contents
from brim.run.checkpoint import reading as checkpoint_reading
from brim.run.checkpoint.manifest import MANIFEST_NAME
from brim.run.checkpoint.reading import latest, steps
from brim.run.checkpoint.record import OutputRecord
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


@pytest.mark.thorough
def test_what_may_change_on_the_way_changes(
    begun: dict[str, Path], tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    """Memory and length are a run's own. The same model elsewhere is the same model."""
    output, moved = shutil.copytree(begun["full"], tmp_path / "run"), shutil.copytree(tiny, tmp_path / "moved")
    found = train(request(moved, text, output, resume=True, steps=5, offload_optimizer="disk", micro_batch=1))
    assert [step for step, _ in course(output)] == [1, 2, 3, 4, 5] and len(found.losses) == 3
    assert found.plan.model == "moved"
    told = "The plan has micro-batches of 1 (before: 2): sums are rounded"
    assert any(note.startswith(told) for note in found.notes)
    changes: dict[str, Any] = {"lr": 1e-4, "clip_norm": 0.5, "batch": 1, "change_settings": True}
    found = train(request(tiny, text, output, resume=True, steps=6, **changes))
    assert len(found.losses) == 4 and "--clip-norm is 0.5 from here on; it was None before." in found.notes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"clip_norm": 0.5}, "--clip-norm differs: that training began without it, not with 0.5"),
        ({"lr": 1e-4}, "--lr differs: that training began with 0.001, not with 0.0001"),
        ({"batch": 1}, "--batch differs: that training began with 2, not with 1"),
        ({"seed": 1}, "--seed differs: that training began with 0, not with 1"),
        ({"warmup": 3}, "--warmup differs: that training began with 0, not with 3"),
        ({"schedule": "cosine"}, "--schedule differs: that training began with constant, not with cosine"),
    ],
)
def test_another_course_than_the_training_began_with_is_refused(
    options: dict[str, Any], says: str, begun: dict[str, Path], tiny: Path, text: Path
) -> None:
    before = files(begun["full"])
    with pytest.raises(UsageError, match=says):
        train(request(tiny, text, begun["full"], resume=True, steps=4, **options))
    assert files(begun["full"]) == before


def test_a_rate_that_falls_with_the_length_keeps_the_length(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    train(request(tiny, text, tmp_path, steps=2, save_every=1, schedule="cosine", clip_norm=1.0))
    with pytest.raises(UsageError, match="--steps differs: that training began with 2, not with 3"):
        train(request(tiny, text, tmp_path, steps=3, schedule="cosine", clip_norm=1.0, resume=True))
    with pytest.raises(UsageError, match=r"--clip-norm differs: that training began with 1\.0, not without"):
        train(request(tiny, text, tmp_path, steps=2, schedule="cosine", resume=True))


def test_another_configuration_is_another_model(
    begun: dict[str, Path], tiny: Path, text: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    for method in ("full", "lora"):
        with pytest.raises(UsageError, match="MODEL differs"):
            train(request(other, text, begun[method], method=method, resume=True, steps=4))


def test_a_finished_training_says_so_and_stays_as_it_is(
    begun: dict[str, Path], tiny: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = shutil.copytree(begun["full"], tmp_path / "run")
    before = {name: data for name, data in files(output).items() if name.startswith(("step-", "model", "config"))}
    command = ["train", str(tiny), "--data", str(text), "--seq", "32", "--batch", "2", "--lr", "1e-3"]
    command += ["--ram", "1GiB", "--device", "cpu", "--output", str(output), "--resume", "--save-every", "1"]
    for steps_asked in (2, 1):
        assert main([*command, "--steps", str(steps_asked)]) == 0
        said = capsys.readouterr()
        assert f"The training is finished: it has done 2 of {steps_asked} steps." in said.err
        assert f"Its model is in {output}." in "".join(said.err.splitlines()) and str(output) in said.out
        after = files(output)
        assert {name: after[name] for name in before} == before


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
    left = tmp_path / ".model-1234.partial"  # as a killed process leaves it
    OutputRecord(tmp_path).begin(left)
    left.mkdir()
    (left / ".model.safetensors.1234.partial").write_bytes(b"half")
    train(request(tiny, text, tmp_path, steps=2, save_every=1, resume=True))
    assert not left.exists()
    assert (tmp_path / "model.safetensors").exists()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resumed_training_removes_nothing_that_brim_did_not_write_there(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    output, safe = tmp_path / "run", tmp_path / "safe"
    train(request(tiny, text, output, steps=2, save_every=1))
    shutil.copytree(output / "step-000001", safe)
    train(request(tiny, text, output, steps=3, save_every=1, resume=True))
    assert steps(output) == [2, 3]  # the first was deleted, as only two are kept
    shutil.copytree(safe, output / "step-000001")  # to last
    shutil.copytree(output / "step-000003", output / "step-000000")
    (output / "step-000002" / "notes.txt").write_text("the best so far")
    for name in (
        "model-best.safetensors", "model_before_rlhf.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "adapter_model.safetensors", "adapter_config.json", "brim.manifest.json",
        ".step-000009.partial/mine", ".model.partial/mine", "step-000008/model.safetensors", "step-000001.old/mine",
    ):  # fmt: skip
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("mine")
    before = {name: data for name, data in files(output).items() if "step-000003" not in name}
    for name in ("metrics.jsonl", "model.safetensors", "brim.output.json"):
        del before[name]
    train(request(tiny, text, output, steps=6, save_every=1, resume=True))
    after = files(output)
    assert {name: after.get(name) for name in before} == before
    assert steps(output) == [0, 1, 2, 3, 5, 6, 8] and latest(output).step == 6


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_model_of_the_users_in_the_output_folder_is_not_written_over(
    name: str, tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    output = tmp_path / "run"
    train(request(tiny, text, output, steps=2, save_every=1))
    moved = shutil.copytree(output, tmp_path / "moved")  # what is the same is brim's, wherever it is
    for path in moved.iterdir():
        os.utime(path, (1, 1))
    assert len(train(request(tiny, text, moved, steps=3, save_every=1, resume=True)).losses) == 1
    (output / name).write_bytes((output / name).read_bytes() + b" ")
    before = files(output)
    with pytest.raises(UsageError, match=f"{name} in it was not written by this training"):
        train(request(tiny, text, output, steps=3, save_every=1, resume=True))
    assert files(output) == before


def test_overwriting_deletes_of_checkpoints_what_their_manifests_list(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    train(request(tiny, text, tmp_path, steps=2, save_every=1))
    (tmp_path / "step-000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-000007").mkdir()
    (tmp_path / "step-000007" / "model.safetensors").write_text("mine")
    (tmp_path / "model-best.safetensors").write_text("mine")
    train(request(tiny, text, tmp_path, steps=1, overwrite=True))
    assert not (tmp_path / "step-000002").exists()
    assert [path.name for path in (tmp_path / "step-000001").iterdir()] == ["notes.txt"]
    assert (tmp_path / "step-000007" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "model-best.safetensors").read_text() == "mine"


def test_a_damaged_checkpoint_that_is_written_again_is_kept_beside(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    train(request(tiny, text, tmp_path, steps=2, save_every=1))
    (tmp_path / "step-000002" / MANIFEST_NAME).write_text("{}")
    with pytest.warns(
        UserWarning, match=r"step-000002 was not written by this training, so it was renamed to step-000002.kept-1"
    ):
        train(request(tiny, text, tmp_path, steps=3, save_every=1, resume=True))
    assert latest(tmp_path).step == 3 and steps(tmp_path) == [1, 2, 3]
    assert (tmp_path / "step-000002.kept-1" / MANIFEST_NAME).read_text() == "{}"


def test_links_in_the_output_folder_are_not_written_through(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    mine, output = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    output.mkdir()
    (output / "metrics.jsonl").symlink_to(mine)
    with pytest.raises(TransferError, match="It is a symbolic link, which is not followed"):
        train(request(tiny, text, output, steps=1))
    assert mine.read_text() == "mine"
    (output / "metrics.jsonl").unlink()
    for name in (".metrics.jsonl.partial", ".brim.output.json.partial"):
        (output / name).symlink_to(mine)
    train(request(tiny, text, output, steps=1, save_every=1))
    assert mine.read_text() == "mine" and not mine.is_symlink()


def trained(*options: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, answer and other words of ``brim train`` in a process of its own, whose memory is its own too."""
    command = [sys.executable, "-P", "-m", "brim", "train", *map(str, options), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.thorough
def test_a_resumed_training_stays_below_its_promise_as_the_first_did(text: Path, tmp_path: Path) -> None:
    """No heap was kept before it began, so none is watched up to the promise."""
    model = save_llama(tmp_path / "llama", hidden=512, layers=6)
    options = [model, "--data", text, "--output", tmp_path / "run", "--ram", "240MiB", "--seq", 64, "--batch", 2]
    options += ["--save-every", 1, "--device", "cpu", "--steps"]
    for more in ([2], [4, "--resume"]):
        code, answer, said = trained(*options, *more)
        assert code == 0 and "exceeded" not in answer, said
        assert answer["measured_bytes"]["ram"] <= answer["promised_bytes"]["ram"] <= 240 << 20


def test_what_is_measured_above_its_budget_is_told_and_in_the_exit_code(
    tiny: Path, text: Path, tmp_path: Path, quick_trainings: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Usage, "ram_growth_bytes", property(lambda usage: 2 << 30))
    command = ["train", str(tiny), "--data", str(text), "--seq", "32", "--batch", "2", "--steps", "1"]
    command += ["--ram", "1GiB", "--device", "cpu", "--output", str(tmp_path / "run")]
    assert main(command) == 3
    assert "2 GiB of RAM were measured: 1 GiB above the budget of 1 GiB." in capsys.readouterr().err
    assert main([*command, "--overwrite", "--json"]) == 3
    said = capsys.readouterr()
    assert "1 GiB above the budget" in said.err
    assert json.loads(said.out)["exceeded"] == ["2 GiB of RAM were measured: 1 GiB above the budget of 1 GiB."]


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_a_training_in_half_precision_stays_below_its_promise(
    precision: str, tiny: Path, text: Path, tmp_path: Path
) -> None:
    """The libraries make code for products of each shape in such a type when they first come."""
    options = [tiny, "--data", text, "--output", tmp_path / "run", "--ram", "1GiB", "--seq", 32, "--batch", 2]
    code, answer, said = trained(*options, "--device", "cpu", "--steps", 2, "--precision", precision)
    assert code == 0 and answer["measured_bytes"]["ram"] <= answer["promised_bytes"]["ram"], said
