"""Unified memory: VRAM until a budget is reached, and beyond it host memory that the GPU reads over the link.

For programs without modules to plan (plain tensors, custom CUDA code): PyTorch allocates everything through RMM.
Unlike a plan, this does not know which bytes will be needed next, and bytes on the host are read at the link's rate
each time: the statistics say how many there are.

Sources: RMM's Python interface (``rmm.mr``, ``rmm.allocators.torch``); PyTorch, torch/cuda/memory.py
(``CUDAPluggableAllocator``, ``MemPool``).
"""

from __future__ import annotations

import importlib.util
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import torch

from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.run.script.settings import Settings
from brim.units import format_bytes, parse_bytes

_WARN_SHARE = 0.1  # of the allocated bytes: from there on, reading the host's bytes dominates the time
_TODO = "Install brim[unified] on a machine with an NVIDIA GPU, or use --mode stream."


class Resource(Protocol):
    """The interface of RMM's memory resources."""

    def allocate(self, nbytes: int, stream: Any) -> int: ...
    def deallocate(self, ptr: int, nbytes: int, stream: Any) -> None: ...


def is_installed() -> bool:
    """True if RMM is installed. It is not imported."""
    return importlib.util.find_spec("rmm") is not None


class Spilling:
    """Allocates from ``device`` up to ``limit_bytes``, and beyond that from ``host``, up to ``host_limit_bytes``.

    ``allocate`` and ``deallocate`` are callbacks of RMM's ``CallbackMemoryResource``. A request that the device
    refuses goes to the host as well. If both are full it raises MemoryError, as RMM does.
    """

    def __init__(self, device: Resource, host: Resource, *, limit_bytes: int, host_limit_bytes: int) -> None:
        self._device, self._host = device, host
        self.limit_bytes, self.host_limit_bytes = limit_bytes, host_limit_bytes
        self.held_bytes = self.peak_bytes = 0
        self.spilled_bytes = self.spilled_peak_bytes = 0
        self.total_bytes = self.total_spilled_bytes = 0  # allocated over the entire run
        self._on_host: set[int] = set()
        self._lock = threading.RLock()  # reentrant: the garbage collector may free a tensor while it is locked

    def allocate(self, nbytes: int, stream: Any) -> int:
        with self._lock:
            self.total_bytes += nbytes
            if self.held_bytes + nbytes <= self.limit_bytes:
                try:
                    address = self._device.allocate(nbytes, stream)
                except MemoryError:  # another process uses the device too
                    return self._spill(nbytes, stream)
                self.held_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                return address
            return self._spill(nbytes, stream)

    def _spill(self, nbytes: int, stream: Any) -> int:
        if self.spilled_bytes + nbytes > self.host_limit_bytes:
            raise MemoryError(
                f"cannot allocate {format_bytes(nbytes)}: {format_bytes(self.held_bytes)} of "
                f"{format_bytes(self.limit_bytes)} of VRAM and {format_bytes(self.spilled_bytes)} of "
                f"{format_bytes(self.host_limit_bytes)} of RAM are in use (out of memory)"
            )
        address = self._host.allocate(nbytes, stream)
        self._on_host.add(address)
        self.spilled_bytes += nbytes
        self.spilled_peak_bytes = max(self.spilled_peak_bytes, self.spilled_bytes)
        self.total_spilled_bytes += nbytes
        return address

    def deallocate(self, ptr: int, nbytes: int, stream: Any) -> None:
        with self._lock:
            if ptr in self._on_host:
                self._on_host.discard(ptr)
                self.spilled_bytes -= nbytes
                self._host.deallocate(ptr, nbytes, stream)
            else:
                self.held_bytes -= nbytes
                self._device.deallocate(ptr, nbytes, stream)

    def statistics(self) -> dict[str, int]:
        return {
            "vram_limit": self.limit_bytes,
            "vram_peak": self.peak_bytes,
            "spilled_now": self.spilled_bytes,
            "spilled_peak": self.spilled_peak_bytes,
            "asked": self.total_bytes,
            "asked_spilled": self.total_spilled_bytes,
        }


class AfterItsStream:
    """Host memory that is freed after all work queued on its stream: kernels may still read it until then."""

    def __init__(self, upstream: Resource) -> None:
        self._upstream = upstream

    def allocate(self, nbytes: int, stream: Any) -> int:
        return self._upstream.allocate(nbytes, stream)

    def deallocate(self, ptr: int, nbytes: int, stream: Any) -> None:
        stream.synchronize()
        self._upstream.deallocate(ptr, nbytes, stream)


