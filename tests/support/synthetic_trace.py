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
_SIZES = (1 << 10, 1 << 18, 1 << 22)
_HEADER = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "A synthetic GPU", "totalGlobalMem": 1 << 34}]}


class _Memory:
    """An allocator: some hundred blocks live, and the place of one that was freed is given again."""

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.live: list[tuple[int, int]] = []
        self.freed: dict[int, list[int]] = {size: [] for size in _SIZES}
        self.end = 1 << 40
        self.total = 1 << 30  # held before the recording

    def event(self) -> dict[str, Any]:
        if len(self.live) < 200 or self.random.random() < 0.5:
            size = self.random.choice(_SIZES)
            address = self.freed[size].pop() if self.freed[size] else self.end
            self.end = max(self.end, address + size)
            self.live.append((address, size))
        else:
            index = self.random.randrange(len(self.live))
            self.live[index], self.live[-1] = self.live[-1], self.live[index]
            address, size = self.live.pop()
            self.freed[size].append(address)
            size = -size
        self.total += size
        made = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": size}
        return made | {"Total Allocated": self.total, "Total Reserved": self.end - (1 << 40) + (1 << 30)}


def events(count: int) -> Iterator[dict[str, Any]]:
    """``count`` events: operators, launches, kernels, arrows, copies, allocations, as many of each as real traces."""
    random_ = random.Random(0)
    made, number, clock_us, device_us = 0, 0, 1_000.0, 1_000.0
    memory = _Memory(random_)
    while made < count:
        number += 1
        clock_us += random_.uniform(4.0, 12.0)
        device_us = max(device_us, clock_us + 5.0)
        took_us = random_.uniform(1.0, 15.0)
        batch = [*_asked(number, clock_us, memory.event()), *_done(random_, number, clock_us, device_us, took_us)]
        device_us += took_us
        if number % 2000 == 0:
            clock_us = max(clock_us, device_us) + 20.0
        yield from batch[: count - made]
        made += len(batch)


def _asked(number: int, clock_us: float, memory: dict[str, Any]) -> list[dict[str, Any]]:
    """What the host does for one kernel or copy."""
    where = {"pid": 100, "tid": 100}
    shapes = {"External id": number, "Input Dims": [[8, 128, 768], [768]], "Ev Idx": number}
    call = "cudaMemcpyAsync" if number % 50 == 0 else "cudaLaunchKernel"
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
        arguments["bytes"] = random_.choice(_SIZES)
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
