"""The benchmark for a GPU, as small as it goes and without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brim import catalog

SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "on_gpu.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the counters come from /proc")


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(folder), "--directory", str(folder / "weights")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_every_stage_runs_without_a_gpu_and_not_again(tmp_path: Path) -> None:
    out = run(tmp_path, "--limit-s", "450")
    states = {file.stem: json.loads(file.read_text())["state"] for file in tmp_path.glob("*.json")}
    stages = ("checkpoints", "memory", "kernel-classes", "adam", "generation", "decode", "hybrid")
    assert states == dict.fromkeys(stages, "done"), out
    for figure in (
        "kernels, product.flops",
        "adam, brim batch 2",
        "token, resident",
        "load, resident",
        "CPU and GPU at once",
    ):
        assert figure in out
    kernels = [json.loads(line) for line in (tmp_path / "kernel-classes.jsonl").read_text().splitlines()]
    assert {row["kernel"] for row in kernels} == set(catalog.gpu("H200").hardware().shares)
    assert all(row["ratio"] == pytest.approx(row["share"] / row["catalog"]) and row["share"] > 0 for row in kernels)
    row = json.loads((tmp_path / "generation.jsonl").read_text())["rows"]
    assert row["brim resident"]["tokens_equal"] and row["brim budget"]["tokens_equal"]
    again = run(tmp_path)
    assert "after" not in again and "CPU and GPU at once" in again


@pytest.mark.thorough
def test_a_stage_without_time_is_cut_and_runs_later(tmp_path: Path) -> None:
    assert "adam: cut" in run(tmp_path, "--only", "adam", "--limit-s", "4")
    assert "no time left" in run(tmp_path, "--only", "adam", "--limit-s", "2")
    assert json.loads((tmp_path / "adam.json").read_text())["state"] == "cut"
