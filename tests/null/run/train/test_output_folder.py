"""The folder of a training: nothing in it is lost, and it is one training's alone."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from brim.errors import ModelError, TransferError, UsageError
from brim.run.checkpoint.record import RECORD_NAME
from brim.run.checkpoint.saver import MODEL, Tensors
from brim.run.train.output_folder import LOCK_FILE, OutputFolder
from support.forked import forked, was_killed
from support.saved_steps import save_now


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(f"the model's {name}")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("made", [True, False])
def test_a_new_or_empty_folder_is_as_it_was_where_nothing_was_written(tmp_path: Path, made: bool) -> None:
    output = tmp_path / "output"
    if made:
        output.mkdir()
    with OutputFolder(output):
        assert [path.name for path in output.iterdir()] == [LOCK_FILE]
    assert output.exists() == made
    assert not made or list(output.iterdir()) == []


@pytest.mark.parametrize("way", ["itself", "link", "dots", "file", "hard link", "link in it"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_read_is_never_written_to(model: Path, tmp_path: Path, way: str, overwrite: bool) -> None:
    output, reads = tmp_path / "output", model
    if way == "itself":
        output = model
    elif way == "link":
        output.symlink_to(model)
    elif way == "dots":
        (tmp_path / "other").mkdir()
        output = tmp_path / "other" / ".." / "model"
    elif way == "file":
        output, reads = model, model / "model.safetensors"
    else:
        output.mkdir()
        make = os.link if way == "hard link" else os.symlink
        make(model / "model.safetensors", output / "weights.safetensors")
    before = content(model)
    with pytest.raises(UsageError, match="which is an input"):
        OutputFolder(output, overwrite=overwrite, reads=[reads])
    assert content(model) == before


def test_another_model_gives_way_only_when_that_is_said(model: Path) -> None:
    before = content(model)
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"not empty: it has config.json, model.safetensors.*\n.*--overwrite"):
            OutputFolder(model, resume=resume)
    assert content(model) == before
    with OutputFolder(model, overwrite=True):
        assert LOCK_FILE in content(model)
    assert content(model) == before


def test_a_training_with_checkpoints_goes_on_or_gives_way(tmp_path: Path) -> None:
    save_now(tmp_path, 1, 10)
    with pytest.raises(UsageError, match="It already has checkpoints of a training"):
        OutputFolder(tmp_path)
    with OutputFolder(tmp_path, resume=True):
        pass
    with OutputFolder(tmp_path, overwrite=True) as output:
        assert (tmp_path / "step-000001").exists()  # until the next one begins
        output.begin()
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_left_that_came_nowhere_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in (".step-000001.partial", ".model.partial", "tensorboard"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    with OutputFolder(tmp_path):
        pass
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UsageError, match="the log of another training: 1 steps"):
        OutputFolder(tmp_path)
    with OutputFolder(tmp_path, resume=True):
        pass


def test_a_second_training_hears_who_has_the_folder_until_that_one_ends(tmp_path: Path) -> None:
    output = tmp_path / "output"
    told = f"Another training writes to it: process {os.getpid()} on "
    with OutputFolder(output), pytest.raises(UsageError, match=told):
        OutputFolder(output, resume=True)
    with OutputFolder(output):
        pass


def test_a_killed_training_has_no_lock(tmp_path: Path) -> None:
    def die() -> None:
        OutputFolder(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(forked(die))
    assert (tmp_path / LOCK_FILE).exists()
    with OutputFolder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe", "folder", "notes"])
def test_no_other_file_becomes_the_lock(tmp_path: Path, kind: str) -> None:
    mine, output = tmp_path / "mine", tmp_path / "output"
    mine.write_text("mine")
    output.mkdir()
    lock = output / LOCK_FILE
    make = {
        "symbolic link": lambda: lock.symlink_to(mine),
        "hard link": lambda: lock.hardlink_to(mine),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "notes": lambda: lock.write_text("mine"),
    }
    make[kind]()
    with pytest.raises(UsageError, match=rf"{LOCK_FILE} in it (cannot be the training's lock|is not a lock)"):
        OutputFolder(output)
    assert os.path.lexists(lock) and mine.read_text() == "mine"


def test_a_file_system_without_locks_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"), OutputFolder(tmp_path):
        assert list(tmp_path.iterdir()) == []


def tensors(value: float, *, fail: type[Exception] | None = None) -> Tensors:
    def values() -> Iterator[tuple[str, torch.Tensor]]:
        if fail is not None:
            raise fail("now")
        yield "weight", torch.full((3,), float(value))

    return Tensors(stem=MODEL, layout=[("weight", torch.float32, (3,))], values=values())


def test_a_model_takes_the_place_of_another_as_a_whole(tmp_path: Path) -> None:
    for name in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_config.json",
        "mine.txt",
    ):
        (tmp_path / name).write_text("old")
    (tmp_path / "config.json").symlink_to(tmp_path / "mine.txt")
    with OutputFolder(tmp_path, overwrite=True) as output:
        for failure in (ModelError, OSError):
            with pytest.raises((ModelError, TransferError)):
                output.export(tensors(1, fail=failure), {"config.json": b"new"})
        assert set(content(tmp_path).values()) - {"old"} == {content(tmp_path)[LOCK_FILE]}
        output.export(tensors(2), {"config.json": b"new"})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.safetensors", "config.json", "mine.txt", RECORD_NAME}
    assert (tmp_path / "mine.txt").read_text() == "old"
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [2, 2, 2]
