"""How far a process grows for its tensors: as the C library's heap grows, holes included."""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys

import pytest

from brim.memory.heap import MAPPING_THRESHOLD_BYTES, TRIM_THRESHOLD_BYTES, HeapGrowth
from brim.memory.pool import PAGE_BYTES

KIB = 1 << 10

# Plays [name, bytes] (alloc) and [name] (free) and prints how far the resident set grew, as the kernel says.
PLAYED = """
import ctypes, json, sys
from brim.memory import heap
libc = ctypes.CDLL("libc.so.6")
script, held = json.loads(sys.stdin.read()), {}
place = ctypes.c_void_p()
def high():
    lines = open("/proc/self/status").read().splitlines()
    return {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "VmRSS"))}
heap.return_freed_memory()
heap.collect_and_trim()
high()
open("/proc/self/clear_refs", "w").write("5")
before = high()["VmRSS:"]
for event in script:
    if len(event) == 2:
        libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(event[1]))
        held[event[0]] = place.value
        ctypes.memset(place.value, 1, event[1])
    else:
        libc.free(ctypes.c_void_p(held.pop(event[0])))
print(high()["VmHWM:"] - before)
"""


def test_a_large_tensor_has_pages_of_its_own_and_gives_them_back() -> None:
    heap = HeapGrowth()
    heap.alloc(1, MAPPING_THRESHOLD_BYTES)
    assert heap.peak_bytes == MAPPING_THRESHOLD_BYTES + PAGE_BYTES
    heap.free(1)
    heap.alloc(2, MAPPING_THRESHOLD_BYTES)
    assert heap.peak_bytes == MAPPING_THRESHOLD_BYTES + PAGE_BYTES


def test_a_hole_stays_until_something_fits_into_it() -> None:
    heap = HeapGrowth()
    for name in range(3):
        heap.alloc(name, 40 * KIB)
    first = heap.peak_bytes
    heap.free(1)
    heap.alloc(3, 39 * KIB)  # into the hole
    assert heap.peak_bytes == first
    heap.free(3)
    heap.alloc(4, 41 * KIB)  # it does not fit there
    assert heap.peak_bytes > first + 40 * KIB


def test_neighbours_that_are_free_are_one_hole() -> None:
    heap = HeapGrowth()
    for name in range(4):
        heap.alloc(name, 30 * KIB)
    before = heap.peak_bytes
    heap.free(1)
    heap.free(2)
    heap.alloc(5, 59 * KIB)
    assert heap.peak_bytes == before


def test_the_top_shrinks_once_enough_of_it_is_free() -> None:
    heap = HeapGrowth()
    count = TRIM_THRESHOLD_BYTES // (40 * KIB) + 2
    for name in range(count):
        heap.alloc(name, 40 * KIB)
    before = heap.peak_bytes
    for name in reversed(range(1, count)):
        heap.free(name)
    heap.alloc(count, before)  # a mapping: the heap has given its pages back by now
    assert heap.peak_bytes < 2 * before - TRIM_THRESHOLD_BYTES // 2


def lives(seed: int) -> list[list[int]]:
    """Forward makes, backward lets go, with much that is short-lived in between."""
    dice, script, kept, name = random.Random(seed), [], [], 0
    for _ in range(200):
        for _ in range(4):
            script.append([name, dice.choice([1, 4, 16, 40, 60, 100, 300]) * KIB + dice.randrange(4096)])
            if dice.random() < 0.4:
                kept.append(name)
            else:
                script.append([name])
            name += 1
    for old in reversed(kept):
        script.append([name, dice.choice([4, 16, 40, 100]) * KIB])
        script += [[old], [name]]
        name += 1
    return script


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's heap is another")
@pytest.mark.parametrize("seed", range(3))
def test_a_real_process_grows_as_far(seed: int) -> None:
    script, heap = lives(seed), HeapGrowth()
    for event in script:
        if len(event) == 2:
            heap.alloc(*event)
        else:
            heap.free(*event)
    done = subprocess.run(
        [sys.executable, "-c", PLAYED], input=json.dumps(script), capture_output=True, text=True, check=True
    )
    assert heap.peak_bytes == pytest.approx(int(done.stdout), rel=0.02)
