"""The training benchmark as a user runs it, at a size that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the counters come from /proc")]
CONTENDERS = ("train_plain", "train_torchao", "train_brim_fit")  # each run is a process that imports everything


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / script), "--tiny", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One line of JSON of a tiny run with a few contenders."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--rounds", "1", "--steps", "3", "--threads", "1", "--directory", str(folder)]
    done = run(
        "training.py", *options, "--budgets", "1GiB", "--only", *CONTENDERS, "--output", str(folder / "rows.jsonl")
    )
    assert done.returncode == 0, done.stderr
    assert "plain PyTorch" in done.stdout
    found: dict[str, Any] = json.loads((folder / "rows.jsonl").read_text())
    return found


def test_every_contender_trains_the_same_model_to_the_same_parameters(document: dict[str, Any]) -> None:
    ran = {label: row for label, row in document["rows"].items() if "losses" in row}
    assert set(ran) == {"train_plain", "train_brim_fit 1 GiB"}
    for row in ran.values():
        assert len(row["losses"]) == 3 and len(set(row["losses"])) == 3
        assert row["losses_equal"] and row["parameters_equal"]
        assert row["tokens_per_s"]["median"] > 0 and row["peak_growth_bytes"] > 1 << 20


def test_a_contender_that_cannot_run_here_says_why(document: dict[str, Any]) -> None:
    assert "CUDA" in document["rows"]["train_torchao"]["problem"]


def test_brim_is_compared_with_each_peer(document: dict[str, Any]) -> None:
    assert set(document["brim_against"]) == {"train_plain", "train_torchao"}


def test_the_gpu_benchmark_runs_its_logic_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--rounds", "1", "--steps", "2", "--cases", "adam", "--directory", str(tmp_path)]
    done = run("training_gpu.py", *options, "--output", str(output))
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert rows["brim batch 2"]["losses"] == rows["in_vram batch 2"]["losses"]
    assert "torchao" in rows["torchao batch 2"]["problem"]
