"""The benchmark scripts as a user runs them, at a size that takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the counters come from /proc")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``--bound --tiny`` was run, with its checkpoint and result."""
    folder = tmp_path_factory.mktemp("bench")
    command = ["streaming.py", "--tiny", "--bound", "--rounds", "1", "--threads", "1", "--steady", "1"]
    _run([*command, "--directory", str(folder), "--output", str(folder / "result.json")])
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_the_bound_is_measured_and_written_as_json(folder: Path) -> None:
    document = json.loads((folder / "result.json").read_text())
    assert document["bound"]["compute_s"] > 0
    assert document["bound"]["read_bytes_per_s"] > 0
    assert document["contenders"]["resident"]["logits_equal"]


def test_transformers_opens_the_checkpoint_without_a_missing_weight(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder / "llama-tiny", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    document = json.loads((folder / "result.json").read_text())
    assert document["settings"]["weights_bytes"] == sum(p.numel() * 4 for p in model.parameters())


def test_the_gpu_benchmark_runs_its_reference_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    output = tmp_path / "runs.jsonl"
    command = ["streaming_gpu.py", "--device", "cpu", "--tiny", "--rounds", "1", "--workloads", "decode"]
    _run([*command, "--only", "gpu_accelerate", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert rows["decode/gpu_accelerate"]["logits_equal"]
    assert rows["decode/gpu_accelerate"]["forward_s"]["median"] > 0
