# Programs do it in all ways.
# ruff: noqa: PTH102, PTH103, PTH104, PTH105, PTH107, PTH208, SIM115
"""What a program that is only traced does to files, processes and other machines: nothing."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import brim
from brim.predict.side_effects import SideEffectError, held_back

_true_mkdir, _true_rename = os.mkdir, os.rename  # as a library has them that imported them by name


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is no temporary one, with a file in it."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "home")
    (tmp_path / "home" / "mine.txt").write_text("mine")
    return tmp_path / "home"


@pytest.fixture
def unchanged(home: Path) -> Any:
    yield
    assert {path.name for path in home.iterdir()} == {"mine.txt"}
    assert (home / "mine.txt").read_text() == "mine"
    assert list((home.parent / "temporary").glob("brim-*")) == []


@pytest.mark.usefixtures("unchanged")
def test_a_program_finds_what_it_wrote_and_nobody_else_does(home: Path) -> None:
    with held_back():
        os.makedirs("out/step-1", exist_ok=True)
        Path("out/a.txt").write_text("a")
        with open("mine.txt", "a") as file:
            file.write(" and more")
        with open("out/a.txt", "r+") as file:
            file.write("b")
        (Path("out") / "b.txt").touch()
        os.close(os.open("c.txt", os.O_CREAT | os.O_WRONLY))
        os.replace("out/b.txt", "d.txt")
        assert Path("out/a.txt").read_text() == "b" and Path("mine.txt").read_text() == "mine and more"
        assert sorted(os.listdir()) == ["c.txt", "d.txt", "mine.txt", "out"]
        assert sorted(os.listdir("out")) == ["a.txt", "step-1"]
        assert sorted(path.name for path in home.glob("*.txt")) == ["c.txt", "d.txt", "mine.txt"]
        assert Path("out").is_dir() and not Path("b.txt").exists()
        with pytest.raises(FileExistsError):
            os.mkdir("out")
        with pytest.raises(FileExistsError):
            open("mine.txt", "x")
        with pytest.raises(FileNotFoundError):
            open("nowhere/x", "w")
        with pytest.raises(FileNotFoundError):
            os.remove("nowhere")
        os.chdir("out")
        os.remove("a.txt")
        os.chdir(home)
        shutil.rmtree("out")
        assert not Path("out").exists()
    assert Path.cwd() == home


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("mine.txt", lambda: os.remove("mine.txt")),
    ("mine.txt", lambda: os.rename("mine.txt", "yours.txt")),
    ("mine.txt", lambda: Path("mine.txt").chmod(0o600)),
    ("home", lambda: shutil.rmtree("../home")),
    ("out", lambda: _true_mkdir("out")),
    ("mine.txt", lambda: _true_rename("mine.txt", "yours.txt")),
    ("cannot start a process", lambda: subprocess.run([sys.executable, "-c", ""], check=False)),
    ("os.system", lambda: os.system("true")),
    ("os.fork", os.fork),
    ("127.0.0.1", lambda: socket.create_connection(("127.0.0.1", 9))),
    ("example.org", lambda: socket.getaddrinfo("example.org", 443)),
]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("named", "act"), REFUSED)
def test_what_cannot_be_kept_apart_is_refused(named: str, act: Callable[[], Any]) -> None:
    with held_back(), pytest.raises(SideEffectError, match=named) as refused:
        act()
    assert isinstance(refused.value, OSError) and "A traced program cannot" in str(refused.value)


def test_temporary_files_are_real_and_other_threads_are_let_be(home: Path) -> None:
    with held_back():
        made = tempfile.mkdtemp()
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        other = threading.Thread(target=lambda: Path("yours.txt").write_text("yours"))
        other.start()
        other.join()
        sys.stdout.flush()
        with open(os.devnull, "w") as nothing:
            nothing.write("x")
    assert Path(made).is_dir() and (home / "yours.txt").read_text() == "yours"
    assert open is io.open


@pytest.mark.usefixtures("unchanged")
def test_a_traced_program_saves_by_name_and_nothing_is_written(home: Path) -> None:
    def build() -> Callable[[], None]:
        model = torch.nn.Linear(4, 4, device="cuda")
        os.makedirs("out")

        def step() -> None:
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            torch.save(model.state_dict(), "out/model.tmp")
            os.replace("out/model.tmp", "out/model.pt")

        return step

    brim.trace(build)
