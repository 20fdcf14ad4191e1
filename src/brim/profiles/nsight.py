"""A reader of the SQLite exports of Nsight Systems (``nsys export --type sqlite``).

Unlike PyTorch's traces they have migrations of managed (unified) memory, each with its cause, and page faults.
Schema: "SQLite Schema Reference" of Nsight Systems' user guide, 2021 to 2025. Not every export has every table and
column, so each is looked up. The file is opened read-only and nothing in it is run: only real tables are read, each
in one scan.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.core.files import regular
from brim.errors import FormatError, UnsupportedError
from brim.profiles.activity import (
    COMPUTE,
    D2D,
    D2H,
    H2D,
    H2H,
    MEMSET,
    P2P,
    SYNCHRONIZE,
    UNKNOWN_COPY,
    Activity,
    call_kind,
    kernel_kind,
)
from brim.profiles.device import profile_of
from brim.profiles.figures import Profile

if TYPE_CHECKING:
    import sqlite3

_MAGIC = b"SQLite format 3\0"
_LONGEST_VALUE = 1 << 20  # bytes of a text or row
_STEPS_PER_BYTE = 20  # of SQLite's machine; a row of 60 bytes takes some 30
_FEWEST_BYTES = 12  # of a row in the file
_CACHE_KIB = 2048
# ENUM_CUDA_MEMCPY_OPER. Arrays (3 to 7) are the device's memory.
COPY_KINDS = {
    1: H2D,
    2: D2H,
    3: H2D,
    4: D2H,
    5: D2D,
    6: D2D,
    7: D2D,
    8: D2D,
    9: H2H,
    10: P2P,
    11: H2D,
    12: D2H,
    13: D2D,
}
UNIFIED = {11: "Host-to-Device", 12: "Device-to-Host", 13: "Device-to-Device"}
MANAGED = (4, 6)  # ENUM_CUDA_MEM_KIND: managed, managed static
_SYNCHRONIZATIONS = {
    1: "event",
    3: "stream",
    4: "context",
}  # ENUM_CUPTI_SYNC_TYPE; 2 makes a stream wait, not the host
_LOADERS = ("enumerate(DataLoader)", "dataloader", "data_loader", "DataLoader")
# Appended to names by torch's emit_nvtx (getNvtxStr in torch/csrc/profiler/util.cpp), different each time.
_NUMBERS = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = ")
_THREAD_BITS = (1 << 24) - 1
_KEY_BITS = 32
_WORDS = {H2D: "HtoD", D2H: "DtoH", D2D: "DtoD", P2P: "PtoP", H2H: "HtoH", UNKNOWN_COPY: "of unknown kind"}

Handler = tuple[str, dict[str, Any], Callable[..., None]]  # table, columns, and a function of a row's values


def is_sqlite(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def read(path: str | Path) -> Profile:
    """Read a profile. Without devices: nothing was recorded on a GPU.

    Raises FormatError if the file is missing, damaged, or no export of Nsight Systems.
    """
    request = f"Cannot read {path} as an SQLite export of Nsight Systems."
    try:
        path = regular(Path(path).resolve())
        size = path.stat().st_size
        with path.open("rb") as file:
            if not is_sqlite(file.read(len(_MAGIC))):
                raise FormatError(
                    request, "It is not an SQLite database.", "Export it: nsys export --type sqlite REPORT"
                )
    except OSError as error:
        raise FormatError(request, f"{error}.") from error
    with contextlib.closing(_open(path, request, size)) as database:
        return _Export(database, request, size).profile(str(path))


def _open(path: Path, request: str, size: int) -> sqlite3.Connection:
    """Open read-only, as a file that does not change: without journal, lock or any other file."""
    try:
        import sqlite3
    except ImportError as error:  # Pythons are built without it
        raise UnsupportedError(
            request, f"This Python has no SQLite: {error}.", "Use a Python with the sqlite3 module."
        ) from error
    try:
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise FormatError(request, f"{error}.") from error
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    database.text_factory = lambda data: data.decode("utf-8", "replace")
    left = [_STEPS_PER_BYTE * size // 10_000 + 100]

    def spent() -> bool:
        """Stop an endless scan: a damaged tree can contain a page many times."""
        left[0] -= 1
        return left[0] < 0

    database.set_progress_handler(spent, 10_000)
    return database


class _Export:
    """Puts an export's rows into columns. Handlers raise TypeError, ValueError or OverflowError for odd ones."""

    def __init__(self, database: sqlite3.Connection, request: str, size: int) -> None:
        self.database, self.request, self.size = database, request, size
        self.activity = Activity()
        self.count = 0
        self.tables: dict[str, set[str]] = {}
        self.texts: dict[Any, str] = {}
        self.zero_ns: int | None = None
        self.numbers: dict[Any, tuple[int, int]] = {}
        self.threads: dict[int, int] = {}
        self.faults = 0

    def profile(self, source: str) -> Profile:
        import sqlite3

        try:
            self.list_tables()
            self.read_facts()
            for table, columns, take in self.handlers():
                for row in self.rows(table, columns):
                    take(*row)
            if self.faults:
                self.activity.facts["page_faults_cpu"] = self.faults
        except FormatError:
            raise
        except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
            reason = f"It is damaged, or not as Nsight Systems writes it: {str(error)[:100]}."
            raise FormatError(self.request, reason) from error
        return profile_of(self.activity, source=source, kind="nsight", events=self.count, request=self.request)

    def list_tables(self) -> None:
        """List the real tables: views and virtual tables, which have no page of their own, could run code."""
        for pragma in ("trusted_schema = OFF", f"cache_size = -{_CACHE_KIB}", "mmap_size = 0", "temp_store = MEMORY"):
            self.database.execute(f"PRAGMA {pragma}")
        names = self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        ).fetchall()
        for (name,) in names:
            quoted = str(name).replace('"', '""')
            # 0: an ordinary column; generated ones are expressions
            columns = self.database.execute(f'PRAGMA table_xinfo("{quoted}")')
            self.tables[str(name)] = {str(column[1]) for column in columns if column[6] == 0}
        if not {"StringIds", "META_DATA_EXPORT"} & self.tables.keys():
            found_names = ", ".join(sorted(self.tables)[:5])
            raise FormatError(
                self.request,
                f"It has no tables of an Nsight Systems export; its tables: {found_names[:200] or 'none'}.",
            )

    def rows(self, table: str, columns: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table, none without it. ``columns``: names and defaults of missing values."""
        column_names = self.tables.get(table)
        if column_names is None:
            return
        chosen = ", ".join(
            f'ifnull("{name}", {default!r})' if name in column_names and default is not None else
            f'"{name}"' if name in column_names else repr(default).replace("None", "NULL")
            for name, default in columns.items()
        )  # fmt: skip
        limit = self.size // _FEWEST_BYTES
        for number, row in enumerate(self.database.execute(f"SELECT {chosen} FROM {table}")):
            if number > limit:
                raise FormatError(self.request, f"{table} has more rows than the file's size allows.")
            self.count += 1
            yield row

    def text(self, number: Any) -> str:
        """Look up a text by its number; most texts of a report are not needed."""
        text = self.texts.get(number)
        if text is None:
            row = None
            if "StringIds" in self.tables and isinstance(number, int):
                row = self.database.execute("SELECT value FROM StringIds WHERE id = ?", (number,)).fetchone()
            text = self.texts[number] = str(row[0]) if row else ""
        return text

    def read_facts(self) -> None:
        facts = self.activity.facts
        for name, value in self.rows("META_DATA_EXPORT", {"name": "", "value": ""}):
            if name in ("EXPORT_SCHEMA_VERSION", "EXPORT_PRODUCT_VERSION"):
                facts["schema" if "SCHEMA" in name else "version"] = str(value)[:80]
        for (duration_ns,) in self.rows("ANALYSIS_DETAILS", {"duration": 0}):
            facts["recorded_s"] = duration_ns * 1e-9
        for number, name in self.rows("TARGET_INFO_GPU", {"id": None, "name": ""}):
            self.activity.device_names[number] = str(name)[:200]
        self.count = 0

    def handlers(self) -> Iterator[Handler]:
        """Yield tables, their columns with defaults, and the handler of a row."""
        when = {"start": None, "end": None}
        where = {"deviceId": 0, "streamId": 0, "correlationId": -1, "globalPid": 0}
        copy = {"bytes": 0, "copyKind": 0, "srcKind": 7, "dstKind": 7, "migrationCause": 0}
        named = {"demangledName": None, "shortName": None}
        yield "CUPTI_ACTIVITY_KIND_KERNEL", when | where | named, self.kernel
        yield "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", when | where, self.graph
        yield "CUPTI_ACTIVITY_KIND_MEMCPY", when | where | copy, self.copy
        yield "CUPTI_ACTIVITY_KIND_MEMSET", when | where | {"bytes": 0, "memKind": 7}, self.memset
        call = {"globalTid": 0, "correlationId": -1, "nameId": None}
        yield "CUPTI_ACTIVITY_KIND_RUNTIME", when | call, self.call
        yield "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", when | {"globalPid": 0, "syncType": 0}, self.synchronization
        yield "NVTX_EVENTS", when | {"globalTid": 0, "text": None, "textId": None}, self.annotation
        yield "CUDA_UM_CPU_PAGE_FAULT_EVENTS", {"start": 0}, self.cpu_fault
        yield "CUDA_UM_GPU_PAGE_FAULT_EVENTS", {"deviceId": 0, "numberOfPageFaults": 1}, self.gpu_fault
        memory = {"start": None, "deviceId": 0, "address": -1, "bytes": 0, "memKind": 2, "memoryOperationType": 0}
        yield "CUDA_GPU_MEMORY_USAGE_EVENTS", memory, self.memory

    def span(self, start_ns: int, end_ns: int) -> tuple[float, float]:
        if self.zero_ns is None:
            self.zero_ns = start_ns
        return (start_ns - self.zero_ns) * 1e-9, max(0, end_ns - start_ns) * 1e-9

    def key(self, correlation: int, process: int) -> int:
        """Join a correlation number, unique in its process, with the process in the upper bits of a global number."""
        return correlation | (process >> 24 & _THREAD_BITS) << _KEY_BITS if 0 <= correlation < 1 << _KEY_BITS else -1

    def name(self, number: Any, kind_of: Callable[[str], int]) -> tuple[int, int]:
        """Return the number and the kind of the kernel or call with this name."""
        number_and_kind = self.numbers.get((kind_of, number))
        if number_and_kind is None:
            text = self.text(number)
            number_and_kind = self.numbers[kind_of, number] = (self.activity.texts.number(text), kind_of(text))
        return number_and_kind

    def kernel(self, start: int, end: int, device: int, stream: int, correlation: int, pid: int, *names: Any) -> None:
        number, kind = self.name(next((name for name in names if name is not None), None), kernel_kind)
        key = self.key(correlation, pid)
        self.activity.device.add(*self.span(start, end), kind, device, stream, key, 0, number, 0, 0)

    def graph(self, start: int, end: int, device: int, stream: int, correlation: int, pid: int) -> None:
        """Add a CUDA graph, whose kernels are not recorded one by one."""
        number, key = self.activity.texts.number("CUDA graph"), self.key(correlation, pid)
        self.activity.device.add(*self.span(start, end), COMPUTE, device, stream, key, 0, number, 0, 0)

    def copy(
        self, start: int, end: int, device: int, stream: int, correlation: int, pid: int, size: int, *kinds: int
    ) -> None:
        what, source, target, cause = kinds
        kind = COPY_KINDS.get(what, UNKNOWN_COPY)
        unified = what in UNIFIED or source in MANAGED or target in MANAGED
        text = f"unified {UNIFIED[what]}" if what in UNIFIED else f"Memcpy {_WORDS[kind]}"
        number = self.activity.texts.number(text)
        key = self.key(correlation, pid)
        self.activity.device.add(
            *self.span(start, end), kind, device, stream, key, size, number, unified, cause if 0 <= cause < 127 else 0
        )

    def memset(self, start: int, end: int, device: int, stream: int, correlation: int, pid: int, *what: int) -> None:
        size, memory = what
        number = self.activity.texts.number("Memset")
        key = self.key(correlation, pid)
        self.activity.device.add(
            *self.span(start, end), MEMSET, device, stream, key, size, number, memory in MANAGED, 0
        )

    def call(self, start: int, end: int, thread: int, correlation: int, name: Any) -> None:
        number, kind = self.name(name, call_kind)
        thread_number = self.threads.setdefault(thread, len(self.threads))
        self.activity.call.add(*self.span(start, end), kind, self.key(correlation, thread), thread_number, number)

    def synchronization(self, start: int, end: int, process: int, kind: int) -> None:
        what = _SYNCHRONIZATIONS.get(kind)
        if what is None:
            return
        number = self.activity.texts.number(f"{what} synchronization")
        thread_number = self.threads.setdefault(process, len(self.threads))
        self.activity.call.add(*self.span(start, end), SYNCHRONIZE, -1, thread_number, number)

    def annotation(self, start: int, end: int | None, thread: int, text: str | None, number: int | None) -> None:
        """Add a range of the program, such as an operator under torch's ``emit_nvtx``."""
        if end is None:  # a mark, not a range
            return
        name = self.text(number) if text is None else text
        span = self.span(start, end)
        if name.startswith(_LOADERS):
            self.activity.loads.add(*span)
        else:
            thread_number = self.threads.setdefault(thread, len(self.threads))
            operator = _NUMBERS.split(name, maxsplit=1)[0]
            self.activity.operations.add(*span, thread_number, self.activity.texts.number(operator))

    def cpu_fault(self, start: int) -> None:
        self.faults += 1

    def gpu_fault(self, device: int, count: int) -> None:
        faults = self.activity.page_faults_gpu
        faults[device] = faults.get(device, 0) + count

    def memory(self, start: int, device: int, address: int, size: int, kind: int, operation: int) -> None:
        """Add an allocation (operation 0) or a free of device (2) or managed memory."""
        if kind in (2, *MANAGED):
            time, _ = self.span(start, start)
            sign = 1 if operation == 0 else -1
            where = address & ((1 << 63) - 1) if address != -1 else -1
            self.activity.memory.add(time, device, sign * size, where, -1, -1)
