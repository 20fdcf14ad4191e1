"""Events as PyTorch's profiler writes them. Times are microseconds."""

from __future__ import annotations

from typing import Any


def kernel(start_us: float, took_us: float, *, key: int = -1, name: str = "gemm", stream: int = 7) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": key}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start_us,
        "dur": took_us,
        "args": args,
    }


def copied(start_us: float, took_us: float, size: int, *, way: str = "HtoD (Pinned -> Device)") -> dict[str, Any]:
    made = kernel(start_us, took_us, name=f"Memcpy {way}", stream=20)
    made["args"]["bytes"] = size
    return made | {"cat": "gpu_memcpy"}


def called(name: str, start_us: float, took_us: float, *, key: int = -1, thread: int = 5) -> dict[str, Any]:
    made = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 9, "tid": thread, "ts": start_us, "dur": took_us}
    return made | {"args": {"cbid": 1, "correlation": key}}


def operation(name: str, start_us: float, took_us: float, *, kind: str = "cpu_op", thread: int = 5) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "ts": start_us, "dur": took_us, "args": {}}


def memory(time_us: float, size: int, *, kind: int = 1, **more: int) -> dict[str, Any]:
    args = {"Device Type": kind, "Device Id": 0 if kind else -1, "Bytes": size, "Addr": 4096} | more
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 9,
        "tid": 5,
        "ts": time_us,
        "args": args,
    }
