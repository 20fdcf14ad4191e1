"""Machines that are not Linux: what predicts and explains works there, and the rest says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brim.core import Timeline
from brim.core.hardware import RAM
from brim.errors import UnsupportedError
from brim.memory import direct_io
from brim.memory.pool import HostSource, Pool
from brim.memory.recorder import Recorder
from brim.memory.tiers import Memory

PROGRAM = Path(__file__).parents[1] / "support" / "without_posix.py"


@pytest.mark.thorough
def test_commands_that_predict_and_explain_work_without_posix(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "brim.fit: Cannot move a model" in done.stdout and "preadv" in done.stdout


def test_a_runtime_says_what_the_system_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    recorder = Recorder(Timeline("run", measured=True))
    pool = Pool(RAM, 1 << 20, HostSource(), recorder)
    with pytest.raises(UnsupportedError, match=r"no preadv\(2\) in Python"):
        Memory(compute=pool, host=None, recorder=recorder)


def test_macos_flushes_and_forgets_as_far_as_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.delattr(os, "posix_fadvise")
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x")
        file.flush()
        direct_io.flush(file.fileno())
        direct_io.drop_cached(file.fileno())
