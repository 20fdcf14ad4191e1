"""What is timed of the processor does not depend on how many others compute beside it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from brim.measure import waiting
from brim.measure.waiting import Stopwatch

_LOOPS = 9


def loop_s() -> float:
    """Seconds of a fixed piece of work, of one thread."""
    watch = Stopwatch()
    for _ in range(500_000):
        pass
    return watch.read_s()


def median_loop_s() -> float:
    return statistics.median(loop_s() for _ in range(_LOOPS))


@pytest.mark.skipif(not waiting.waited_s(), reason="this kernel does not tell how long threads wait")
def test_busy_processes_do_not_count() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # one processor for all of them
    running = []
    try:
        alone_s = median_loop_s()
        running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        time.sleep(0.3)
        began_s = time.perf_counter()
        beside_s = median_loop_s()
        clock_s = (time.perf_counter() - began_s) / _LOOPS
    finally:
        os.sched_setaffinity(0, allowed)
        for one in running:
            one.kill()
            one.wait()
    assert clock_s > 1.5 * alone_s
    assert beside_s < 1.5 * alone_s


def test_a_process_that_waits_for_itself_is_timed_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not waiting.waits_for_itself()
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    folders = [(tmp_path / "a", "cgroup2"), (tmp_path / "a" / "b", "cgroup2")]
    monkeypatch.setattr(waiting, "cgroup_folders", lambda proc: iter(folders))
    assert not waiting.waits_for_itself()
    (tmp_path / "a" / "cpu.max").write_text("400000 100000\n")  # docker --cpus 4
    assert waiting.waits_for_itself()
    monkeypatch.setattr(waiting, "waited_s", dict)
    assert Stopwatch().read_s() >= 0
    (tmp_path / "a" / "cpu.max").unlink()
    assert not waiting.waits_for_itself()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + len(os.sched_getaffinity(0)))
    assert waiting.waits_for_itself()


def test_sleep_counts_and_an_unknown_kernel_leaves_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    readings_s = []
    for _ in range(10):  # between two clocks that are read, a busy machine lets others compute
        watch = Stopwatch()
        time.sleep(0.05)
        readings_s.append(watch.read_s())
    assert max(readings_s) >= 0.045
    monkeypatch.setattr(waiting, "_TASKS", waiting.Path("/nowhere"))
    assert waiting.waited_s() == {}
    watch = Stopwatch()
    time.sleep(0.01)
    assert watch.read_s() >= 0.01
