"""Nsight Systems exports: the same figures, and what managed memory cost; odd and hostile databases are refused."""

from __future__ import annotations

import sqlite3
import sys
import tracemalloc
from pathlib import Path

import pytest

from brim.core import EventKind
from brim.errors import FormatError, UnsupportedError
from brim.profiles import nsight
from brim.units import MIB
from support.accuracy import ground_truth
from support.nsight_database import NAMES, PROCESS, TABLES, THREAD, call, copy, kernel, on_device, write

US = 1000
T = 10**17  # nanoseconds, as large as real ones
REPORT = ground_truth.folder() / "nsys" / "openmp_tutorial_report1.sqlite"


def rows() -> dict[str, list[dict[str, object]]]:
    return {
        "StringIds": NAMES,
        "TARGET_INFO_GPU": [{"id": 0, "name": "NVIDIA GH200 480GB"}],
        "CUPTI_ACTIVITY_KIND_KERNEL": [kernel(100 * US, 110 * US, 1), kernel(160 * US, 170 * US, 2)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [
            copy(112 * US, 122 * US, 2 * MIB, 11, 2),
            copy(122 * US, 123 * US, MIB, 11, 1),
            copy(124 * US, 126 * US, MIB, 12, 4),
            copy(130 * US, 136 * US, 4 * MIB, 1),
        ],
        "CUPTI_ACTIVITY_KIND_MEMSET": [on_device(140 * US, 141 * US, 0, bytes=64, memKind=2, value=0)],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [call(90 * US, 95 * US, 2, 1), call(150 * US, 155 * US, 2, 2)],
        "CUDA_UM_CPU_PAGE_FAULT_EVENTS": [{"start": 1, "globalPid": PROCESS, "address": 4096}] * 3,
        "CUDA_UM_GPU_PAGE_FAULT_EVENTS": [
            {"start": 1, "end": 2, "deviceId": 0, "address": 1, "numberOfPageFaults": count} for count in (40, 2)
        ],
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.sqlite"


def test_a_python_without_sqlite_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, rows())
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(UnsupportedError, match="This Python has no SQLite"):
        nsight.read(path)


def test_migrations_are_told_by_cause_and_their_share_by_time_bytes_and_number(path):
    found = nsight.read(write(path, rows()))
    (one,) = found.devices
    assert one.name == "NVIDIA GH200 480GB"
    assert {cause: (m.count, m.bytes) for cause, m in one.migrations.items()} == {
        "page fault": (1, 2 * MIB),
        "prefetch": (1, MIB),
        "eviction": (1, MIB),
    }
    assert one.unified_share_time == pytest.approx(13 / 20)
    assert one.unified_share_bytes == pytest.approx(4 * MIB / (8 * MIB + 64))
    assert one.unified_share_count == pytest.approx(3 / 5)
    assert one.memory_operations_share == pytest.approx(20 / 40)
    assert one.page_faults == 42
    assert found.facts["page_faults_cpu"] == 3
    assert found.facts["schema"] == "3.20.2"


def test_time_and_causes_are_those_of_the_other_profiler(path):
    (one,) = nsight.read(write(path, rows())).devices
    assert one.wall_s == pytest.approx(70e-6)
    assert one.busy_s == pytest.approx(20e-6)
    assert one.copy_s == pytest.approx(20e-6)
    assert one.idle_by_cause == pytest.approx({"copy": 20e-6, "cpu": 20e-6, "launch": 10e-6})
    assert one.timeline.copied_bytes("ram", "vram") == 7 * MIB
    assert any(event.label == "unified Host-to-Device" for event in one.timeline)
    assert one.kernels[0].name == "gemm"


def test_synchronizations_collectives_and_ranges_count(path):
    body = rows()
    body["CUPTI_ACTIVITY_KIND_KERNEL"].append(kernel(170 * US, 190 * US, 3, name=4))
    body["CUPTI_ACTIVITY_KIND_KERNEL"].append(kernel(230 * US, 240 * US, 4))
    body["CUPTI_ACTIVITY_KIND_RUNTIME"] += [call(165 * US, 200 * US, 3, 9), call(226 * US, 228 * US, 2, 4)]
    body["NVTX_EVENTS"] = [
        {"start": 195 * US, "end": 215 * US, "text": "enumerate(DataLoader)#next", "globalTid": THREAD},
        {"start": 220 * US, "end": 229 * US, "textId": 5, "globalTid": THREAD},
        {"start": 221 * US, "end": None, "text": "a mark", "globalTid": THREAD},
    ]
    (one,) = nsight.read(write(path, body)).devices
    assert one.collective_s == pytest.approx(20e-6)
    # The wait had lasted for 5 us when the gap began, so much of the host's 11 us after it are its doing too.
    expected = {
        "collective": 20e-6,
        "synchronization": 15e-6,
        "data loader": 15e-6,
        "cpu": 6e-6 + 20e-6,
        "launch": 4e-6,
    }
    for cause, seconds in expected.items():
        extra = {"launch": 10e-6}.get(cause, 0.0)
        assert one.idle_by_cause[cause] == pytest.approx(seconds + extra), cause


def test_a_graph_that_was_recorded_as_a_whole_is_computing(path):
    body = rows() | {"CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [on_device(170 * US, 270 * US, 7, graphId=1)]}
    (one,) = nsight.read(write(path, body)).devices
    assert one.busy_s == pytest.approx(120e-6)
    assert one.kernels[0].name == "CUDA graph"


def test_memory_that_cuda_gave_is_in_the_timeline(path):
    event = {"globalPid": PROCESS, "deviceId": 0, "address": 8192, "memKind": 2}
    body = rows() | {
        "CUDA_GPU_MEMORY_USAGE_EVENTS": [
            event | {"start": 1, "bytes": 8 * MIB, "memoryOperationType": 0},
            event | {"start": 2, "bytes": MIB, "memoryOperationType": 0, "memKind": 1},
            event | {"start": 3, "bytes": 8 * MIB, "memoryOperationType": 1},
        ]
    }
    (one,) = nsight.read(write(path, body)).devices
    assert one.timeline.peak_bytes("vram") == 8 * MIB
    assert one.timeline.peak_bytes("ram") == 0


@pytest.mark.parametrize(
    "without", [("greenContextId", "globalPid"), ("migrationCause", "virtualAddress"), ("srcKind",)]
)
def test_older_versions_lack_columns(path, without):
    (one,) = nsight.read(write(path, rows(), without=without)).devices
    assert one.busy_s == pytest.approx(20e-6)
    assert one.unified_share_count == pytest.approx(3 / 5)


@pytest.mark.parametrize("table", [table for table in rows() if table != "StringIds"])
def test_tables_are_made_only_when_needed(path, table):
    body = rows()
    del body[table]
    assert len(nsight.read(write(path, body)).devices) == 1


def test_a_report_of_no_gpu_has_no_devices(path):
    assert nsight.read(write(path, {"StringIds": NAMES})).devices == ()


def test_processes_with_the_same_numbers_are_not_mixed_up(path):
    body = rows()
    other = call(20 * US, 21 * US, 2, 2) | {"globalTid": 78 << 24}
    body["CUPTI_ACTIVITY_KIND_RUNTIME"].append(other)
    (one,) = nsight.read(write(path, body)).devices
    assert one.idle_by_cause["launch"] == pytest.approx(10e-6)


def test_a_database_of_something_else_is_refused(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.close()
    with pytest.raises(FormatError, match="bookmarks"):
        nsight.read(path)


def test_views_are_not_run(path):
    write(path, {"StringIds": NAMES})
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS "
            "(SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end, 0 AS deviceId FROM n"
        )
    database.close()
    assert nsight.read(path).devices == ()


def test_generated_columns_are_not_computed(path):
    write(path, {"StringIds": NAMES})
    with sqlite3.connect(path) as database:
        columns = TABLES["CUPTI_ACTIVITY_KIND_MEMSET"].replace(
            "bytes INTEGER NOT NULL", "bytes AS (length(zeroblob(5)))"
        )
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({columns})")
        database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, contextId, streamId) "
            "VALUES (1, 2, 0, 0, 0)"
        )
    database.close()
    assert nsight.read(path).devices[0].copies[0].bytes == 0


