"""Optimizer states on disk against what the disk gives: one step against a raw read and write of the same bytes."""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Timeline
from brim.memory.tiers import cpu_memory
from brim.techniques.optimizer_offload.state_blocks import BLOCK_BYTES
from brim.techniques.optimizer_offload.technique import apply

MIB = 1 << 20
_CHUNK_BYTES = 16 * MIB
_STEPS = 3  # in a row: what one writes last is written while the next one reads


@dataclass(frozen=True, kw_only=True)
class Size:
    """``layers`` square matrices of ``width``."""

    layers: int
    width: int


FULL, TINY = Size(layers=144, width=1024), Size(layers=8, width=256)


def measure(
    size: Size,
    directory: Path,
    *,
    rounds: int,
    block_bytes: int = BLOCK_BYTES,
    buffer_bytes: int | None = None,
) -> dict[str, Any]:
    """Medians over interleaved rounds: seconds of a step whose states are on disk, and of the raw transfer.

    The raw transfer reads and writes as many bytes by O_DIRECT, in turn or both at once, with one or two requests in
    flight each way: whichever is fastest here. ``beside`` is a raw transfer and a resident update at once, neither
    waiting for the other: what overlap can come to where a disk takes cores and memory bandwidth from the update.
    """
    model = nn.Sequential(*[nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memory = cpu_memory(Timeline("bench", measured=True), ram_bytes=1 << 40)
    memory.use_disk(folder=str(directory), limit_bytes=None)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    twin = _resident(size)
    handle = apply(model, optimizer, memory, states="disk", block_bytes=block_bytes, buffer_bytes=buffer_bytes)
    records = handle._storage.states.records
    try:
        optimizer.step()  # makes the states
        records.settle()
        moved = sum(records.sizes.values())
        seconds: dict[str, list[float]] = {name: [] for name in ("step", "resident", "beside", *_RAW_WAYS)}
        with _RawFile(directory, moved) as raw:
            for _ in range(rounds):
                for name, way in _RAW_WAYS.items():
                    seconds[name].append(way(raw))
                began_s = time.perf_counter()
                twin.step()
                seconds["resident"].append(time.perf_counter() - began_s)
                seconds["beside"].append(raw.beside_s(twin.step))
                began_s = time.perf_counter()
                for _ in range(_STEPS):
                    optimizer.step()
                records.settle()
                seconds["step"].append((time.perf_counter() - began_s) / _STEPS)
        return _report(seconds, moved, memory.ram.peak_bytes, handle.written_bytes_per_step)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        handle.remove()
        memory.close()


def _report(seconds: dict[str, list[float]], moved: int, ram_bytes: int, written: int) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    raw_s = min(medians[name] for name in _RAW_WAYS)
    bound_s = max(raw_s, medians["resident"])
    return {
        "state_bytes": moved,
        "written_bytes_per_step": written,
        "ram_bytes": ram_bytes,
        "seconds": seconds,
        "step_s": medians["step"],
        "resident_step_s": medians["resident"],
        "raw_s": raw_s,
        "step_bytes_per_s": 2 * moved / medians["step"],
        "raw_bytes_per_s": 2 * moved / raw_s,
        "of_the_disk": raw_s / medians["step"],
        "of_the_bound": bound_s / medians["step"],
        "beside_s": medians["beside"],
        "of_the_overlap": medians["beside"] / medians["step"],
    }


def _resident(size: Size) -> torch.optim.Optimizer:
    """The plain optimizer with everything in memory: what the step computes."""
    parameters = [nn.Parameter(torch.randn(size.width, size.width)) for _ in range(size.layers)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


class _RawFile:
    """A file without a name, twice as long as what is moved: the first half is read, the second half is written.

    Buffers have huge pages, as a fair bound must (see RawReader in _harness.py).
    """

    def __init__(self, directory: Path, bytes: int) -> None:
        self._bytes = bytes // _CHUNK_BYTES * _CHUNK_BYTES or bytes
        self._scale = bytes / self._bytes
        descriptor, name = tempfile.mkstemp(dir=directory)
        self._fd = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.close(descriptor)
        Path(name).unlink()
        self._buffers = [_huge(min(_CHUNK_BYTES, self._bytes)) for _ in range(4)]
        for half in (0, self._bytes):
            self._together(lambda half=half: self._write(half, 0, 0, 1))

    def __enter__(self) -> _RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def in_turn_s(self, each: int) -> float:
        """Seconds for reading everything and then writing everything, ``each`` requests in flight."""
        reading = [functools.partial(self._read, i, i, each) for i in range(each)]
        writing = [functools.partial(self._write, self._bytes, i, i, each) for i in range(each)]
        return (self._together(*reading) + self._together(*writing)) * self._scale

    def at_once_s(self, readers: int) -> float:
        """Seconds for both at once: ``readers`` requests in flight one way, one the other."""
        reading = [functools.partial(self._read, i, i, readers) for i in range(readers)]
        return self._together(*reading, lambda: self._write(self._bytes, 3, 0, 1)) * self._scale

    def beside_s(self, work: Callable[[], object]) -> float:
        """Seconds for both ways at once and ``work`` on this thread meanwhile."""
        reading, writing = (lambda: self._read(0, 0, 1)), (lambda: self._write(self._bytes, 3, 0, 1))
        return self._together(reading, writing, meanwhile=work)

    @staticmethod
    def _together(*jobs: Callable[[], None], meanwhile: Callable[[], object] | None = None) -> float:
        threads = [threading.Thread(target=job) for job in jobs]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        if meanwhile is not None:
            meanwhile()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began_s

    def _read(self, buffer: int, first: int, step: int) -> None:
        size = len(self._buffers[buffer])
        for offset in range(first * size, self._bytes, step * size):
            os.preadv(self._fd, [self._buffers[buffer]], offset)

    def _write(self, begin: int, buffer: int, first: int, step: int) -> None:
        size = len(self._buffers[buffer])
        for offset in range(first * size, self._bytes, step * size):
            put = os.pwrite(self._fd, self._buffers[buffer], begin + offset)
            assert put == size, "a regular file takes what it is given, or says why not"


def _huge(bytes: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(4096) * (bytes // 4096))
    return buffer


_RAW_WAYS: dict[str, Callable[[_RawFile], float]] = {
    "raw_in_turn_1": lambda raw: raw.in_turn_s(1),
    "raw_in_turn_2": lambda raw: raw.in_turn_s(2),
    "raw_at_once_1": lambda raw: raw.at_once_s(1),
    "raw_at_once_2": lambda raw: raw.at_once_s(2),
}
