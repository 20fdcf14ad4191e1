"""Whatever is in a trace, reading it gives a result or one kind of error, within bounds of memory.

A campaign goes on for so long and has new examples each time; ten minutes of it:
``BRIM_FUZZ_SECONDS=600 pytest tests/null/profiles/test_profiler_fuzz.py -k campaign``.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import random
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import FormatError
from brim.profiles import profiler as profile
from brim.profiles.figures import Profile
from brim.units import KIB
from support import synthetic_trace
from support.damaged import changed
from support.profiles import called, copied, memory, operation
from support.profiles import kernel as kernel_event

SECONDS = float(os.environ.get("BRIM_FUZZ_SECONDS", "0"))
SHORT = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


# What a reader may take at most, beside what it takes for a file with nothing in it: so many times the text, and some
# more for devices and errors.
TIMES = 4
SPARE_BYTES = 256 * KIB


def peak_bytes(path: Path) -> tuple[Profile | None, int]:
    """What was read, None if it was refused, and what that took."""
    tracemalloc.start()
    try:
        return profile.read(path), tracemalloc.get_traced_memory()[1]
    except FormatError:
        return None, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@functools.cache
def fixed_bytes() -> int:
    """For a file with nothing in it. The first call imports, so the second one counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty"
        path.write_bytes(gzip.compress(b"[]"))
        return [peak_bytes(path)[1] for _ in range(2)][1]


def text_bytes(path: Path) -> int:
    """A packed file may take what its text may."""
    count = 0
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
        while block := file.read(1 << 16):
            count += len(block)
    return max(count, path.stat().st_size)


def judged(path: Path) -> bool:
    """Whether ``path`` was accepted. Raises for any error but one, a result that is not whole, and for memory."""
    most = fixed_bytes() + TIMES * text_bytes(path) + SPARE_BYTES
    found, taken_bytes = peak_bytes(path)
    assert taken_bytes <= most, (taken_bytes, most, path.stat().st_size)
    if found is not None:
        json.dumps(found.to_json(), allow_nan=False)
        for device in found.devices:
            assert sum(device.idle_by_cause.values()) == pytest.approx(device.idle_s, rel=1e-6, abs=1e-9)
    return found is not None


numbers = st.one_of(st.integers(-5, 100), st.integers(), st.floats(), st.floats(0, 1e6))
numbers |= st.sampled_from([1 << 62, -(1 << 63), 1 << 64])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
# fmt: off
kinds = [
    "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation", "Trace", "Kernel", "python",
]
words = st.sampled_from([
    "gemm", "ncclKernel", "Memcpy HtoD (Pinned -> Device)", "cudaStreamSynchronize", "cudaMalloc", "cudaLaunchKernel",
    "aten::item", "enumerate(DataLoader)#x", "ProfilerStep#1", "[memory]", "\ud800",
])
# fmt: on
arguments = st.fixed_dictionaries(
    {},
    optional={
        key: st.one_of(st.integers(0, 3), values)
        for key in ("device", "stream", "correlation", "bytes", "Device Type", "Device Id", "Bytes", "Addr")
    },
)
events = st.fixed_dictionaries(
    {"cat": st.sampled_from(kinds), "name": words},
    optional={
        "ph": st.sampled_from("Xi"),
        "pid": values,
        "tid": st.one_of(st.integers(0, 3), values),
        "ts": st.one_of(st.floats(0, 1000), numbers),
        "dur": st.one_of(st.floats(0, 100), numbers),
        "args": st.one_of(arguments, values),
    },
)
documents = st.one_of(
    st.lists(st.one_of(events, values), max_size=12),
    st.fixed_dictionaries(
        {"traceEvents": st.lists(events, max_size=12)}, optional={"deviceProperties": values, "x": values}
    ),
)


def trace() -> bytes:
    made = [kernel_event(at * 10, 7, key=at) for at in range(5)]
    made += [called("cudaLaunchKernel", at * 10 - 3, 2, key=at) for at in range(5)]
    made += [called("cudaDeviceSynchronize", 5, 20), operation("aten::item", 4, 30), copied(17, 2, 4096)]
    made += [memory(3, 512, **{"Total Allocated": 1024, "Total Reserved": 2048}), memory(4, -512, kind=0)]
    devices = [{"id": 0, "name": "GPU"}]
    return json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": made}).encode()


def judge_trace(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(data)
        return judged(path)


@SHORT
@given(documents)
def test_any_document_as_a_trace(document):
    judge_trace(json.dumps(document).encode())


def plausible(random_: random.Random) -> dict[str, Any]:
    """An event that is nearly always in order."""
    calls = [called(name, 0, 1) for name in ("cudaLaunchKernel", "cudaFree", "cudaStreamSynchronize")]
    others = [kernel_event(0, 1), copied(0, 1, 1), operation("aten::mm", 0, 1), memory(0, random_.randrange(-99, 99))]
    made = random_.choice([*calls, *others])
    made["ts"], made["dur"] = random_.uniform(0, 100), random_.choice([0, 0, random_.expovariate(0.2)])
    made["args"]["correlation"] = random_.randrange(12)
    return made


@SHORT
@given(st.integers(), st.integers(1, 40))
def test_plausible_traces_are_accepted_and_their_causes_sum_to_the_idle_time(seed, count):
    random_ = random.Random(seed)
    assert judge_trace(json.dumps([plausible(random_) for _ in range(count)]).encode())


@SHORT
@given(st.integers())
def test_changed_traces(seed):
    judge_trace(changed(random.Random(seed), trace()))


@SHORT
@given(st.integers())
def test_changed_packed_traces(seed):
    judge_trace(changed(random.Random(seed), gzip.compress(trace(), mtime=0)))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_long_trace_takes_little_beside_its_text(name, tmp_path):
    path = tmp_path / name
    synthetic_trace.write(path, 8_000)
    assert text_bytes(path) > 4 * SPARE_BYTES
    assert judged(path)


@pytest.mark.skipif(not SECONDS, reason="BRIM_FUZZ_SECONDS asks for a campaign")
@pytest.mark.timeout(0)
def test_campaign(capsys):
    """Changes upon changes: what was accepted is changed again."""
    seed = time.time_ns()
    random_ = random.Random(seed)
    origin = trace()
    pool, accepted, tried = [origin], 0, 0
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        data = changed(random_, random_.choice(pool))
        if tried % 10 == 9:
            data = gzip.compress(data)
        tried += 1
        if judge_trace(data):
            accepted += 1
            if len(data) < 100_000 and not data.startswith(b"\x1f\x8b"):
                pool = [*pool[-200:], data, origin]
    with capsys.disabled():
        print(f"\nseed {seed}: {tried} files, {accepted} accepted")
    assert tried > accepted > 0
