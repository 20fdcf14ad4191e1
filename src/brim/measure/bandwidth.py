"""Measure the rates of RAM and of the processor's matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F

from brim.core.hardware import RAM, Link
from brim.measure.waiting import Stopwatch
from brim.units import MIB

_SCRATCH_BYTES = 256 * MIB  # several times the last-level cache of most processors
_CPU_DTYPES = (torch.float32, torch.bfloat16)


def median_s(run: Callable[[], object], *, rounds: int = 5, synchronize: Callable[[], object] | None = None) -> float:
    """Return the median seconds of ``run`` after one call to warm up.

    ``synchronize`` waits for a device; None: ``run`` uses the processor alone, and time without one does not count.
    """
    run()
    seconds = []
    for _ in range(rounds):
        if synchronize is None:
            watch = Stopwatch()
            run()
            seconds.append(watch.read_s())
            continue
        synchronize()
        began_s = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def ram_read_rate() -> float:
    """Return the bytes per second that a matrix-vector product reads with all threads, as a decode step does."""
    columns = 4096
    weight = torch.ones(_scratch_bytes() // (4 * columns), columns)
    vector = torch.ones(1, columns)
    return weight.nbytes / median_s(lambda: F.linear(vector, weight))


def ram_link() -> Link:
    """Measure bytes copied per second (read once, written once) by one thread or all, whichever is faster."""
    source = torch.ones(_scratch_bytes() // 2, dtype=torch.uint8)
    target = torch.ones_like(source)
    threads = torch.get_num_threads()
    rates: dict[int, float] = {}
    try:
        for count in {1, threads}:
            torch.set_num_threads(count)
            rates[count] = source.nbytes / median_s(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    best = max(rates, key=lambda count: rates[count])
    return Link(source=RAM, target=RAM, bytes_per_s=rates[best], single_bytes_per_s=rates[1], concurrency=best)


def cpu_matrix_rates() -> dict[str, float]:
    """Return floating-point operations per second of square products, by dtype (``float32``, ``bfloat16``)."""
    rates = {}
    for dtype in _CPU_DTYPES:

        def product(size: int, dtype: torch.dtype = dtype) -> Callable[[], object]:
            left, right = factors(size, dtype)
            return lambda: F.linear(left, right)

        rates[dtype_name(dtype)] = matrix_rate(product, target_s=0.15, largest=4096)
    return rates


def factors(size: int, dtype: torch.dtype, device: torch.device | None = None) -> list[torch.Tensor]:
    """Return two random ``size`` x ``size`` matrices (a multiple of 64), leaving the program's generators alone."""
    tiles = torch.rand(2, 64, 64, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(device)
    return [tile.repeat(size // 64, size // 64).to(dtype) for tile in tiles]


def matrix_rate(
    product: Callable[[int], Callable[[], object]],
    *,
    target_s: float,
    largest: int,
    synchronize: Callable[[], object] | None = None,
) -> float:
    """Return operations per second (2 n^3 per product) at a size that takes about ``target_s``.

    ``product(n)`` returns a function that multiplies two n x n matrices. n grows until a product takes long: a small
    size says little, and a fixed size would take a minute on a processor that emulates the dtype.
    """
    size = 128
    while True:
        run = product(size)
        seconds = median_s(run, rounds=1, synchronize=synchronize)
        if seconds >= target_s / 4 or size >= largest:
            break
        growth = min(4.0, max(1.5, (target_s / seconds) ** (1 / 3)))
        size = min(largest, int(size * growth) // 64 * 64)
    return 2 * size**3 / median_s(run, rounds=3, synchronize=synchronize)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scratch_bytes() -> int:
    """Return a size that does not push the machine into swap."""
    return min(_SCRATCH_BYTES, int(psutil.virtual_memory().available) // 16 // MIB * MIB)
