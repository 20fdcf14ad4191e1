"""The benchmark of link and CPU at once runs, on a pool that plays the device, and says what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "hybrid_gpu.py"

pytestmark = pytest.mark.slow


def test_every_contender_gives_the_same_logits(tmp_path: Path, cache: Path) -> None:
    output = tmp_path / "hybrid.jsonl"
    options = ["--device", "emulated", "--tiny", "--rounds", "1", "--forwards", "2", "--output", str(output)]
    done = subprocess.run([sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    rows = found["rows"]
    assert [name.split()[0] for name in rows] == ["streaming", "cpu", "hybrid", "hybrid", "hybrid"]
    assert all(row["logits"] == rows["streaming"]["logits"] for row in rows.values())
    assert rows["streaming"]["host_bytes"] == rows["cpu"]["link_bytes"] == 0
    for name, row in rows.items():
        assert row["host_bytes"] + row["link_bytes"] == pytest.approx(row["overflow_bytes"])
        assert row["held_bytes"]["vram"] <= found["budget_bytes"], name
    assert found["bound_s"] > 0
    assert "hybrid:" in done.stdout
