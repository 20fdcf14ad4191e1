"""A heap that keeps freed memory takes no page twice, and gives its holes back where the resident set would pass."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from brim.measure.capacity import resident_bytes
from brim.memory.heap import retention_limits, used_resident_bytes

GIB = 1 << 30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only glibc's heap can be told what to keep")


def test_a_wide_budget_promises_the_holes_and_a_narrow_one_nothing() -> None:
    wide, some = retention_limits(2 * GIB, 4 * GIB), retention_limits(2 * GIB, int(2.2 * GIB))
    assert wide is not None
    assert some is not None
    assert 2 * GIB < some.promised_bytes < wide.promised_bytes < 2.3 * GIB
    assert retention_limits(2 * GIB, int(2.05 * GIB)) is None
    assert retention_limits(60 << 20, 100 << 20) is None  # what comes between two looks would be too much of it


def test_holes_that_are_less_than_what_comes_late_are_not_kept() -> None:
    assert retention_limits(80 << 20, GIB) is None
    assert retention_limits(81 << 20, GIB) is not None


@pytest.mark.parametrize("room", [0.02, 0.05, 0.09, 0.2, 0.3, 2.0])
@pytest.mark.parametrize("in_use", [100 << 20, GIB, 20 * GIB])
def test_nothing_beyond_the_budget_is_promised_or_kept(in_use: int, room: float) -> None:
    budget = int(in_use * (1 + room))
    limits = retention_limits(in_use, budget)
    if limits is not None:
        assert in_use < limits.promised_bytes <= budget
        assert limits.return_above_bytes < limits.promised_bytes


def test_a_small_budget_with_room_for_all_holes_keeps_them() -> None:
    """A step of 170 MB within 277 paid a third of its time for pages that it had had before."""
    limits = retention_limits(170 << 20, 277 << 20)
    assert limits is not None and limits.share == 1.0
    assert retention_limits(170 << 20, 190 << 20) is None


_CHURN = textwrap.dedent("""
    import resource, time, torch
    from brim.memory.heap import HeapRetention, return_freed_memory

    torch.set_num_threads(1)
    MIB = 1 << 20
    warm = torch.zeros(64).add_(1)
    def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
    def churn():
        for size in (3, 5, 4, 6) * 8:
            torch.zeros(size * MIB // 4)
    return_freed_memory()
    churn()
    before = faults(); churn(); returned = faults() - before
    start = resident()
    kept = HeapRetention(start + 40 * MIB)
    churn()
    before = faults(); churn(); held = faults() - before
    assert held * 20 < returned, (held, returned)
    everything = [torch.zeros(MIB // 4) for _ in range(120)]
    pins = everything[::10]
    del everything
    deadline = time.monotonic() + 10
    while resident() > start + 40 * MIB and time.monotonic() < deadline:
        time.sleep(0.005)
    assert resident() <= start + 40 * MIB, (resident() - start) // MIB
    kept.close()
    kept.close()
    assert resident() < start + 20 * MIB
""")


@pytest.mark.thorough
def test_pages_are_used_again_until_too_many_are_held() -> None:
    done = subprocess.run([sys.executable, "-c", _CHURN], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


_FORKED = textwrap.dedent("""
    import os, torch
    from brim.memory.heap import HeapRetention

    torch.set_num_threads(1)
    MIB = 1 << 20
    warm = torch.zeros(64).add_(1)
    def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
    def stays():
        before = resident()
        many = [torch.zeros(3 * MIB // 4) for _ in range(8)]
        del many
        return resident() - before
    kept = HeapRetention(1 << 40)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if stays() < 8 * MIB else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert stays() > 16 * MIB, "the parent goes on keeping"
""")


@pytest.mark.thorough
def test_a_child_that_is_forked_off_keeps_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def test_growth_is_counted_without_free_memory() -> None:
    before_bytes = used_resident_bytes()
    kept = [bytes(8192) for _ in range(8192)]
    kept[1:-1] = []
    assert resident_bytes() - before_bytes > 48 << 20  # the last one keeps the heap from shrinking
    assert used_resident_bytes() - before_bytes < 8 << 20
