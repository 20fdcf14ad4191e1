"""What a piece of work took: RAM and VRAM high water, and bytes read from disk."""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from brim import accelerator, threads
from brim.errors import UsageError

_PROC = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What happened between entering a monitor and reading it. None: this machine does not tell.

    ``ram_growth_bytes`` is the high water of the resident set (VmHWM; file pages that are mapped count) over the
    resident set at entry, never below 0. ``disk_read_bytes`` came from storage, not from the page cache.
    ``vram_allocated_bytes`` and ``vram_reserved_bytes`` are PyTorch's peaks over all devices of accelerators summed,
    0 while none is in use; ``vram_process_bytes`` adds to the reserved peak what the driver counts on top of it
    (context, libraries), which only CUDA's tells.
    """

    ram_entry_bytes: int
    ram_peak_bytes: int
    disk_read_bytes: int | None
    vram_allocated_bytes: int
    vram_reserved_bytes: int
    vram_process_bytes: int | None

    @property
    def ram_growth_bytes(self) -> int:
        return max(0, self.ram_peak_bytes - self.ram_entry_bytes)


class RamMeter(Protocol):
    """The high water of this process's resident set since the last reset."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def reset(self) -> None: ...
    def peak_bytes(self) -> int: ...


class KernelMeter:
    """The kernel's own high water, exact between resets (Linux, proc_pid_clear_refs(5))."""

    @staticmethod
    def available() -> bool:
        """Whether it can be read and reset. Asking resets it."""
        try:
            KernelMeter().reset()
            return KernelMeter().peak_bytes() > 0
        except (OSError, StopIteration):
            return False

    def start(self) -> None:
        self.reset()

    def stop(self) -> None:
        pass

    def reset(self) -> None:
        (_PROC / "clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        lines = (_PROC / "status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


class SampledMeter:
    """The resident set looked at every few milliseconds by a thread: for systems whose high water cannot be reset.

    Shorter peaks are missed.
    """

    def __init__(self, interval_s: float = 0.005) -> None:
        self._interval_s = interval_s
        self._process = psutil.Process()
        self._peak_bytes = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.reset()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._sample, name="brim-monitor", daemon=True)
        threads.start(self._thread)

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reset(self) -> None:
        with self._lock:
            self._peak_bytes = self._process.memory_info().rss

    def peak_bytes(self) -> int:
        with self._lock:  # a sample that began before a reset must not bring the old peak back
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
            return self._peak_bytes

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.peak_bytes()


@dataclass(kw_only=True)
class _Peaks:
    ram_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def fold(self, other: _Peaks) -> None:
        self.ram_bytes = max(self.ram_bytes, other.ram_bytes)
        self.allocated_bytes = max(self.allocated_bytes, other.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, other.reserved_bytes)


class Watch:
    """The high waters of the process, shared by all monitors that are open.

    The kernel and PyTorch keep one high water each. A monitor that starts must reset them, so what they said until
    then is first folded into every monitor that is open already: nested and overlapping monitors are all right.
    """

    def __init__(self, meter: RamMeter) -> None:
        self._meter = meter
        self._lock = threading.Lock()
        self._open: list[_Peaks] = []

    def enter(self) -> _Peaks:
        with self._lock:
            if self._open:
                self._fold()
                self._meter.reset()
            else:
                self._meter.start()
            _reset_vram_peaks()
            mine = _Peaks()
            self._open.append(mine)
            return mine

    def read(self, mine: _Peaks) -> _Peaks:
        with self._lock:
            self._fold()
            return mine

    def leave(self, mine: _Peaks) -> None:
        with self._lock:
            self._fold()
            self._open = [peaks for peaks in self._open if peaks is not mine]
            if not self._open:
                self._meter.stop()

    def _fold(self) -> None:
        now = _vram_peaks()
        now.ram_bytes = self._meter.peak_bytes()
        for peaks in self._open:
            peaks.fold(now)


@functools.cache
def _process_watch() -> Watch:
    """The high waters belong to the process, so this object does too. Made late: asking the kernel resets them."""
    return Watch(KernelMeter() if KernelMeter.available() else SampledMeter())


class Monitor:
    """``with Monitor() as monitor: work()``, then ``monitor.usage()``; within the block it tells the usage so far.

    Nested and concurrent monitors do not disturb one another. What resets the process's high waters behind their
    backs (``torch.cuda.reset_peak_memory_stats``, writing ``clear_refs``) does.
    """

    def __init__(self, *, watch: Watch | None = None) -> None:
        self._watch = watch or _process_watch()
        self._peaks: _Peaks | None = None
        self._usage: Usage | None = None

    def __enter__(self) -> Monitor:
        if self._peaks is not None:
            raise UsageError("Cannot enter a Monitor.", "It is already in use.", "Make one Monitor for each block.")
        self._usage = None
        self._disk_entry_bytes = _disk_read_bytes()
        self._peaks = self._watch.enter()
        self._ram_entry_bytes = psutil.Process().memory_info().rss
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peaks = self._peaks
        assert peaks is not None
        self._watch.leave(peaks)
        self._usage = self._usage_of(peaks)
        self._peaks = None

    def usage(self) -> Usage:
        """What the block took, or so far within it. Raises UsageError before the block is entered."""
        if self._peaks is not None:
            return self._usage_of(self._watch.read(self._peaks))
        if self._usage is None:
            raise UsageError("This Monitor has no usage.", "It was not entered.", "Use it in a with statement.")
        return self._usage

    def _usage_of(self, peaks: _Peaks) -> Usage:
        now = _disk_read_bytes()
        before = self._disk_entry_bytes
        return Usage(
            ram_entry_bytes=self._ram_entry_bytes,
            ram_peak_bytes=peaks.ram_bytes,
            disk_read_bytes=None if now is None or before is None else now - before,
            vram_allocated_bytes=peaks.allocated_bytes,
            vram_reserved_bytes=peaks.reserved_bytes,
            vram_process_bytes=_vram_process_bytes(peaks.reserved_bytes),
        )


def _disk_read_bytes() -> int | None:
    """Bytes that this process, all threads, made the storage fetch since it began."""
    try:
        lines = (_PROC / "io").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux, or a sandbox that hides it
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _reset_vram_peaks() -> None:
    for device, index in accelerator.in_use():
        device.reset_peaks(index)


def _vram_peaks() -> _Peaks:
    peaks = _Peaks()
    for device, index in accelerator.in_use():
        allocated, reserved = device.peak_bytes(index)
        peaks.allocated_bytes += allocated
        peaks.reserved_bytes += reserved
    return peaks


def _vram_process_bytes(reserved_peak_bytes: int) -> int | None:
    """The reserved peak and what the driver counts for this process beyond PyTorch's reserve at this moment.

    A GPU that the process has nothing on is none of the driver's news, and counts for nothing.
    """
    devices = [index for device, index in accelerator.in_use() if device.type == accelerator.CUDA]
    if not devices:
        return None
    from brim.measure.nvml import process_bytes

    cuda = sys.modules["torch"].cuda
    beyond: list[int] = []
    for device in devices:
        used, reserved = process_bytes(f"GPU-{cuda.get_device_properties(device).uuid}"), cuda.memory_reserved(device)
        if used is not None:
            beyond.append(used - reserved)
        elif reserved:
            return None
    return reserved_peak_bytes + sum(beyond) if beyond else None
