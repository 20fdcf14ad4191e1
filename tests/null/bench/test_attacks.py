"""Some of the attacks of ``bench/attacks.py``, a few of each kind: all of them take half an hour."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ATTACKS = Path(__file__).parents[3] / "bench" / "attacks.py"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="attacks are forked, and mounts are theirs alone")
@pytest.mark.parametrize("which", [("--each-kind", "1"), ("--only", "--batch 1e")])
def test_some_attacks_of_every_kind_hold(which: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ATTACKS), *which], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    kinds = {"arguments", "files", "plans", "data", "templates", "sizes", "streams", "signals", "disks", "machines"}
    tried = set(re.findall(r"^\| ([a-z ]+) \| [1-9]\d* \|", done.stdout, re.M)) - {"all"}
    assert tried == ({"sizes"} if which[0] == "--only" else kinds | {"clocks and locales"})
