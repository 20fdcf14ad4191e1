"""How fast the current CUDA device moves bytes, alone and both ways at once, and multiplies matrices."""

from __future__ import annotations

import math
import mmap
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from brim.core.hardware import RAM, VRAM, Link
from brim.errors import TransferError
from brim.measure.bandwidth import dtype_name, matrix_rate, median_s
from brim.measure.capacity import free_bytes
from brim.units import KIB, MIB

_COPY_BYTES = 128 * MIB
_READ_BYTES = 1024 * MIB
_COPIES = 8
_ROUNDS = 5
_SIMT, _TENSOR_CORES = "ieee", "tf32"


def cuda_links() -> tuple[Link, Link]:
    """RAM -> VRAM and VRAM -> RAM through pinned memory: alone, and with the other way busy."""
    size_bytes = max(MIB, min(_COPY_BYTES, free_bytes(VRAM) // 8))
    with registered(size_bytes) as sent, registered(size_bytes) as received:
        there = torch.empty_like(sent, device="cuda")
        back = torch.ones_like(there)

        def up() -> None:
            there.copy_(sent, non_blocking=True)

        def down() -> None:
            received.copy_(back, non_blocking=True)

        alone = [
            there.nbytes / median_s(way, rounds=_ROUNDS, synchronize=torch.cuda.synchronize) for way in (up, down)
        ]
        both = [_duplex_rates(up, down, there.nbytes) for _ in range(_ROUNDS)]
        latency_s = median_s(
            lambda: there[: 4 * KIB].copy_(sent[: 4 * KIB], non_blocking=True),
            rounds=50,
            synchronize=torch.cuda.synchronize,
        )
    ways = ((RAM, VRAM), (VRAM, RAM))
    up_link, down_link = (
        Link(
            source=source,
            target=target,
            bytes_per_s=alone[index],
            duplex_bytes_per_s=statistics.median(rates[index] for rates in both),
            latency_s=latency_s,
            single_bytes_per_s=alone[index],
            chunk_bytes=size_bytes,
        )
        for index, (source, target) in enumerate(ways)
    )
    return up_link, down_link


def vram_read_rate() -> float:
    """Bytes per second that one kernel reads: a bfloat16 matrix-vector product or a float32 maximum."""
    columns = 8192
    size_bytes = min(_READ_BYTES, free_bytes(VRAM) // 8)
    weight = torch.ones(size_bytes // (2 * columns), columns, dtype=torch.bfloat16, device="cuda")
    vector = torch.ones(1, columns, dtype=torch.bfloat16, device="cuda")
    numbers = weight.view(torch.float32)
    kernels: tuple[Callable[[], object], ...] = (lambda: F.linear(vector, weight), lambda: numbers.amax())
    return max(weight.nbytes / median_s(kernel, synchronize=torch.cuda.synchronize) for kernel in kernels)


def cuda_matrix_rates() -> dict[str, float]:
    """Operations per second by dtype; ``tf32`` is float32 on tensor cores; float8 where the device multiplies it."""
    rates = {}
    for precision, name in ((_SIMT, "float32"), (_TENSOR_CORES, "tf32")):
        with _float32_precision(precision):
            rates[name] = _rate(_product(torch.float32))
    for dtype in (torch.bfloat16, torch.float16):
        rates[dtype_name(dtype)] = _rate(_product(dtype))
    # ROCm gives its own architectures' numbers as a capability, and multiplies float8 under another contract.
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        rates[dtype_name(torch.float8_e4m3fn)] = _rate(_float8_product)
    return rates


def give_back() -> None:
    """Leave the device as it was found: what was measured with would stay reserved by PyTorch otherwise."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def registered(size_bytes: int) -> Iterator[torch.Tensor]:
    """Pinned bytes (uint8) of exactly this size in whole pages: ``pin_memory()`` rounds up to a power of two."""
    size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(tensor.data_ptr(), size_bytes, 0))
    if status:
        raise TransferError(f"{size_bytes} bytes of RAM were to be pinned.", f"cudaHostRegister gave error {status}.")
    try:
        yield tensor
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(tensor.data_ptr())


def _duplex_rates(up: Callable[[], None], down: Callable[[], None], size_bytes: int) -> tuple[float, float]:
    """Bytes per second of each way while both are busy: only copies that end before the faster way has finished."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    begin = _timing_event()
    ends: list[list[torch.cuda.Event]] = [[], []]
    torch.cuda.synchronize()
    begin.record()
    for stream in streams:
        stream.wait_event(begin)
    for _ in range(_COPIES):  # alternating, so that neither stream runs ahead while the other is being filled
        for stream, way, marks in zip(streams, (up, down), ends, strict=True):
            with torch.cuda.stream(stream):
                way()
                marks.append(_timing_event())
                marks[-1].record(stream)
    torch.cuda.synchronize()
    seconds = [[begin.elapsed_time(mark) / 1e3 for mark in marks] for marks in ends]
    both_busy_s = min(times[-1] for times in seconds)
    counted = [[time for time in times if time <= both_busy_s] or times[:1] for times in seconds]
    up_rate, down_rate = (len(times) * size_bytes / times[-1] for times in counted)
    return up_rate, down_rate


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def _product(dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    def of_size(size: int) -> Callable[[], object]:
        left, right = (torch.rand(size, size, device="cuda").to(dtype) for _ in range(2))
        return lambda: F.linear(left, right)

    return of_size


def _float8_product(size: int) -> Callable[[], object]:
    left, right = (torch.rand(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one, whole = torch.ones((), device="cuda"), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(left, right.t(), one, whole, one, whole)


def _rate(product: Callable[[int], Callable[[], object]]) -> float:
    largest = 1 << (math.isqrt(free_bytes(VRAM) // 24).bit_length() - 1)  # of two float32 factors and a product
    return matrix_rate(product, target_s=0.02, largest=min(16384, largest), synchronize=torch.cuda.synchronize)
