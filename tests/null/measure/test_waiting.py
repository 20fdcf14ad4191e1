"""What is timed of the processor does not depend on how many others compute beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from brim.measure import waiting
from brim.measure.waiting import Stopwatch


class Clocks:
    """Stands for ``time`` in the stopwatch: elapsed seconds and this thread's seconds on a processor."""

    def __init__(self, elapsed_s: float = 0.0, worked_s: float = 0.0) -> None:
        self.elapsed_s, self.worked_s = elapsed_s, worked_s

    def perf_counter(self) -> float:
        return self.elapsed_s

    def thread_time(self) -> float:
        return self.worked_s


@pytest.mark.parametrize(
    ("waits_s", "read_s"),
    [
        pytest.param({"1": 1.5}, 2.5, id="waits of this time only"),
        pytest.param({"1": 1.5, "2": 3.0}, 1.0, id="the longest wait, also of a thread begun meanwhile"),
        pytest.param({"1": 1.5, "2": 9.0}, 0.75, id="never less than this thread has worked"),
        pytest.param({}, 4.0, id="threads that have ended"),
    ],
)
def test_the_longest_wait_of_a_thread_does_not_count(
    monkeypatch: pytest.MonkeyPatch, waits_s: dict[str, float], read_s: float
) -> None:
    clocks = Clocks(elapsed_s=10.0, worked_s=5.0)
    monkeypatch.setattr(waiting, "time", clocks)
    monkeypatch.setattr(waiting, "waits_for_itself", lambda: False)
    monkeypatch.setattr(waiting, "waited_s", lambda: {"1": 0.0})
    watch = Stopwatch()
    clocks.elapsed_s, clocks.worked_s = 14.0, 5.75
    monkeypatch.setattr(waiting, "waited_s", lambda: waits_s)
    assert watch.read_s() == read_s


@pytest.mark.skipif(not waiting.waited_s(), reason="this kernel does not tell how long threads wait")
def test_the_kernel_counts_what_this_thread_waits_for_busy_processes() -> None:
    """No seconds of work are compared: a virtual processor's own speed may change by a factor of two."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # one processor for all of them
    thread = str(threading.get_native_id())
    running = []
    try:
        running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        before_s, until_s = waiting.waited_s()[thread], time.monotonic() + 60
        while waiting.waited_s()[thread] < before_s + 0.2 and time.monotonic() < until_s:
            sum(range(100_000))
        assert waiting.waited_s()[thread] >= before_s + 0.2
    finally:
        os.sched_setaffinity(0, allowed)
        for one in running:
            one.kill()
            one.wait()


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
