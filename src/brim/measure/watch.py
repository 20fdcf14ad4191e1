"""``brim.watch``: records allocations, and writes the recording when memory runs out, before the stack unwinds.

With CUDA it is PyTorch's own recorder (``torch.cuda.memory._record_memory_history``) with a bounded ring of events
and an observer that PyTorch calls when an allocation fails. The file is a snapshot as ``_dump_snapshot`` writes it.
Elsewhere it is the process's resident memory over time, as a Timeline. ``brim explain`` reads both.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

import psutil
import torch

from brim import threads
from brim.core import EventKind, Timeline
from brim.core.files import replacing
from brim.core.hardware import RAM
from brim.errors import UsageError, is_out_of_memory

P = ParamSpec("P")
R = TypeVar("R")
STACKS = ("python", "all")
_FIRST_BYTES = (b"\x80", b"{")  # of a recording: pickle's mark, or a Timeline's JSON
_open = threading.Lock()  # PyTorch has one recorder, so at most one watch is open


class Recorder(Protocol):
    """Records memory from ``start`` to ``stop``."""

    def start(self, on_out_of_memory: Callable[[], None]) -> None: ...
    def stop(self) -> None: ...
    def write(self, path: Path, *, why: str) -> None: ...


class watch:
    """Record memory, and write the recording when memory runs out.

    ``with brim.watch("run.brim"): train()``, or ``@brim.watch("run.brim")`` above a function. ``brim explain
    run.brim`` reads the file. It is written completely or not at all, before the exception leaves the allocator; the
    exception gets a note with the file's path.

    With CUDA the file is a memory snapshot as ``torch.cuda.memory._dump_snapshot`` writes it. If PyTorch is recording
    already, that recording is used, with its settings, and continues. Without CUDA the file holds the process's
    resident memory over time; it is written when an out-of-memory error, such as a MemoryError, leaves the block.

    Args:
        path: The file to write. Its folder must exist; an existing recording is replaced.
        max_entries: The number of events in the recording, the newest; above 0.
        devices: Indices of the CUDA devices whose failures count. None: all.
        on_exit: Also write when the block ends, unless memory ran out before: that recording stays.
        stacks: ``"python"``, or ``"all"`` for C++ frames too, which take more time.
        interval_s: Without CUDA: seconds between two samples of the resident memory; above 0.

    Raises:
        UsageError: A value is not allowed, another watch is open, the folder is missing, ``path`` is a file that is
            no recording, or (at the end of the block) the file could not be written.

    Attributes:
        path: The file.
        written: The number of times that it was written in the last block.
        failure: The error if the file could not be written, else None.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_entries: int = 100_000,
        devices: Sequence[int] | None = None,
        on_exit: bool = False,
        stacks: str = "python",
        interval_s: float = 0.05,
    ) -> None:
        failed = f"brim.watch({str(path)!r}) failed."
        if max_entries < 1 or interval_s <= 0:
            raise UsageError(
                failed, f"max_entries is {max_entries}, interval_s {interval_s}.", "Both must be above 0."
            )
        if stacks not in STACKS:
            raise UsageError(failed, f"stacks is {stacks!r}.", f"It may be {' or '.join(map(repr, STACKS))}.")
        self.path, self._failed = Path(path), failed
        self._max_entries, self._devices, self._stacks = max_entries, devices, stacks
        self._on_exit, self._interval_s = on_exit, interval_s
        self._recorder: Recorder | None = None
        self.written = 0
        self.failure: Exception | None = None

    def __enter__(self) -> watch:
        if not self.path.absolute().parent.is_dir():
            raise UsageError(self._failed, f"There is no folder {self.path.absolute().parent}.")
        if self.path.is_file() and self.path.stat().st_size and self._first_byte() not in _FIRST_BYTES:
            raise UsageError(self._failed, "The file exists and is not a recording.", "Name another file.")
        if not _open.acquire(blocking=False):
            raise UsageError(self._failed, "Another watch is open.", "Use one watch for the whole run.")
        self.written, self.failure = 0, None
        try:
            self._recorder = self._choose()
            self._recorder.start(lambda: self._write("out of memory"))
        except BaseException:
            self._recorder = None
            _open.release()
            raise
        return self

    def _first_byte(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        assert recorder is not None
        try:
            if not self.written and error is not None and is_out_of_memory(error):
                self._write("out of memory")
            elif self._on_exit and not self.written:
                self._write("end")
        finally:
            try:
                recorder.stop()
            finally:
                self._recorder = None
                _open.release()
        if error is not None:
            if self.failure is not None or (self.written and is_out_of_memory(error)):
                error.add_note(self._note())
        elif self.failure is not None:
            raise UsageError(self._failed, f"It could not be written: {self.failure}.") from self.failure

    def _note(self) -> str:
        if self.failure is not None:
            return f"brim.watch could not write {self.path}: {type(self.failure).__name__} {self.failure}"
        return f"The memory recording is in {self.path}. To view it: brim explain {self.path}"

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call is watched."""

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return watched

    def _choose(self) -> Recorder:
        if torch.cuda.is_available():
            return CudaRecorder(self._failed, self._max_entries, self._devices, self._stacks)
        if self._devices is not None:
            raise UsageError(self._failed, f"devices is {list(self._devices)}.", "There is no CUDA on this machine.")
        return RamRecorder(self._max_entries, self._interval_s)

    def _write(self, why: str) -> None:
        """Write the file. Raises nothing, as another error must not hide the out-of-memory error."""
        assert self._recorder is not None
        try:
            with replacing(self.path) as partial:
                self._recorder.write(partial, why=why)
            self.written += 1
        except Exception as error:  # the host may be out of memory as well; reported at the end of the block
            self.failure = error


class _Observer:
    """The out-of-memory observer of this process. PyTorch cannot detach one, so it is attached once and switched.

    ``CUDACachingAllocator.cpp`` (``attachOutOfMemoryObserver``) calls observers where the allocation fails.
    """

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None
        self.devices: frozenset[int] | None = None
        self.attached = False

    def attach(self) -> None:
        if not self.attached:
            vars(torch._C)["_cuda_attach_out_of_memory_observer"](self.notice)  # absent from CPU builds and stubs
            self.attached = True

    def notice(self, device: int, allocated: int, device_allocated: int, device_free: int) -> None:
        if self.call is not None and (self.devices is None or device in self.devices):
            self.call()


_observer = _Observer()


class CudaRecorder:
    """PyTorch's recorder of CUDA's allocator (``torch/cuda/memory.py``)."""

    def __init__(self, failed: str, max_entries: int, devices: Sequence[int] | None, stacks: str) -> None:
        self._max_entries, self._stacks, self._ours = max_entries, stacks, False
        self._devices = None if devices is None else frozenset(devices)
        count = torch.cuda.device_count()
        if self._devices is not None and not self._devices <= set(range(count)):
            raise UsageError(failed, f"devices is {sorted(self._devices)}.", f"There are devices 0 to {count - 1}.")

    def start(self, on_out_of_memory: Callable[[], None]) -> None:
        torch.cuda.init()
        self._ours = not torch._C._cuda_isHistoryEnabled()
        if self._ours:  # the settings of a running recording cannot be read, and so not restored
            torch.cuda.memory._record_memory_history(
                enabled="all", context="all", stacks=self._stacks, max_entries=self._max_entries
            )
        _observer.attach()
        _observer.devices, _observer.call = self._devices, on_out_of_memory

    def stop(self) -> None:
        _observer.call = None
        if self._ours:
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, path: Path, *, why: str) -> None:
        with path.open("wb") as file:  # as torch.cuda.memory._dump_snapshot does
            pickle.dump(torch.cuda.memory._snapshot(), file, protocol=4)


class RamRecorder:
    """Samples the resident set of this process in a thread; its changes become a Timeline's events.

    Above ``limit`` samples, every second one is dropped and the interval doubles, so that they span the run.
    """

    def __init__(self, limit: int, interval_s: float) -> None:
        self._limit, self._interval_s = max(2, limit), interval_s
        self._samples: list[tuple[float, int]] = []
        self._process = psutil.Process()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="brim-watch", daemon=True)
        self._begin_s = time.perf_counter()

    def start(self, on_out_of_memory: Callable[[], None]) -> None:
        self._sample()
        threads.start(self._thread)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def write(self, path: Path, *, why: str) -> None:
        self._sample()
        path.write_text(json.dumps(self.timeline(why).to_json()), encoding="utf-8")

    def timeline(self, why: str) -> Timeline:
        """Return the samples as a Timeline: each change replaces the previous block."""
        timeline = Timeline(f"resident memory of process {os.getpid()}", measured=True)
        last_resident = number = 0
        with self._lock:
            samples = list(self._samples)
        for time_s, resident in samples:
            if resident == last_resident:
                continue
            if last_resident:
                timeline.add(EventKind.FREE, RAM, last_resident, time_s=time_s, storage=number)
            number += 1
            timeline.add(EventKind.ALLOC, RAM, resident, time_s=time_s, storage=number, label="resident memory")
            last_resident = resident
        timeline.facts = {"peak_rss_bytes": float(max(resident for _, resident in samples))}
        if why == "out of memory":
            timeline.add(EventKind.OOM, RAM, 0, time_s=samples[-1][0], label="the process")
        return timeline

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        resident = int(self._process.memory_info().rss)
        with self._lock:
            self._samples.append((time.perf_counter() - self._begin_s, resident))
            if len(self._samples) > self._limit:
                self._samples = self._thinned()
                self._interval_s *= 2

    def _thinned(self) -> list[tuple[float, int]]:
        """Return the higher of every two samples."""
        pairs = zip(self._samples[::2], self._samples[1::2], strict=False)
        peaks = [max(pair, key=lambda sample: sample[1]) for pair in pairs]
        return peaks + self._samples[len(peaks) * 2 :]
