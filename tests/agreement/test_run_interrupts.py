"""Ctrl-C while ``brim run`` predicts, plans or fits a model: the program ends as under python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import interrupting
from support.launching import OWN, SCRIPTS, hear_interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="exit by signals")
SCRIPT = str(SCRIPTS / "interrupted.py")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path)
    return {**os.environ, "BRIM_SCRATCH": scratch, "OMP_NUM_THREADS": "1"}


def is_as_under_python(code: int, out: str, err: str) -> None:
    assert code == -signal.SIGINT, err
    assert out == "training\nthe end\n"
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback (most recent call last)") == 1, err
    assert f'File "{SCRIPT}"' in err
    assert OWN not in err, err  # no line of brim's


@pytest.mark.thorough
def test_an_interrupt_at_many_moments_of_the_first_call(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, interrupting.__file__, SCRIPT, str(tmp_path), "5MiB"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=hear_interrupts)
    assert done.returncode == 0, done.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert len(codes) == len(interrupting.MOMENTS)
    for number, (moment, code) in enumerate(zip(interrupting.MOMENTS, codes, strict=True)):
        out, err = ((tmp_path / f"{number}.{kind}").read_text() for kind in ("out", "err"))
        is_as_under_python(code, out, f"{moment}\n{err}")


@pytest.mark.thorough
def test_an_interrupt_while_it_is_made_sure_that_a_model_fits(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "brim", "run", SCRIPT, "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=hear_interrupts)
    is_as_under_python(done.returncode, done.stdout, done.stderr)
