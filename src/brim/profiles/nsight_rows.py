"""The tables of Nsight Systems' exports that matter here, and what each row of them becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

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
# What torch's emit_nvtx writes behind a name (getNvtxStr in torch/csrc/profiler/util.cpp): no two would be alike.
_NUMBERS = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = ")
_THREAD_BITS = (1 << 24) - 1
_KEY_BITS = 32

Take = Callable[..., None]
Row = tuple[str, dict[str, Any], Take]


class Rows:
    """Takes rows into an Activity. Raises TypeError, ValueError or OverflowError for odd ones."""

    def __init__(self, activity: Activity, text: Callable[[Any], str]) -> None:
        """``text`` gives the text of a number."""
        self.activity, self.text = activity, text
        self.zero_ns: int | None = None
        self.numbers: dict[Any, tuple[int, int]] = {}
        self.threads: dict[int, int] = {}
        self.faults = 0

    def wanted(self) -> Iterator[Row]:
        """Tables, their columns with defaults, and who takes a row."""
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
        """Correlation numbers are those of one process. The process is in the upper bits of a global number."""
        return correlation | (process >> 24 & _THREAD_BITS) << _KEY_BITS if 0 <= correlation < 1 << _KEY_BITS else -1

    def name(self, number: Any, kind_of: Callable[[str], int]) -> tuple[int, int]:
        """A text's number among ours, and what it is the name of."""
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
        """A CUDA graph that ran as a whole: its kernels are not in their table then."""
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
        """A range of the program's own. Torch's ``emit_nvtx`` names operators so."""
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

    def count_faults(self) -> None:
        if self.faults:
            self.activity.facts["page_faults_cpu"] = self.faults

    def memory(self, start: int, device: int, address: int, size: int, kind: int, operation: int) -> None:
        """What CUDA gave (operation 0) or took back: device (2) and managed memory."""
        if kind in (2, *MANAGED):
            time, _ = self.span(start, start)
            sign = 1 if operation == 0 else -1
            where = address & ((1 << 63) - 1) if address != -1 else -1
            self.activity.memory.add(time, device, sign * size, where, -1, -1)


_WORDS = {H2D: "HtoD", D2H: "DtoH", D2D: "DtoD", P2P: "PtoP", H2H: "HtoH", UNKNOWN_COPY: "of unknown kind"}
