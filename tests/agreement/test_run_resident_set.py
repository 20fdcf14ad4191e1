"""The resident set of whole programs under ``brim run``: it grows by no more than their budget.

From the first call of the model on, over what was resident then without the model's tensors; each in a process of its
own. The programs are those of ``tests/scripts`` with wider layers, so that what is counted is more than what Python
itself takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brim.units import MIB
from support.launching import SCRIPTS

PROGRAM = Path(__file__).parents[1] / "support" / "resident_set.py"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")
@pytest.mark.parametrize(
    ("name", "narrow", "wide", "ram_mib"),
    [
        ("plain_loop", "368", "1024", 64),
        ("evaluated_first", "368", "1024", 64),
        pytest.param("word_language_model", "160, 4, 512,", "512, 4, 2048,", 100, marks=pytest.mark.slow),
    ],
)
def test_the_resident_set_of_a_program_keeps_to_the_budget(
    name: str, narrow: str, wide: str, ram_mib: int, tmp_path: Path
) -> None:
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert narrow in text
    text = text.replace(narrow, wide)
    script, told = tmp_path / "script.py", tmp_path / "told.json"
    script.write_text(text, encoding="utf-8")
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(script), str(ram_mib * MIB), str(told)],
        capture_output=True,
        text=True,
        env={**os.environ, "BRIM_SCRATCH": scratch, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text(encoding="utf-8"))
    (*_, model) = found["models"]
    assert model["choice"] == "fitted"
    assert 0.4 <= ram_mib * MIB / model["untouched_bytes"]["ram"] <= 0.6
    assert 0 < model["held_bytes"]["ram"] <= found["grown_bytes"] + 16 * MIB
    assert found["grown_bytes"] <= ram_mib * MIB
