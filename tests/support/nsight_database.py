"""Databases as Nsight Systems exports them, from its documented schema, old and new."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMON = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL"
ASKED = "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
SHAPES = ("registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory")
SHAPES += ("dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "sharedMemoryExecuted", "graphNodeId")
TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT, busLocation TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{COMMON}, greenContextId INTEGER, {ASKED}, demangledName INTEGER NOT NULL, "
    "shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, "
    + ", ".join(f"{name} INTEGER" for name in SHAPES),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{COMMON}, greenContextId INTEGER, {ASKED}, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{COMMON}, greenContextId INTEGER, {ASKED}, bytes INTEGER NOT NULL, "
    "copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER, migrationCause INTEGER, virtualAddress INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{COMMON}, {ASKED}, value INTEGER, bytes INTEGER NOT NULL, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, "
    "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{COMMON}, {ASKED}, syncType INTEGER NOT NULL, eventId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, "
    "textId INTEGER",
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": "start INTEGER NOT NULL, globalPid INTEGER, address INTEGER NOT NULL",
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "address INTEGER NOT NULL, numberOfPageFaults INTEGER NOT NULL",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "start INTEGER NOT NULL, globalPid INTEGER, deviceId INTEGER NOT NULL, "
    "address INTEGER, bytes INTEGER, memKind INTEGER, memoryOperationType INTEGER",
}  # fmt: skip

PROCESS, THREAD = 77 << 24, 77 << 24 | 5
Row = Mapping[str, Any]


def write(path: Path, rows: Mapping[str, Sequence[Row]], *, without: Sequence[str] = ()) -> Path:
    """A database with these rows, made of the tables that have any. ``without``: columns that this version lacks."""
    rows = {"META_DATA_EXPORT": [{"name": "EXPORT_SCHEMA_VERSION", "value": "3.20.2"}], **rows}
    with sqlite3.connect(path) as database:
        for table, values in rows.items():
            columns = [part.strip() for part in TABLES[table].split(",")]
            columns = [column for column in columns if column.split()[0] not in without]
            database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            names = {column.split()[0] for column in columns}
            for row in values:
                kept = {name: value for name, value in row.items() if name in names}
                marks = ", ".join("?" * len(kept))
                database.execute(f"INSERT INTO {table} ({', '.join(kept)}) VALUES ({marks})", list(kept.values()))
    database.close()
    return path


def on_device(start: int, end: int, key: int = 1, **more: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": key} | (
        {"globalPid": PROCESS} | more
    )


def kernel(start: int, end: int, key: int = 1, name: int = 1) -> dict[str, Any]:
    return on_device(start, end, key, demangledName=name, shortName=name) | dict.fromkeys(SHAPES, 100_000)


def copy(start: int, end: int, size: int, kind: int, cause: int | None = None) -> dict[str, Any]:
    return on_device(start, end, 0, bytes=size, copyKind=kind, srcKind=1, dstKind=2, migrationCause=cause)


def call(start: int, end: int, name: int, key: int) -> dict[str, Any]:
    return {"start": start, "end": end, "eventClass": 0, "globalTid": THREAD, "correlationId": key} | (
        {"nameId": name, "returnValue": 0}
    )


NAMES = [
    {"id": number, "value": value}
    for number, value in enumerate(
        ("", "gemm", "cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "ncclKernel", "aten::linear"), 0
    )
]