ODD = ["text", 1.5, b"bytes", 1 << 62]
READ = {("start", 1.5), *(("copyKind", value) for value in ODD)}  # a REAL is a time too; who knows the next kind


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("column", ["start", "deviceId", "bytes", "copyKind"])
def test_values_of_another_kind_are_refused(path, column, value):
    body = rows()
    body["CUPTI_ACTIVITY_KIND_MEMCPY"][0][column] = value
    write(path, body)
    if (column, value) not in READ:
        with pytest.raises(FormatError, match=r"report\.sqlite"):
            nsight.read(path)
        return
    kinds = {figures.kind: figures.count for figures in nsight.read(path).devices[0].copies if not figures.unified}
    assert kinds["H2D"] == 1
    assert kinds.get("unknown", 0) == (column == "copyKind")


@pytest.mark.parametrize("cut", [0, 15, 16, 100, 5000])
def test_what_is_no_database_or_cut_off_is_refused(path, cut):
    write(path, rows())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FormatError, match=r"report\.sqlite"):
        nsight.read(path)


def test_a_missing_file_is_refused(path):
    with pytest.raises(FormatError, match="No such file"):
        nsight.read(path)


def test_reading_changes_nothing_and_leaves_nothing_behind(path):
    write(path, rows())
    before = path.read_bytes()
    nsight.read(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_odd_file_names_are_names(tmp_path):
    path = tmp_path / "a ?mode=rwc#%00 report.sqlite"
    assert len(nsight.read(write(path, rows())).devices) == 1


@pytest.mark.thorough
def test_memory_stays_in_proportion_to_the_file(path):
    body = rows()
    body["CUPTI_ACTIVITY_KIND_KERNEL"] = [kernel(T + at * 10, T + at * 10 + 8, at) for at in range(20_000)]
    body["CUPTI_ACTIVITY_KIND_RUNTIME"] = [call(T + at * 10, T + at * 10 + 1, 2, at) for at in range(20_000)]
    write(path, body)
    tracemalloc.start()
    try:
        found = nsight.read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.events > 40_000
    assert peak_bytes < 4 * path.stat().st_size + 4 * MIB


@pytest.mark.skipif(not REPORT.exists(), reason="the published report is not here")
def test_the_published_report_recorded_no_gpu():
    found = nsight.read(REPORT)
    assert found.devices == ()
    assert found.facts["schema"] == "3.4.0"
    assert found.facts["recorded_s"] == pytest.approx(154.46084086)


def test_ranges_of_operators_are_named_by_the_operator_alone(path):
    """PyTorch's emit_nvtx writes numbers and shapes behind the name, so that no two names are alike."""
    body = rows()
    body["CUPTI_ACTIVITY_KIND_KERNEL"] = [kernel(at * 1000 * US, at * 1000 * US + US, at) for at in range(30)]
    body["CUPTI_ACTIVITY_KIND_RUNTIME"] = [call(at * 1000 * US - 9, at * 1000 * US - 5, 2, at) for at in range(30)]
    suffixes = (
        ", seq = {0}, op_id = {1}, sizes = [[{0}, 8], []], input_op_ids = [({0},0)]",
        ", op_id = {0}",
        ", sizes = [[{0}]]",
        "",
    )
    body["NVTX_EVENTS"] = [
        {
            "start": at * 1000 * US - 900 * US,
            "end": at * 1000 * US - 1,
            "text": "aten::mm" + suffixes[at % 4].format(at, at + 5),
            "globalTid": THREAD,
        }
        for at in range(30)
    ]
    (one,) = nsight.read(write(path, body)).devices
    assert {gap.label for gap in one.gaps} == {"aten::mm"}
    assert {event.label for event in one.timeline if event.label.startswith("aten")} == {"aten::mm"}


def test_memory_without_an_address_has_none(path):
    event = {"start": 1, "globalPid": PROCESS, "deviceId": 0, "bytes": MIB, "memKind": 2, "memoryOperationType": 0}
    body = rows() | {"CUDA_GPU_MEMORY_USAGE_EVENTS": [event, event | {"start": 2, "address": 4096}]}
    (one,) = nsight.read(write(path, body)).devices
    assert [event.address for event in one.timeline if event.kind is EventKind.ALLOC] == [-1, 4096]
