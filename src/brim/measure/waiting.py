"""Measure seconds of computing without the time in which other processes had the processors."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from brim.measure.capacity import cgroup_folders

_PROC, _TASKS = Path("/proc"), Path("/proc/self/task")


def waited_s() -> dict[str, float]:
    """Return by thread the seconds that it was ready to run and had no processor.

    They are the second number of ``schedstat`` (Linux, Documentation/scheduler/sched-stats.rst). Empty if the kernel
    does not report it.
    """
    waits_s = {}
    try:
        for task in _TASKS.iterdir():
            try:
                waits_s[task.name] = int((task / "schedstat").read_bytes().split()[1]) / 1e9
            except (FileNotFoundError, ProcessLookupError):  # a thread that has ended
                continue
    except OSError:
        return {}
    return waits_s


def waits_for_itself() -> bool:
    """Return whether threads wait regardless of other processes: too many threads, or a quota (``docker --cpus``)."""
    torch = sys.modules.get("torch")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch is not None and torch.get_num_threads() > processors:
        return True
    return any(_has_quota(folder / "cpu.max") for folder, version in cgroup_folders(_PROC) if version == "cgroup2")


def _has_quota(file: Path) -> bool:
    try:
        return not file.read_text(encoding="ascii").startswith("max")  # (Linux, Documentation/admin-guide/cgroup-v2)
    except OSError:  # at the root, or without a limit
        return False


class Stopwatch:
    """Times work of the processor from its creation, in the thread that created it.

    Threads that share an operation wait for the slowest, so the longest wait of a thread is subtracted. That wait may
    have begun earlier, or belong to an unrelated thread, so this thread's processor time is the minimum. A process
    whose threads wait for each other is timed by the clock.
    """

    def __init__(self) -> None:
        self._by_clock = waits_for_itself()
        self._before_s, self._worked_s = {} if self._by_clock else waited_s(), time.thread_time()
        self._began_s = time.perf_counter()

    def read_s(self) -> float:
        """Return the seconds elapsed, less those that the most delayed thread waited for a processor."""
        took_s = time.perf_counter() - self._began_s
        if self._by_clock:
            return took_s
        worked_s = time.thread_time() - self._worked_s
        waits_s = (waited - self._before_s.get(thread, 0.0) for thread, waited in waited_s().items())
        return max(worked_s, took_s - max(waits_s, default=0.0))
