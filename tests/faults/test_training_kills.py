"""``brim train`` killed at random moments and resumed: the run that nobody killed, bit for bit."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tiny_model import save_llama
from support.trainings import write_text

SETTINGS = {
    "everything in memory": (18, []),
    "states and activations on disk": (
        18,
        ["--offload-optimizer", "disk", "--offload-activations", "2", "--clip-norm", "1"],
    ),
    "four ranks": (3, ["--ranks", "4", "--zero", "3", "--batch", "4", "--timeout", "60"]),
    "an adapter in halves": (14, ["--method", "lora", "--precision", "fp16-mixed", "--schedule", "cosine"]),
}
EVERY_CALL = "write,pwrite,rename,fsync,mmap,allocation"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In RAM where there is such a file system: thousands of fsyncs on a disk take minutes."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_killed_at_random_moments_and_resumed_is_the_run_that_nobody_killed(
    name: str, root: Path, scratch: Path
) -> None:
    kills, options = SETTINGS[name]
    found = killed(root, scratch, kills, options)
    assert len(found["resumed_at"]) >= kills
    assert found["planning"] or name == "four ranks"
    assert len(set(found["resumed_at"])) >= min(4, kills - 1)  # at the beginning, and from several checkpoints
    for end in found["ends"]:
        assert end["whole"] and end["left"] == [], found
        assert end["steps"] == list(range(1, 13)), found
    assert list(scratch.iterdir()) == []


@pytest.mark.thorough
def test_ranks_that_train_into_nothing_stop_at_the_last_good_checkpoint(root: Path) -> None:
    """And what no machine has memory for is refused at once, on all of them by one error."""
    model, data = save_llama(root / "llama", hidden=16, layers=2), write_text(root / "text.txt")
    found = ran("ended_ranks.py", model, data, root)
    assert [found[name]["code"] for name in found] == [0, 2, 2, 0, 3], found
    assert found["saved"]["saved"] == found["spoiled"]["saved"] == found["no number"]["saved"] == [1, 2]
    for name, why in (
        ("spoiled", "too large for the dtype of the weights"),
        ("no number", "Its loss is nan"),
    ):
        told = found[name]["told"]
        assert told.count("Error: ") == 1 and why in told and "--resume continues from step 2" in told
    assert [step for step, _ in found["gone on"]["course"]] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(loss) for _, loss in found["gone on"]["course"])
    told = found["absurd"]["told"]
    assert told.count("Error: ") == 1 and "A step's tokens and labels" in told
    assert all("Traceback" not in one["told"] for one in found.values())


@pytest.mark.thorough
@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_an_interrupt_while_a_checkpoint_is_written_ends_with_130(count: int, root: Path, scratch: Path) -> None:
    model, data = save_llama(root / "llama", hidden=192, layers=4), write_text(root / "text.txt")
    found = ran("interrupted_saves.py", model, data, root, count)
    assert [end["code"] for end in found] == [130] * count, found
    assert all(end["whole"] and end["told"].strip().endswith("Interrupted.") for end in found), found


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("cc") is None, reason="the calls of the C library fail by a library made here")
@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        pytest.param(EVERY_CALL, 2, marks=pytest.mark.timeout(600)),
        pytest.param(EVERY_CALL, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["some", "all"],
)
def test_a_call_of_the_c_library_that_fails_costs_nothing_that_was_saved(
    kinds: str, most: int, root: Path, scratch: Path
) -> None:
    model, data = save_llama(root / "llama", hidden=16, layers=2), write_text(root / "text.txt")
    library = root / "failing.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    found = ran("failed_calls.py", model, data, root, kinds, most, LD_PRELOAD=str(library))
    for kind, ends in found.items():
        assert ends["calls"] > 0 and ends["hung"] == 0 and ends["wrong"] == {}, (kind, ends)
        assert ends["finished"] + ends["refused"] == ends["failed"] >= min(ends["calls"], 2)


@pytest.mark.slow
def test_a_cache_whose_maker_was_killed_is_made_anew(root: Path) -> None:
    pytest.importorskip("bitsandbytes")
    (root / "caches").mkdir()
    model = save_llama(root / "llama", hidden=64, layers=2)
    found = ran("killed_caches.py", "generate", model, root / "caches", 3)
    assert found["whole"] == found["runs"] >= 3, found
    assert all(end["behind"] == [] for end in found["ends"]), found


def killed(root: Path, scratch: Path, kills: int, options: list[str]) -> dict[str, Any]:
    model, data = save_llama(root / "llama", hidden=16, layers=2), write_text(root / "text.txt")
    report: dict[str, Any] = ran("killed_trainings.py", model, data, root, kills, *options)
    return report


def ran(program: str, *arguments: object, **environment: str) -> Any:
    """What a program beside this one prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
