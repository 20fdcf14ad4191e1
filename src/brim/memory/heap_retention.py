"""A heap that keeps what is freed for what comes next, and gives it back before it takes more than was promised.

A fresh page costs a fault and its zeroing: half a second per gigabyte on a virtual machine, which a training step
pays over and over where freed memory is returned at once (see ``heap``). Where the budget has room, the C library may
keep it, and only when the resident set comes near what was promised the holes are handed back.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from brim import threads
from brim.memory import heap

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = mmap.PAGESIZE
_INTERVAL_S = 0.002  # a machine that writes 10 GB/s into fresh pages comes 20 MB further in that time
_FUTILE_S = 0.05
_MANY, _MANY_S = 50, 1.0  # so many times within so long, giving holes back costs more than not keeping them

# Left to itself, the heap held 6 to 22 % beside what was in use at the peak of a step, by the model's shapes. So much
# of it is promised and used as the budget has room for; what would be more is given back in time. With a tenth, a
# step takes what it takes elsewhere; below that it pays for giving holes back, and with none it takes a third longer.
_MOST_SHARE, _LEAST_SHARE = 0.10, 0.04
# What stays free of the budget: a process that writes into fresh pages comes further between two looks. Holes that
# nobody looks at come to a quarter of what is in use at most, so with room for them all no more has to stay free.
_SLACK_SHARE, _SLACK_BYTES = 0.04, 64 << 20
_UNWATCHED_SHARE = 0.25
_LATE_SHARE, _LATE_BYTES = 0.01, 8 << 20  # below the promise, for what comes between two looks


@dataclass(frozen=True, kw_only=True)
class HeapLimits:
    """What is promised with a kept heap, and the resident set from which on its holes are given back.

    ``share`` of what a heap is promised at most: with less, a step pays for giving holes back.
    """

    promised_bytes: int
    return_above_bytes: int
    share: float = 1.0


def kept_limits(in_use_bytes: int, budget_bytes: int) -> HeapLimits | None:
    """How much of ``budget_bytes`` beyond ``in_use_bytes`` (at the peak) a heap may keep; None: nothing."""
    most = int(_MOST_SHARE * in_use_bytes)
    late_bytes = min(_SLACK_BYTES, int(_UNWATCHED_SHARE * in_use_bytes) - most)
    slack = max(int(_SLACK_SHARE * in_use_bytes), late_bytes)
    holes = min(most, budget_bytes - in_use_bytes - slack)
    if not _STATM.exists() or holes < int(_LEAST_SHARE * in_use_bytes):
        return None
    promised = in_use_bytes + holes
    late = max(_LATE_BYTES, int(promised * _LATE_SHARE))
    if late >= holes:  # holes would be given back all the time
        return None
    return HeapLimits(promised_bytes=promised, return_above_bytes=promised - late, share=holes / most)


def kept_below(budget_bytes: int) -> int:
    """The most that may be in use where a heap is to keep all that it may within ``budget_bytes``."""
    whole = 1 + _MOST_SHARE
    watched = min((budget_bytes - _SLACK_BYTES) / whole, budget_bytes / (whole + _SLACK_SHARE))
    return int(max(watched, budget_bytes / (1 + _UNWATCHED_SHARE)))


class KeptHeap:
    """From now on freed memory is kept, and given back whenever the resident set passes ``return_above_bytes``."""

    def __init__(self, return_above_bytes: int) -> None:
        self._mark_bytes = return_above_bytes
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="brim-heap", daemon=True)
        threads.start(self._thread)
        heap.keep_freed_memory()
        _watched.add(self)

    def close(self) -> None:
        """Give everything back, and no longer watch. A second call does nothing.

        What the heap has grown to by then stays its own: glibc looks there before it makes a mapping. So code that
        goes on in this process does well to have it watched again.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        _watched.discard(self)
        self._thread.join()
        heap.return_freed_memory()
        heap.give_back()

    def remove(self) -> None:
        """As a handle's: ``close``."""
        self.close()

    def _watch(self) -> None:
        wait_s = _INTERVAL_S
        given_s: deque[float] = deque(maxlen=_MANY)
        with _STATM.open("rb", buffering=0) as statm:
            while not self._stopped.wait(wait_s):
                wait_s = _INTERVAL_S
                if _resident_bytes(statm) > self._mark_bytes:
                    heap.give_back()
                    given_s.append(time.monotonic())
                    if len(given_s) == _MANY and given_s[-1] - given_s[0] < _MANY_S:
                        heap.return_freed_memory()
                        wait_s = _FUTILE_S
                    if _resident_bytes(statm) > self._mark_bytes:
                        wait_s = _FUTILE_S  # it is in use


_watched: weakref.WeakSet[KeptHeap] = weakref.WeakSet()


def _in_child() -> None:
    """A child that was forked off (a loader's worker) has the heap and its settings, but no thread that watches."""
    if _watched:
        _watched.clear()
        heap.return_freed_memory()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _resident_bytes(statm: BinaryIO) -> int:
    """The resident set as statm has it (proc_pid_statm(5)): cheap, and right to some hundred KiB."""
    statm.seek(0)
    return int(statm.read(128).split()[1]) * _PAGE_BYTES
