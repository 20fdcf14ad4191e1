"""``brim train`` killed at random moments and resumed: the run that nobody killed, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_model import save_llama
from trainings import write_text

SETTINGS = {
    "everything in memory": (18, []),
    "states and activations on disk": (
        18,
        ["--offload-optimizer", "disk", "--offload-activations", "2", "--clip-norm", "1"],
    ),
    "an adapter in halves": (14, ["--method", "lora", "--precision", "fp16-mixed", "--schedule", "cosine"]),
}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In RAM where there is such a file system: thousands of fsyncs on a disk take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_killed_at_random_moments_and_resumed_is_the_run_that_nobody_killed(
    name: str, root: Path, scratch: Path
) -> None:
    kills, options = SETTINGS[name]
    found = killed(root, scratch, kills, options)
    assert len(found["resumed_at"]) >= kills
    assert len(set(found["resumed_at"])) >= 4  # at the beginning, and from several checkpoints
    for end in found["ends"]:
        assert end["whole"] and end["left"] == [], found
        assert end["steps"] == list(range(1, 13)), found
    assert list(scratch.iterdir()) == []


def killed(root: Path, scratch: Path, kills: int, options: list[str]) -> dict[str, Any]:
    model, data = save_llama(root / "llama", hidden=16, layers=2), write_text(root / "text.txt")
    script = Path(__file__).with_name("killed_trainings.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(data), str(root), str(kills), *options],
        capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report
