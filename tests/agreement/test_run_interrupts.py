"""Ctrl-C while ``brim run`` predicts, plans or fits a model: the program ends as under python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import brim
import interrupting
from launching import SCRIPTS, hear_interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="exit by signals")
SCRIPT = str(SCRIPTS / "interrupted.py")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path_factory.mktemp("scratch"))
    return {**os.environ, "BRIM_SCRATCH": scratch, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> list[tuple[int, str, str]]:
    """Code, output and errors of a run for each moment."""
    folder = tmp_path_factory.mktemp("moments")
    command = [sys.executable, interrupting.__file__, SCRIPT, str(folder), "5MiB"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=hear_interrupts)
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "codes.json").read_text())
    return [
        (code, (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text())
        for number, code in enumerate(codes)
    ]


def is_as_under_python(code: int, out: str, err: str) -> None:
    assert code == -signal.SIGINT, err
    assert out == "training\nthe end\n"
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback (most recent call last)") == 1, err
    assert f'File "{SCRIPT}"' in err
    assert str(Path(brim.__file__).parent) not in err, err


@pytest.mark.parametrize("number", range(len(interrupting.MOMENTS)))
def test_an_interrupt_during_the_first_call(number: int, ends: list[tuple[int, str, str]]) -> None:
    is_as_under_python(*ends[number])


def test_an_interrupt_while_it_is_made_sure_that_a_model_fits(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "brim", "run", SCRIPT, "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=hear_interrupts)
    is_as_under_python(done.returncode, done.stdout, done.stderr)
