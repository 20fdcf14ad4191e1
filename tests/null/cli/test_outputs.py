"""What commands write: never onto what they read, nor onto files of another kind, and whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brim.cli import main
from brim.core.files import replacing

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.65 "
    "GiB of which 5.31 MiB is free. Process 1 has 23.64 GiB memory in use. Of the allocated memory 22.75 GiB is "
    "allocated by PyTorch, and 437.05 MiB is reserved by PyTorch but unallocated.\n"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(MESSAGE)
    return path


@pytest.mark.parametrize("way", ["itself", "hard link", "link", "dots"])
def test_a_report_is_not_written_onto_what_is_read(log: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = log.with_name("page.html")
    log.write_text("<!doctype html>\n" + MESSAGE)  # as a page of the log would begin
    if way == "itself":
        page = log
    elif way == "dots":
        (log.parent / "folder").mkdir()
        page = log.parent / "folder" / ".." / log.name
    else:
        (os.link if way == "hard link" else os.symlink)(log, page)
    before = log.read_bytes()
    assert main(["explain", str(log), "--html", str(page)]) == 2
    assert "which is an input" in capsys.readouterr().err
    assert log.read_bytes() == before


def test_a_file_of_another_kind_is_not_a_report(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = log.with_name("snapshot.pickle")
    snapshot.write_bytes(b"\x80\x04}.")
    assert main(["explain", str(log), "--html", str(snapshot)]) == 2
    assert "is there already, and is not" in capsys.readouterr().err
    assert snapshot.read_bytes() == b"\x80\x04}."
    page = log.with_name("page.html")
    for _ in range(2):  # what was written once is written again
        assert main(["explain", str(log), "--html", str(page)]) == 0


@pytest.mark.parametrize("way", ["another kind", "read", "page"])
def test_further_plans_are_results_too(tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, second = tmp_path / "model", tmp_path / "plan.2.json"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    command = ["plan", str(model), "--output", str(tmp_path / "plan.json")]
    if way == "another kind":
        second.write_text("my notes")
        told = "is there already, and is not a JSON document"
    elif way == "read":
        second.symlink_to(model / "config.json")
        told = "which is an input"
    else:
        command += ["--html", str(second)]
        told = "Another result is written there too"
    before = {path: path.read_text() for path in (model / "config.json", second) if path.exists()}
    assert main(command) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_text() for path in (model / "config.json", second) if path.exists()} == before


def test_a_model_is_not_trained_into_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    (tmp_path / "text.txt").write_text("text")
    command = ["train", str(tmp_path), "--data", str(tmp_path / "text.txt"), "--output", str(tmp_path)]
    for more in ([], ["--resume"], ["--overwrite"]):
        assert main([*command, *more]) == 2
        assert "which is an input" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "model.safetensors"


@pytest.mark.parametrize("option", ["--lr", "--clip-norm", "--timeout"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
def test_numbers_are_finite(option: str, value: str, tmp_path: Path) -> None:
    assert main(["train", "model", "--data", "data", "--output", str(tmp_path / "out"), option, value]) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_replaced_is_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path, link, other = (tmp_path / name for name in ("file", "link", "other"))
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    os.link(path, other)
    with pytest.raises(ValueError, match="now"), replacing(link) as made:
        made.write_text("half")
        raise ValueError("now")
    assert path.read_text() == "old"
    with replacing(link) as made:
        made.write_text("new")
    assert (path.read_text(), other.read_text()) == ("new", "old")
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "link", "other"}
