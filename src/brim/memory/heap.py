"""The C library's heap: return freed memory to the system at once, or keep it up to a limit; simulate its growth.

A budget counts the resident set, which includes free memory of the heap. But a fresh page costs a fault and its
zeroing: half a second per gigabyte on a virtual machine, in each training step. If the budget has room, the heap may
keep freed memory (``HeapRetention``), and its holes are returned when the resident set comes near the promise.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import psutil

from brim import threads
from brim.memory.pool import PAGE_BYTES, round_up

# glibc, malloc/malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
# Blocks of this size and above get their own mapping, which costs a system call and page faults. At 256 KiB the small
# tensors of a deep and thin model left a heap with 70 MB of holes after three training steps, and more with each; at
# 64 KiB there were none, and a step took no longer.
MAPPING_THRESHOLD_BYTES = 64 << 10
TRIM_THRESHOLD_BYTES = 1 << 20
_LARGEST_BYTES = 32 << 20  # glibc's largest threshold (DEFAULT_MMAP_THRESHOLD_MAX)
_ALWAYS_BYTES = (1 << 31) - 1  # mallopt takes an int
_STATM = Path("/proc/self/statm")
_INTERVAL_S = 0.002  # a machine that writes 10 GB/s into fresh pages writes 20 MB in that time
_FUTILE_S = 0.05
_MANY, _MANY_S = 50, 1.0  # returning holes this often costs more than not keeping them

# By itself the heap held 6 to 22 % above the memory in use at the peak of a step, depending on the model's shapes. Up
# to this share of it is promised, as the budget has room. With a tenth, a step takes no longer than elsewhere; with
# less it pays for returning holes, and with none it takes a third longer.
_MOST_SHARE, _LEAST_SHARE = 0.10, 0.04
# The part of the budget that stays free, as a process writes into fresh pages between two samples. Holes come to at
# most a quarter of the memory in use, so a budget with room for all of them needs no more.
_SLACK_SHARE, _SLACK_BYTES = 0.04, 64 << 20
_UNWATCHED_SHARE = 0.25
_LATE_SHARE, _LATE_BYTES = 0.01, 8 << 20  # below the promise, for growth between two samples


def return_freed_memory() -> None:
    """Let freed tensors leave the resident set at once from now on (glibc only).

    By default glibc raises its threshold for mappings to the size of freed blocks (up to 32 MiB), so that freed
    activations stay in a heap with holes (mallopt(3), M_MMAP_THRESHOLD). Setting the threshold stops that.
    """
    _set(MAPPING_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES)


def _set(mapping_threshold_bytes: int, trim_threshold_bytes: int) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, mapping_threshold_bytes)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold_bytes)
        mallopt(_M_TOP_PAD, 0)
        mallopt(_M_ARENA_MAX, 1)


def collect_and_trim() -> None:
    """Collect garbage, then return the heap's free memory to the system."""
    gc.collect()
    trim()


def used_resident_bytes() -> int:
    """Free garbage and the heap's free memory, which would hide growth, and return the resident set."""
    collect_and_trim()
    return int(psutil.Process().memory_info().rss)


def trim() -> None:
    """Return the heap's free memory to the system."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True, kw_only=True)
class HeapLimits:
    """The promise with a kept heap, and the resident set above which its holes are returned.

    ``share``: the promised holes as a share of the most that a heap is promised; below 1, a step pays for returning
    holes.
    """

    promised_bytes: int
    return_above_bytes: int
    share: float = 1.0


def retention_limits(in_use_bytes: int, budget_bytes: int) -> HeapLimits | None:
    """Return the limits of a heap that may keep part of the budget above the peak in use; None: it keeps nothing."""
    most = int(_MOST_SHARE * in_use_bytes)
    late_bytes = min(_SLACK_BYTES, int(_UNWATCHED_SHARE * in_use_bytes) - most)
    slack = max(int(_SLACK_SHARE * in_use_bytes), late_bytes)
    holes = min(most, budget_bytes - in_use_bytes - slack)
    if not _STATM.exists() or holes < int(_LEAST_SHARE * in_use_bytes):
        return None
    limits = replace(watched_limits(in_use_bytes + holes), share=holes / most)
    if limits.return_above_bytes <= in_use_bytes:  # holes would be returned all the time
        return None
    return limits


def watched_limits(promised_bytes: int) -> HeapLimits:
    """Return the limits of a heap that has holes already, and is promised no room for them."""
    late = max(_LATE_BYTES, int(promised_bytes * _LATE_SHARE))
    return HeapLimits(promised_bytes=promised_bytes, return_above_bytes=promised_bytes - late)


class HeapRetention:
    """Keeps freed memory, and returns it whenever the resident set exceeds ``return_above_bytes``."""

    def __init__(self, return_above_bytes: int) -> None:
        self._mark_bytes = return_above_bytes
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="brim-heap", daemon=True)
        threads.start(self._thread)
        _set(_LARGEST_BYTES, _ALWAYS_BYTES)  # as glibc does in the end by default
        _watched.add(self)

    def close(self) -> None:
        """Return all free memory and stop. A second call does nothing.

        glibc still searches the grown heap before it creates a mapping, so a later step in this process should watch
        it again.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        _watched.discard(self)
        self._thread.join()
        return_freed_memory()
        trim()

    remove = close  # handles are removed

    def _watch(self) -> None:
        wait_s = _INTERVAL_S
        given_s: deque[float] = deque(maxlen=_MANY)
        with _STATM.open("rb", buffering=0) as statm:
            while not self._stopped.wait(wait_s):
                wait_s = _INTERVAL_S
                if _resident_bytes(statm) > self._mark_bytes:
                    trim()
                    given_s.append(time.monotonic())
                    if len(given_s) == _MANY and given_s[-1] - given_s[0] < _MANY_S:
                        return_freed_memory()
                        wait_s = _FUTILE_S
                    if _resident_bytes(statm) > self._mark_bytes:
                        wait_s = _FUTILE_S  # the memory is in use


