"""A plan does not depend on how fast this computer thinks: searches are limited by counts, never by a clock."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

BUSY = (0, 0, 0, 0, 2, 2, 2, 8, 8, 8)  # processes beside each of ten runs
ASKED = {
    "generate": ["--vram", "400MiB", "--seq", "64", "--new-tokens", "16"],
    "train": ["--vram", "1100MiB", "--seq", "128", "--batch", "2"],
}


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def planned(task: str) -> dict[str, Any]:
    words = ["plan", "smollm2-135m", "--task", task, "--gpu", "RTX 3060", "--ram", "8GiB", "--json", *ASKED[task]]
    code = "import sys; from brim.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("took_s") > 0
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("task", ASKED)
def test_ten_runs_beside_busy_processes_give_one_plan(task: str) -> None:
    answers = []
    for count in BUSY:
        with busy(count):
            answers.append(planned(task))
    assert answers[0]["plans"]
    assert all(answer == answers[0] for answer in answers)
