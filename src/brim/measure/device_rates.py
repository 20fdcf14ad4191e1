"""Measure the copy and matrix rates of an accelerator's current device."""

from __future__ import annotations

import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from brim.accelerator import CUDA, Accelerator, page_lock, page_unlock
from brim.core.hardware import RAM, VRAM, Link, filled
from brim.measure.bandwidth import dtype_name, factors, matrix_rate, median_s
from brim.measure.capacity import device_free_bytes
from brim.units import KIB, MIB

_COPY_BYTES = 128 * MIB
_READ_BYTES = 1024 * MIB
_COPIES = 8
_ROUNDS = 5
_WARM_S, _MOST_WARM_S, _RISES = 0.3, 1.5, 1.02
_SIMT, _TENSOR_CORES = "ieee", "tf32"


def warm_clocks(on: Accelerator) -> None:
    """Multiply until products get no faster: an idle GPU starts at a low clock."""
    begin_s, rate = time.monotonic(), 0.0
    while (spent_s := time.monotonic() - begin_s) < _MOST_WARM_S:
        before, rate = rate, _rate(on, _product(on, torch.bfloat16))
        if spent_s >= _WARM_S and rate < _RISES * before:
            return


def links(on: Accelerator) -> tuple[Link, Link]:
    """Measure RAM -> VRAM and VRAM -> RAM through pinned memory, alone and with the other direction busy.

    Without streams, copies take turns, so each direction has half of its rate while the other is busy.
    """
    size_bytes = max(MIB, min(_COPY_BYTES, device_free_bytes(on) // 8))
    with _pinned(on, size_bytes) as sent, _pinned(on, size_bytes) as received:
        there = torch.empty_like(sent, device=on.device)
        back = torch.ones_like(there)

        def up() -> None:
            there.copy_(sent, non_blocking=True)

        def down() -> None:
            received.copy_(back, non_blocking=True)

        alone = [there.nbytes / median_s(copy, rounds=_ROUNDS, synchronize=on.synchronize) for copy in (up, down)]
        if on.has_streams:
            both = [_duplex_rates(on, up, down, there.nbytes) for _ in range(_ROUNDS)]
        else:
            both = [(alone[0] / 2, alone[1] / 2)]
        latency_s = median_s(
            lambda: there[: 4 * KIB].copy_(sent[: 4 * KIB], non_blocking=True),
            rounds=50,
            synchronize=on.synchronize,
        )
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
        for index, (source, target) in enumerate(((RAM, VRAM), (VRAM, RAM)))
    )
    return up_link, down_link


def vram_read_rate(on: Accelerator) -> float:
    """Return the bytes per second that a kernel reads: a bfloat16 matrix-vector product or a float32 maximum."""
    columns = 8192
    size_bytes = min(_READ_BYTES, device_free_bytes(on) // 8)
    weight = torch.ones(size_bytes // (2 * columns), columns, dtype=torch.bfloat16, device=on.device)
    vector = torch.ones(1, columns, dtype=torch.bfloat16, device=on.device)
    numbers = weight.view(torch.float32)
    kernels: tuple[Callable[[], object], ...] = (lambda: F.linear(vector, weight), lambda: numbers.amax())
    return max(weight.nbytes / median_s(kernel, synchronize=on.synchronize) for kernel in kernels)


def matrix_rates(on: Accelerator) -> dict[str, float]:
    """Return operations per second by dtype, on CUDA also ``tf32`` and, if supported, float8."""
    rates = {}
    if on.type == CUDA:
        for precision, name in ((_SIMT, "float32"), (_TENSOR_CORES, "tf32")):
            with _float32_precision(precision):
                rates[name] = _rate(on, _product(on, torch.float32))
    else:
        rates["float32"] = _rate(on, _product(on, torch.float32))
    for dtype in (torch.bfloat16, torch.float16):
        rates[dtype_name(dtype)] = _rate(on, _product(on, dtype))
    # ROCm's capabilities are its own architecture numbers, and its float8 products need other arguments.
    if on.type == CUDA and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9):
        rates[dtype_name(torch.float8_e4m3fn)] = _rate(on, _float8_product)
    return rates


def kernel_shares(on: Accelerator, flops_per_s: Mapping[str, float], bytes_per_s: float) -> dict[str, float]:
    """Return the shares of measured rates that kernels of each kind reach in float16, as in ``Hardware``."""
    count = int(min(max(1, bytes_per_s / 5e10), 64))  # images: more than caches hold, and soon done everywhere
    planes = torch.ones(count, 256, 56, 56, dtype=torch.float16, device=on.device)
    images, heads = planes.to(memory_format=torch.channels_last), planes.view(count, 32, 392, 64)
    moved_s, products = 2 * planes.nbytes / bytes_per_s, flops_per_s["float16"] / planes.numel()

    def seconds(kernel: Callable[..., object], *tensors: torch.Tensor) -> float:
        return median_s(lambda: kernel(*tensors), synchronize=on.synchronize)

    shares = {
        ".bytes": moved_s / seconds(torch.neg, planes),
        "normalization.bytes": moved_s / seconds(lambda: F.layer_norm(planes, (56,))),
        "pooling.bytes": moved_s / seconds(lambda: F.max_pool2d(planes, 3, 1, 1)),
        "batched.flops": 784 / products / filled(392, 392, 64) / seconds(torch.matmul, heads, heads.mT),
        "attention.flops": 1568 / products / seconds(F.scaled_dot_product_attention, heads, heads, heads),
    }
    for name, source, depth, taps in (
        ("product.flops", images, 256, 1), ("convolution.flops", images, 256, 3), ("grouped.flops", images, 8, 3),
        ("planar.bytes", planes, 256, 1), ("depthwise.flops", planes, 1, 7), ("depthwise.bytes", planes, 1, 3),
    ):  # fmt: skip
        kernel = partial(F.conv2d, padding=taps // 2, groups=256 // depth)
        measured_s = seconds(kernel, source, planes.new_ones(256, depth, taps, taps))
        rate = flops_per_s["float32"] / planes.numel() if depth == 1 else products * filled(depth, depth * taps**2)
        arithmetic_s = 2 * depth * taps**2 / rate
        if name == "planar.bytes":  # the rest converts
            measured_s = max(measured_s - arithmetic_s / shares["product.flops"], measured_s / 10)
        shares[name] = (moved_s if name.endswith("bytes") else arithmetic_s) / measured_s
    return shares


def dispatch_s(on: Accelerator) -> float:
    """Return the host's seconds to launch an operation from modules in Python; the device is faster with each."""
    model = nn.Sequential(*[nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()] * 64).to(on.device)
    inputs = torch.ones(1, 64, device=on.device)
    with torch.inference_mode():
        return median_s(lambda: model(inputs), synchronize=on.synchronize) / len(model)


@contextmanager
def unnoticed(on: Accelerator) -> Iterator[None]:
    """Release the memory that the block's measurements reserve (buffers, cuBLAS's workspace) and reset the peak.

    A peak above the reserved memory at entry cannot be restored and stays. The peak is handled on CUDA only.
    """
    is_cuda = on.type == CUDA
    is_peak_now = is_cuda and on.counts_memory() and on.peak_reserved_bytes(on.index) == on.reserved_bytes()
    try:
        yield
    finally:
        on.synchronize()
        if is_cuda:
            torch._C._cuda_clearCublasWorkspaces()  # the next product allocates another
        on.empty_cache()
        if is_peak_now:
            on.reset_peaks(on.index)


@contextmanager
def registered(on: Accelerator, size_bytes: int) -> Iterator[torch.Tensor]:
    """Yield pinned bytes (uint8) rounded up to pages; ``pin_memory()`` would round up to a power of two.

    They are pageable if the driver pins no more, as a run's would be.
    """
    size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    if page_lock(tensor.data_ptr(), size_bytes):
        yield tensor
        return
    try:
        yield tensor
    finally:
        on.synchronize()
        page_unlock(tensor.data_ptr())


def _pinned(on: Accelerator, size_bytes: int) -> AbstractContextManager[torch.Tensor]:
    """Return pinned bytes, or pageable ones if the backend pins none (MPS shares memory with the processor)."""
    if on.type == CUDA:
        return registered(on, size_bytes)
    try:
        return nullcontext(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
    except RuntimeError:
        return nullcontext(torch.empty(size_bytes, dtype=torch.uint8))


def _duplex_rates(
    on: Accelerator, up: Callable[[], None], down: Callable[[], None], size_bytes: int
) -> tuple[float, float]:
    """Return the bytes per second of each direction while both are busy.

    Only copies that end before the faster direction has finished count.
    """
    streams = [on.module.Stream() for _ in range(2)]
    begin = on.module.Event(enable_timing=True)
    ends: list[list[Any]] = [[], []]
    on.synchronize()
    begin.record()
    for stream in streams:
        stream.wait_event(begin)
    for _ in range(_COPIES):  # alternating, so that neither stream gets ahead
        for stream, copy, marks in zip(streams, (up, down), ends, strict=True):
            with on.module.stream(stream):
                copy()
                marks.append(on.module.Event(enable_timing=True))
                marks[-1].record(stream)
    on.synchronize()
    seconds = [[begin.elapsed_time(mark) / 1e3 for mark in marks] for marks in ends]
    both_busy_s = min(times[-1] for times in seconds)
    counted = [[time for time in times if time <= both_busy_s] or times[:1] for times in seconds]
    up_rate, down_rate = (len(times) * size_bytes / times[-1] for times in counted)
    return up_rate, down_rate


@contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def _product(on: Accelerator, dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    def of_size(size: int) -> Callable[[], object]:
        left, right = factors(size, dtype, on.device)
        return lambda: F.linear(left, right)

    return of_size


def _float8_product(size: int) -> Callable[[], object]:
    left, right = factors(size, torch.float8_e4m3fn, torch.device("cuda"))
    scale, kind = torch.ones((), device="cuda"), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(left, right.t(), scale, kind, scale, kind)


def _rate(on: Accelerator, product: Callable[[int], Callable[[], object]]) -> float:
    largest = 1 << (math.isqrt(device_free_bytes(on) // 24).bit_length() - 1)  # for two float32 factors and a product
    return matrix_rate(product, target_s=0.02, largest=min(16384, largest), synchronize=on.synchronize)
