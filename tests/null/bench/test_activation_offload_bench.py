"""The activation offload benchmark as a user runs it, at a size that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the counters come from /proc")]


def test_it_prints_a_table_and_writes_what_it_saw(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = ["activation_offload.py", "--tiny", "--rounds", "1", "--threads", "1", "--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(BENCH / command[0]), *command[1:], "--output", str(output)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text())
    for shape in document["shapes"]:
        assert shape["gradients_equal_plain"]
        assert shape["moved_bytes"] > 1 << 20
        assert set(shape["contenders"]) == {"plain", "brim", "save_on_cpu", "disk hooks"}
        assert shape["name"] in done.stdout
    assert sorted(tmp_path.iterdir()) == [output]
