"""Makes traces as PyTorch's profiler writes them, of any length: a training loop that waits for data now and then."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KERNELS = [
    f"void at::native::kernel_{i}<4, at::native::Functor<float>, at::detail::Array<char*, 2> >" for i in range(60)
]
_HEADER = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "A synthetic GPU", "totalGlobalMem": 1 << 34}]}


def events(count: int) -> Iterator[dict[str, Any]]:
    """``count`` events: operators, launches, kernels, arrows, copies, allocations, as many of each as real traces."""
    random_ = random.Random(0)
    made, number, clock_us, device_us = 0, 0, 1_000.0, 1_000.0
    total = 1 << 30
    while made < count:
        number += 1
        clock_us += random_.uniform(4.0, 12.0)
        device_us = max(device_us, clock_us + 5.0)
        took_us = random_.uniform(1.0, 15.0)
        size = random_.choice((1 << 10, 1 << 18, 1 << 22)) * (1 if number % 2 else -1)
        total = max(0, total + size)
        batch = [*_asked(number, clock_us, size, total), *_done(random_, number, clock_us, device_us, took_us)]
        device_us += took_us
        if number % 2000 == 0:
            clock_us = max(clock_us, device_us) + 20.0
        yield from batch[: count - made]
        made += len(batch)


def _asked(number: int, clock_us: float, size: int, total: int) -> list[dict[str, Any]]:
    """What the host does for one kernel or copy."""
    where = {"pid": 100, "tid": 100}
    shapes = {"External id": number, "Input Dims": [[8, 128, 768], [768]], "Ev Idx": number}
    call = "cudaMemcpyAsync" if number % 50 == 0 else "cudaLaunchKernel"
    memory = {"Device Type": 1, "Device Id": 0, "Addr": 1 << 40, "Bytes": size}
    memory |= {"Total Allocated": total, "Total Reserved": 1 << 31}
    return [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::operator_{number % 40}"}
        | (where | {"ts": clock_us, "dur": 9.5, "args": shapes}),
        {"ph": "X", "cat": "cuda_runtime", "name": call}
        | (where | {"ts": clock_us + 2, "dur": 3.25, "args": {"cbid": 211, "correlation": number}}),
        {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"}
        | (where | {"ts": clock_us + 1, "args": memory}),
    ]


def _done(
    random_: random.Random, number: int, clock_us: float, device_us: float, took_us: float
) -> list[dict[str, Any]]:
    """What the device does for it, and the arrow from one to the other."""
    arguments: dict[str, Any] = {"device": 0, "context": 1, "stream": 7, "correlation": number, "queued": 0}
    if number % 50 == 0:
        kind, name = "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"
        arguments["bytes"] = random_.choice((1 << 10, 1 << 18, 1 << 22))
    else:
        kind, name = "kernel", random_.choice(_KERNELS)
        arguments |= {"grid": [256, 1, 1], "block": [128, 1, 1]}
    arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
    return [
        {
            "ph": "X",
            "cat": kind,
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": device_us,
            "dur": took_us,
            "args": arguments,
        },
        arrow | {"ph": "s", "pid": 100, "tid": 100, "ts": clock_us + 2},
        arrow | {"ph": "f", "pid": 0, "tid": 7, "ts": device_us, "bp": "e"},
    ]


def write(path: Path, count: int) -> None:
    """A ``.json`` file, or ``.json.gz``, of ``count`` events."""
    with gzip.open(path, "wt", compresslevel=3) if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(_HEADER)[:-1] + ',\n"traceEvents": [\n')
        for number, event in enumerate(events(count)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")
