"""Where there is no terminal, a log has a line every ten seconds of what is being done."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from brim.cli import main
from brim.cli.console import EVERY, Console
from brim.cli.process import standard_streams
from brim.errors import UsageError
from brim.processes import python_command
from support.terminal import on_terminal
from support.tiny_model import save_llama


def test_a_log_says_what_is_being_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(EVERY, "0.2")
    with Console(stderr=True).status("planning") as status:
        time.sleep(0.5)
        status.update("loading [weights]")
        time.sleep(0.4)
    told = capsys.readouterr().err
    assert re.search(r"^planning, \d+ ms$", told, re.MULTILINE)
    assert re.search(r"^loading \[weights\], \d+ ms$", told, re.MULTILINE)
    assert 2 <= len(told.splitlines()) <= 4
    time.sleep(0.1)
    assert not [thread for thread in threading.enumerate() if thread.name == "brim-log"]


def test_a_log_has_some_of_many_lines_and_what_is_quick_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Console(stderr=True).status("planning") as status:
        status.line("step 1")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(EVERY, "0.2")
    with Console(stderr=True).status("planning") as status:
        for step in range(100):
            status.line(f"step {step}")
            time.sleep(0.01)
    told = capsys.readouterr().err.splitlines()
    assert 2 <= len(told) <= 8 and all(line.startswith("step ") for line in told)


def test_a_status_draws_on_a_terminal_and_shows_no_escape_as_text() -> None:
    def planning() -> None:
        with standard_streams(), Console(stderr=True).status("planning"):
            time.sleep(0.3)

    _, shown = on_terminal(["--version"], planning)
    assert b"\x1b[2K" in shown and b"planning" in shown
    assert b"u001b" not in shown


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), hidden=64, layers=1)


def training(llama: Path, folder: Path, steps: int) -> list[str]:
    (folder / "text.txt").write_text("some text to learn, and no more. " * 40)
    words = ["train", llama, "--data", folder / "text.txt", "--output", folder / "out", "--seq", 8, "--batch", 1]
    return [*map(str, words), "--steps", str(steps)]


@pytest.mark.thorough
def test_a_training_in_a_log_and_on_a_terminal(
    llama: Path,
    tmp_path: Path,
    probed_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "terminal").mkdir()
    _, shown = on_terminal(training(llama, tmp_path / "terminal", 3))
    assert all(f"step {step}/3" in shown.decode() for step in (1, 2, 3))
    monkeypatch.setenv(EVERY, "0.05")
    main(training(llama, tmp_path, 60))  # what is measured in the process of all tests may be above the promise
    assert len(re.findall(r"^step \d+/60 ", capsys.readouterr().err, re.MULTILINE)) > 1


@pytest.mark.thorough
def test_a_log_has_its_lines_and_tokens_while_it_runs(llama: Path, tmp_path: Path, probed_home: Path) -> None:
    """As under nohup or Slurm: both streams are one file."""
    log = tmp_path / "log"
    words = ["generate", llama, "--prompt", "a", "--max-new-tokens", "3000", "--no-chat"]
    with log.open("w") as file:
        child = subprocess.Popen(
            python_command("-m", "brim", *words),
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", EVERY: "0.1"},
        )
    sizes = set()
    while child.poll() is None:
        sizes.add(log.stat().st_size)
        time.sleep(0.02)
    assert child.returncode == 0, log.read_text(errors="replace")
    assert len(sizes) > 10
    assert re.search(r"^Loading PyTorch, \d", log.read_text(errors="replace"), re.MULTILINE)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1e300"])
def test_what_is_no_number_of_seconds_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVERY, value)
    with pytest.raises(UsageError, match="not a number of seconds"):
        Console().status("planning")
