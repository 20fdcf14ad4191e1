"""Seconds of computing, without those in which other processes had the processors."""

from __future__ import annotations

import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


def waited_s() -> dict[str, float]:
    """By thread, the seconds that it was ready to run and had no processor.

    That is the second number of its ``schedstat`` (Linux, Documentation/scheduler/sched-stats.rst). Empty where the
    kernel does not tell.
    """
    found = {}
    try:
        for task in _TASKS.iterdir():
            try:
                found[task.name] = int((task / "schedstat").read_bytes().split()[1]) / 1e9
            except (FileNotFoundError, ProcessLookupError):  # a thread that has ended
                continue
    except OSError:
        return {}
    return found


class Stopwatch:
    """Counts from when it is made, in the thread that made it, for work of the processor alone.

    Threads that share an operation wait for the slowest of them, so the longest wait of a thread is that of all. It
    may have begun before, or be a thread's that has nothing to do with the work: what this thread has computed counts
    at least.
    """

    def __init__(self) -> None:
        self._before_s, self._worked_s = waited_s(), time.thread_time()
        self._began_s = time.perf_counter()

    def read_s(self) -> float:
        """Seconds by the clock, less those that the most delayed thread waited for a processor."""
        took_s = time.perf_counter() - self._began_s
        worked_s = time.thread_time() - self._worked_s
        waits_s = (waited - self._before_s.get(thread, 0.0) for thread, waited in waited_s().items())
        return max(worked_s, took_s - max(waits_s, default=0.0))
