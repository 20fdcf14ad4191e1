"""The monitor sees peaks that are over when it is asked, and monitors do not spoil one another."""

import mmap
import subprocess
import sys
import threading
import time

import pytest

from brim.errors import UsageError
from brim.measure.monitor import KernelMeter, Monitor, SampledMeter, Watch

MIB = 1 << 20
NOISE_BYTES = 8 * MIB  # what the interpreter and its allocator may take meanwhile


@pytest.fixture(params=["kernel", "sampled"])
def watch(request):
    if request.param == "kernel" and not KernelMeter.available():
        pytest.skip("the kernel's high water cannot be reset here")
    return Watch(KernelMeter() if request.param == "kernel" else SampledMeter())


def spike(size_bytes: int) -> None:
    """Hold so much for a moment; long enough for the sampling meter to see.

    In pages of its own: the C library's heap may have that much free already, and would not grow.
    """
    with mmap.mmap(-1, size_bytes) as held:
        held[:: mmap.PAGESIZE] = bytes(size_bytes // mmap.PAGESIZE)  # each page is there once it is written to
        time.sleep(0.03)


def about(size_bytes: int) -> object:
    return pytest.approx(size_bytes, abs=NOISE_BYTES)


def test_a_peak_that_is_over_is_seen(watch):
    with Monitor(watch=watch) as monitor:
        spike(100 * MIB)
    assert monitor.usage().ram_growth_bytes == about(100 * MIB)
    assert monitor.usage().ram_peak_bytes - monitor.usage().ram_entry_bytes == monitor.usage().ram_growth_bytes


def test_a_peak_before_the_block_is_not(watch):
    spike(100 * MIB)
    with Monitor(watch=watch) as monitor:
        pass
    assert monitor.usage().ram_growth_bytes == about(0)


def test_a_peak_after_the_block_is_not(watch):
    with Monitor(watch=watch) as monitor:
        pass
    spike(100 * MIB)
    assert monitor.usage().ram_growth_bytes == about(0)


def test_the_usage_so_far_can_be_read_within_the_block(watch):
    with Monitor(watch=watch) as monitor:
        spike(50 * MIB)
        assert monitor.usage().ram_growth_bytes == about(50 * MIB)
        spike(100 * MIB)
        assert monitor.usage().ram_growth_bytes == about(100 * MIB)


def test_an_inner_monitor_does_not_make_the_outer_forget(watch):
    with Monitor(watch=watch) as outer:
        spike(150 * MIB)
        with Monitor(watch=watch) as inner:
            spike(50 * MIB)
        spike(20 * MIB)
    assert outer.usage().ram_growth_bytes == about(150 * MIB)
    assert inner.usage().ram_growth_bytes == about(50 * MIB)


def test_an_outer_monitor_sees_the_peak_of_an_inner_one(watch):
    with Monitor(watch=watch) as outer, Monitor(watch=watch):
        spike(100 * MIB)
    assert outer.usage().ram_growth_bytes == about(100 * MIB)


def test_monitors_that_overlap_are_both_right(watch):
    first, second = Monitor(watch=watch), Monitor(watch=watch)
    first.__enter__()
    spike(60 * MIB)
    second.__enter__()
    first.__exit__(None, None, None)
    spike(120 * MIB)
    second.__exit__(None, None, None)
    assert first.usage().ram_growth_bytes == about(60 * MIB)
    assert second.usage().ram_growth_bytes == about(120 * MIB)


def test_an_error_within_the_block_is_passed_on_and_the_usage_kept(watch):
    monitor = Monitor(watch=watch)
    with pytest.raises(ZeroDivisionError), monitor:
        spike(50 * MIB)
        _ = 1 / 0
    assert monitor.usage().ram_growth_bytes == about(50 * MIB)
    with monitor:  # free to be used again
        pass
    assert monitor.usage().ram_growth_bytes == about(0)


def test_no_thread_is_left():
    before = threading.active_count()
    with Monitor(watch=Watch(SampledMeter())):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_without_cuda_no_vram_is_reported():
    code = (
        "import sys\nfrom brim.measure.monitor import Monitor\n"
        "with Monitor() as monitor: pass\n"
        "usage = monitor.usage()\n"
        "assert usage.vram_reserved_bytes == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wrong_use_is_a_usage_error():
    monitor = Monitor()
    with pytest.raises(UsageError, match="not entered"):
        monitor.usage()
    with monitor, pytest.raises(UsageError, match="already in use"):
        monitor.__enter__()
