"""What an estimate of a large model itself takes: seconds of two cores and RAM."""

from __future__ import annotations

import subprocess
import sys

import pytest

GIB_IN_KIB = 1 << 20


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "seconds"), [("llama-3-70b", 30), ("llama-3.1-405b", 90)])
def test_a_training_step_is_estimated_in_seconds_and_little_memory(model: str, seconds: int) -> None:
    """By CPU time, as the machine may be busy: two cores have twice as much of it as a clock."""
    run = f"""
import brim, resource
found = brim.estimate({model!r}, task="train", batch=1, seq=4096)
used = resource.getrusage(resource.RUSAGE_SELF)
print(found.peak_bytes.allocated, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=10 * seconds)
    assert done.returncode == 0, done.stderr
    allocated, cpu_s, resident_kib = map(float, done.stdout.split())
    assert cpu_s <= 2 * seconds
    assert resident_kib <= 4 * GIB_IN_KIB
    assert allocated > 70e9 * 16 / 8