_watched: weakref.WeakSet[HeapRetention] = weakref.WeakSet()


def _in_child() -> None:
    """Return freed memory in a forked child (a loader's worker), which has no watching thread."""
    if _watched:
        _watched.clear()
        return_freed_memory()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _resident_bytes(statm: BinaryIO) -> int:
    """Read the resident set (proc_pid_statm(5)): cheap, and accurate to some hundred KiB."""
    statm.seek(0)
    return int(statm.read(128).split()[1]) * mmap.PAGESIZE


_ALIGNMENT_BYTES = 64  # of PyTorch's CPU allocator (c10/core/alignment.h)
_HEADER_BYTES = 16


class HeapGrowth:
    """Simulates allocations and frees of CPU tensors by name; ``peak_bytes`` is the peak of their resident size.

    Follows glibc's malloc (malloc/malloc.c) as set by ``return_freed_memory``. Blocks below the threshold come from
    one heap by best fit; free neighbours are merged; the heap grows at its top and shrinks when enough of the top is
    free; holes stay resident. Larger blocks have their own mappings, which are returned at once.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._mapped_bytes = 0
        self._blocks: dict[int, tuple[int, int]] = {}  # name -> (begin, length); begin -1: a mapping
        self._free: list[tuple[int, int]] = []  # (length, begin)
        self._begins: dict[int, int] = {}  # of free runs: begin -> length
        self._ends: dict[int, int] = {}  # end -> begin
        self._top = self._resident = 0  # the ends of used and of resident memory

    def alloc(self, name: int, bytes: int) -> None:
        length = round_up(bytes + _HEADER_BYTES, _ALIGNMENT_BYTES)
        if length >= MAPPING_THRESHOLD_BYTES:
            length = round_up(length, PAGE_BYTES)
            self._mapped_bytes += length
            self._blocks[name] = -1, length
        else:
            self._blocks[name] = self._take(length), length
        self.peak_bytes = max(self.peak_bytes, self._resident + self._mapped_bytes)

    def free(self, name: int) -> None:
        begin, length = self._blocks.pop(name)
        if begin < 0:
            self._mapped_bytes -= length
        else:
            self._give(begin, length)

    def _take(self, length: int) -> int:
        index = bisect.bisect_left(self._free, (length, 0))
        if index == len(self._free):
            begin = self._top
            self._top += length
            self._resident = max(self._resident, self._top)
            return begin
        free_length, begin = self._free[index]
        self._forget(begin, free_length)
        if free_length > length:
            self._note(begin + length, free_length - length)
        return begin

    def _give(self, begin: int, length: int) -> None:
        if begin in self._ends:  # the run before it
            before = self._ends[begin]
            self._forget(before, begin - before)
            begin, length = before, length + begin - before
        if begin + length in self._begins:
            after = self._begins[begin + length]
            self._forget(begin + length, after)
            length += after
        if begin + length < self._top:
            self._note(begin, length)
            return
        self._top = begin
        if self._resident - self._top > TRIM_THRESHOLD_BYTES:
            self._resident = self._top

    def _note(self, begin: int, length: int) -> None:
        bisect.insort(self._free, (length, begin))
        self._begins[begin], self._ends[begin + length] = length, begin

    def _forget(self, begin: int, length: int) -> None:
        del self._free[bisect.bisect_left(self._free, (length, begin))]
        del self._begins[begin], self._ends[begin + length]