@dataclass(eq=False)
class Unified:
    """Unified memory in force. ``spilling`` counts the bytes on either side."""

    spilling: Spilling
    _allocator: Any

    @classmethod
    def for_process(cls, settings: Settings) -> Unified:
        """Let PyTorch allocate unified memory in all threads. Must be called before CUDA is first used.

        Raises UnsupportedError without CUDA or RMM, or when CUDA is in use already; UsageError for more managed
        memory than the device has free.
        """
        allocator = _allocator()
        try:  # first: any other question to PyTorch about the device initializes its own allocator
            torch.cuda.memory.change_current_allocator(allocator)
        except RuntimeError as error:
            raise UnsupportedError(
                "Cannot put PyTorch's CUDA tensors into unified memory.",
                f"The program has its own allocator, or has already used CUDA: {error}",
                "Use --mode stream.",
            ) from error
        return cls(_spilling(settings), allocator)

    @classmethod
    def for_thread(cls, settings: Settings) -> Unified:
        """Let this thread allocate unified memory, through PyTorch's caching allocator.

        For one model of a program whose other models are planned. Threads of the backward pass allocate as before.
        """
        allocator, spilling = _allocator(), _spilling(settings)
        pool = torch.cuda.MemPool(allocator.allocator())
        context: AbstractContextManager[None] = torch.cuda.use_mem_pool(pool)
        context.__enter__()
        return cls(spilling, (allocator, pool, context))

    def statistics(self) -> dict[str, int]:
        """Bytes: peak in VRAM, spilled now and at the peak, and allocated over the entire run."""
        return self.spilling.statistics()

    def write_summary(self, stream: TextIO) -> None:
        """Write one line on the spilled bytes, if there are any."""
        spilling = self.spilling
        if spilling.total_spilled_bytes:
            share = spilling.total_spilled_bytes / max(1, spilling.total_bytes)
            slow = (
                " Reading them takes most of the time: a plan (--mode stream) reads ahead."
                if share >= _WARN_SHARE
                else ""
            )
            stream.write(
                f"brim: at most {format_bytes(spilling.spilled_peak_bytes)} were in RAM, {share:.0%} of the bytes "
                f"allocated.{slow}\n"
            )


def _allocator() -> Any:
    """RMM's allocator for PyTorch. Nothing is allocated, and CUDA is not initialized."""
    problem = "Cannot use unified memory."
    if not torch.cuda.is_available():
        raise UnsupportedError(problem, "torch sees no CUDA device here.", _TODO)
    if not is_installed():
        raise UnsupportedError(problem, "RMM is not installed.", _TODO)
    from rmm.allocators.torch import rmm_torch_allocator

    return rmm_torch_allocator


def _spilling(settings: Settings) -> Spilling:
    """Create the resource for RMM's allocator and put it into force."""
    import rmm

    from brim.measure.capacity import FREE_SHARE

    # RMM's figure: asking PyTorch would initialize PyTorch's own allocator.
    free, total = map(int, rmm.mr.available_device_memory())
    limit = int(free * FREE_SHARE) if settings.vram is None else parse_bytes(settings.vram, total)
    if limit == 0:
        raise BudgetError("Cannot use unified memory.", "The VRAM budget is 0.", "Give --vram 64MiB or more.")
    host_limit = _host_bytes(settings)
    host: Resource
    if settings.managed:
        check_managed(host_limit, free - limit, insist=settings.insist)
        host = rmm.mr.PrefetchResourceAdaptor(rmm.mr.ManagedMemoryResource())
    else:
        host = AfterItsStream(rmm.mr.PinnedHostMemoryResource())
    device = rmm.mr.CudaAsyncMemoryResource()
    spilling = Spilling(device, host, limit_bytes=limit, host_limit_bytes=host_limit)
    rmm.mr.set_current_device_resource(rmm.mr.CallbackMemoryResource(spilling.allocate, spilling.deallocate))
    return spilling


def _host_bytes(settings: Settings) -> int:
    from brim.core.hardware import RAM
    from brim.measure.capacity import FREE_SHARE, amount_bytes, free_bytes

    return int(free_bytes(RAM) * FREE_SHARE) if settings.ram is None else amount_bytes(settings.ram, RAM)


def check_managed(wanted_bytes: int, free_bytes: int, *, insist: bool) -> None:
    """Raise UsageError for more managed memory than the device has free, which has hung drivers."""
    if wanted_bytes > free_bytes and not insist:
        raise UsageError(
            f"Cannot use {format_bytes(wanted_bytes)} of managed memory.",
            f"The device has {format_bytes(max(0, free_bytes))} free beside the budget; more can hang a driver.",
            f"Give --ram {max(0, free_bytes) >> 20}MiB, or --insist.",
        )
