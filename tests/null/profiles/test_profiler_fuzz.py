"""Whatever is in a trace or a database, reading it gives a result or one kind of error, within bounds of memory.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.errors import FormatError
from brim.profiles import nsight
from brim.profiles import profiler as profile
from brim.profiles.figures import Profile
from brim.units import KIB
from support import synthetic_trace
from support.damaged import changed
from support.nsight_database import NAMES, PROCESS, TABLES, call, copy, kernel, on_device, write
from support.profiles import called, copied, memory, operation
from support.profiles import kernel as kernel_event

SECONDS = float(os.environ.get("BRIM_FUZZ_SECONDS", "0"))
SHORT = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


# What a reader may take at most, beside what it takes for a file with nothing in it: so many times the text, and some
# more for devices and errors. Rows of a database are shorter than the text of events.
TIMES = {profile.read: 4, nsight.read: 8}
SPARE_BYTES = 256 * KIB


def peak_bytes(read: Callable[[Path], Profile], path: Path) -> tuple[Profile | None, int]:
    """What was read, None if it was refused, and what that took."""
    tracemalloc.start()
    try:
        return read(path), tracemalloc.get_traced_memory()[1]
    except FormatError:
        return None, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@functools.cache
def fixed_bytes(read: Callable[[Path], Profile]) -> int:
    """For a file with nothing in it. The first call imports, so the second one counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty"
        if read is profile.read:
            path.write_bytes(gzip.compress(b"[]"))
        else:
            write(path, {"StringIds": NAMES})
        return [peak_bytes(read, path)[1] for _ in range(2)][1]


def text_bytes(path: Path) -> int:
    """A packed file may take what its text may."""
    count = 0
    with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
        while block := file.read(1 << 16):
            count += len(block)
    return max(count, path.stat().st_size)


def judged(read: Callable[[Path], Profile], path: Path) -> bool:
    """Whether ``path`` was accepted. Raises for any error but one, a result that is not whole, and for memory."""
    most = fixed_bytes(read) + TIMES[read] * text_bytes(path) + SPARE_BYTES
    found, taken_bytes = peak_bytes(read, path)
    assert taken_bytes <= most, (taken_bytes, most, path.stat().st_size)
    if found is not None:
        json.dumps(found.to_json(), allow_nan=False)
        for device in found.devices:
            assert sum(device.idle_by_cause.values()) == pytest.approx(device.idle_s, rel=1e-6, abs=1e-9)
    return found is not None


# -- traces

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
        return judged(profile.read, path)


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


# -- databases


def database() -> bytes:
    rows = {
        "StringIds": NAMES,
        "TARGET_INFO_GPU": [{"id": 0, "name": "GPU"}],
        "CUPTI_ACTIVITY_KIND_KERNEL": [kernel(at * 100, at * 100 + 70, at) for at in range(20)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [copy(at * 50, at * 50 + 9, 4096, at % 14, at % 6) for at in range(20)],
        "CUPTI_ACTIVITY_KIND_MEMSET": [on_device(7, 9, bytes=64, memKind=2, value=0)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [call(at * 90, at * 90 + 20, 2 + at % 2, at) for at in range(20)],
        "CUDA_UM_CPU_PAGE_FAULT_EVENTS": [{"start": 1, "globalPid": PROCESS, "address": 4096}],
    }
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder) / "report.sqlite", rows).read_bytes()


DATABASE = database()


def judge_database(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.sqlite"
        path.write_bytes(data)
        return judged(nsight.read, path)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_long_trace_takes_little_beside_its_text(name, tmp_path):
    path = tmp_path / name
    synthetic_trace.write(path, 8_000)
    assert text_bytes(path) > 4 * SPARE_BYTES
    assert judged(profile.read, path)


def test_a_long_database_takes_little_beside_its_rows(tmp_path):
    rows = {
        "StringIds": NAMES,
        "CUPTI_ACTIVITY_KIND_KERNEL": [kernel(at * 100, at * 100 + 70, at) for at in range(10_000)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [call(at * 90, at * 90 + 20, 2, at) for at in range(10_000)],
    }
    path = write(tmp_path / "report.sqlite", rows)
    assert path.stat().st_size > 4 * SPARE_BYTES
    assert judged(nsight.read, path)


@SHORT
@given(st.integers())
def test_changed_databases(seed):
    judge_database(changed(random.Random(seed), DATABASE))


integers = st.integers(0, 200) | st.integers(-(1 << 63), (1 << 63) - 1)
cells = integers | st.none() | st.floats(allow_nan=False) | st.binary(max_size=4) | st.text(max_size=4)  # NaN is NULL
tables = st.dictionaries(
    st.sampled_from(sorted(TABLES.keys() - {"META_DATA_EXPORT"})),
    st.lists(st.lists(cells, min_size=20, max_size=20), max_size=6),
    max_size=5,
)


@pytest.mark.thorough
@SHORT
@given(tables)
def test_any_values_in_the_tables(found):
    """As SQLite lets them be: the kind of a column is only a wish there."""
    made = {}
    for table, rows in found.items():
        names = [part.split()[0] for part in TABLES[table].split(",")]
        needed = {part.split()[0] for part in TABLES[table].split(",") if "NOT NULL" in part}
        made[table] = [
            {name: 1 if value is None and name in needed else value for name, value in zip(names, row, strict=False)}
            for row in rows
        ]
    if "StringIds" in made:
        made["StringIds"] = [row | {"id": number} for number, row in enumerate(made["StringIds"])]
    with tempfile.TemporaryDirectory() as folder:
        judged(nsight.read, write(Path(folder) / "report.sqlite", made))


@pytest.mark.skipif(not SECONDS, reason="BRIM_FUZZ_SECONDS asks for a campaign")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("judge", [judge_trace, judge_database], ids=["trace", "database"])
def test_campaign(judge, capsys):
    """Changes upon changes: what was accepted is changed again."""
    seed = time.time_ns()
    random_ = random.Random(seed)
    origin = trace() if judge is judge_trace else DATABASE
    pool, accepted, tried = [origin], 0, 0
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        data = changed(random_, random_.choice(pool))
        if judge is judge_trace and tried % 10 == 9:
            data = gzip.compress(data)
        tried += 1
        if judge(data):
            accepted += 1
            if len(data) < 100_000 and not data.startswith(b"\x1f\x8b"):
                pool = [*pool[-200:], data, origin]
    with capsys.disabled():
        print(f"\nseed {seed}: {tried} files, {accepted} accepted")
    assert tried > accepted > 0
