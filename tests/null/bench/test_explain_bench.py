"""``bench/explain.py`` as a user runs it, at a size that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux counts it"),
]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH / "explain.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_contender_reads_the_same_files(tmp_path):
    output = tmp_path / "rows.jsonl"
    done = run("--tiny", "--json", str(output), "--directory", str(tmp_path))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {(row["contender"], row["input"]) for row in rows} >= {
        ("brim explain", "pickle"),
        ("brim explain --html", "pickle"),
        ("_memory_viz trace_plot", "pickle"),
        ("_memory_viz segment_plot", "pickle"),
        ("brim explain", "json"),
    }
    for row in rows:
        assert not row["failed"], row
        assert row["wall_s"] > 0
        assert row["peak_rss_bytes"] > 0
        assert row["output_bytes"] > 0
        assert row["contender"] in done
    again = run("--tiny", "--json", str(output), "--directory", str(tmp_path))
    assert [json.loads(line) for line in output.read_text().splitlines()] == rows, "what is known is not measured"
    assert again.partition("all rows:")[2] == done.partition("all rows:")[2]
