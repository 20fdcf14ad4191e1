"""Measure the peaks of RAM and VRAM in a block of code."""

from __future__ import annotations

import functools
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
    """The peaks of memory since a monitor was entered.

    ``ram_growth_bytes`` is the peak of the resident set (VmHWM; mapped file pages count) above ``ram_entry_bytes``,
    the resident set at entry or at an earlier beginning, at least 0. ``vram_reserved_bytes`` is PyTorch's peak summed
    over all accelerators, 0 without one in use.
    """

    ram_entry_bytes: int
    ram_peak_bytes: int
    vram_reserved_bytes: int

    @property
    def ram_growth_bytes(self) -> int:
        return max(0, self.ram_peak_bytes - self.ram_entry_bytes)


class RamMeter(Protocol):
    """Measures the peak of this process's resident set since the last reset."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def reset(self) -> None: ...
    def peak_bytes(self) -> int: ...


class KernelMeter:
    """Reads the kernel's exact peak (Linux, proc_pid_clear_refs(5))."""

    @staticmethod
    def available() -> bool:
        """Return whether the peak can be read and reset. Resets it."""
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
    """Samples the resident set every few milliseconds, for systems whose peak cannot be reset. Misses short peaks."""

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
        with self._lock:  # a sample that began before a reset must not restore the old peak
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
            return self._peak_bytes

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.peak_bytes()


@dataclass(kw_only=True)
class _Peaks:
    ram_bytes: int = 0
    reserved_bytes: int = 0

    def fold(self, other: _Peaks) -> None:
        self.ram_bytes = max(self.ram_bytes, other.ram_bytes)
        self.reserved_bytes = max(self.reserved_bytes, other.reserved_bytes)


class Watch:
    """The peaks of the process, shared by all open monitors.

    The kernel and PyTorch have one peak each, which a new monitor resets. Before that, the peaks are folded into
    every open monitor, so that monitors can nest and overlap.
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
            peaks = _Peaks()
            self._open.append(peaks)
            return peaks

    def read(self, peaks: _Peaks) -> _Peaks:
        with self._lock:
            self._fold()
            return peaks

    def leave(self, peaks: _Peaks) -> None:
        with self._lock:
            self._fold()
            self._open = [other for other in self._open if other is not peaks]
            if not self._open:
                self._meter.stop()

    def _fold(self) -> None:
        now = _vram_peaks()
        now.ram_bytes = self._meter.peak_bytes()
        for peaks in self._open:
            peaks.fold(now)


@functools.cache
def _process_watch() -> Watch:
    """Return the Watch of this process. Created on first use, as checking the kernel's meter resets its peak."""
    return Watch(KernelMeter() if KernelMeter.available() else SampledMeter())


class Monitor:
    """``with Monitor() as monitor: work()``, then ``monitor.usage()``; within the block, the usage so far.

    Monitors can nest and run concurrently. Other code must not reset the process's peaks
    (``torch.cuda.reset_peak_memory_stats``, writing ``clear_refs``).
    """

    def __init__(self, *, watch: Watch | None = None) -> None:
        self._watch = watch or _process_watch()
        self._peaks: _Peaks | None = None
        self._usage: Usage | None = None

    def __enter__(self) -> Monitor:
        if self._peaks is not None:
            raise UsageError("Cannot enter a Monitor.", "It is already in use.", "Make one Monitor for each block.")
        self._usage = None
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
        """Return the usage of the block, so far or in total. Raises UsageError before the block is entered."""
        if self._peaks is not None:
            return self._usage_of(self._watch.read(self._peaks))
        if self._usage is None:
            raise UsageError("This Monitor has no usage.", "It was not entered.", "Use it in a with statement.")
        return self._usage

    def _usage_of(self, peaks: _Peaks) -> Usage:
        return Usage(
            ram_entry_bytes=self._ram_entry_bytes,
            ram_peak_bytes=peaks.ram_bytes,
            vram_reserved_bytes=peaks.reserved_bytes,
        )


def _reset_vram_peaks() -> None:
    for device, index in accelerator.in_use():
        device.reset_peaks(index)


def _vram_peaks() -> _Peaks:
    peaks = _Peaks()
    for device, index in accelerator.in_use():
        peaks.reserved_bytes += device.peak_reserved_bytes(index)
    return peaks
