"""``brim.watch``: remembers who allocated what, and writes it down when memory runs out, before anything is undone.

On a machine with CUDA it is PyTorch's own recorder (``torch.cuda.memory._record_memory_history``) with a bounded ring
of events and an observer that PyTorch calls when an allocation fails. The file is a snapshot as ``_dump_snapshot``
writes it. Elsewhere it is the process's resident memory over time, as a Timeline. ``brim explain`` reads both.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Protocol, TypeVar

import psutil

from brim import threads
from brim.core import EventKind, Timeline
from brim.core.hardware import RAM
from brim.core.replacing import replacing
from brim.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
STACKS = ("python", "all")
_FIRST_BYTES = (b"\x80", b"{")  # of a recording: pickle's mark, or a Timeline's JSON
_open = threading.Lock()  # PyTorch has one recorder, so at most one watch is open


class Recorder(Protocol):
    """Records until it is stopped; ``write`` puts what is there into a file."""

    def start(self, on_out_of_memory: Callable[[], None]) -> None: ...
    def stop(self) -> None: ...
    def write(self, path: Path, *, why: str) -> None: ...


class watch:
    """Record what memory does, and write it down when memory runs out.

    ``with brim.watch("run.brim"): train()``, or ``@brim.watch("run.brim")`` above a function. ``brim explain
    run.brim`` reads the file. It is written before the exception leaves the allocator, whole or not at all; the
    exception goes on as it was, with a note where the file is.

    With CUDA the file is a memory snapshot as ``torch.cuda.memory._dump_snapshot`` writes it. A recording of
    PyTorch's that is on already is used with its own settings, and left on. Without CUDA the file holds the process's
    resident memory over time; it is written when a MemoryError, or PyTorch's RuntimeError for lack of RAM, leaves the
    block.

    Args:
        path: The file to write. Its folder exists; the file does not, or is a recording, which is replaced.
        max_entries: How many events are kept at most, the newest; above 0.
        devices: Indices of the CUDA devices whose failures count. None: all.
        on_exit: Also write when the block ends, unless memory ran out before: that recording stays.
        stacks: ``"python"``, or ``"all"`` for C++ frames too, which cost more.
        interval_s: Without CUDA: seconds between two looks at the resident memory; above 0.

    Raises:
        UsageError: A value that is not allowed, a watch within a watch, a folder that is not there, a ``path`` that
            holds something else, or (at the end of the block) a file that could not be written.

    Attributes:
        path: The file.
        written: How often it was written in the last block.
        failure: What kept it from being written; None where nothing did.
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
        asked = f"brim.watch({str(path)!r}) failed."
        if max_entries < 1 or interval_s <= 0:
            raise UsageError(
                asked, f"max_entries is {max_entries}, interval_s {interval_s}.", "Both must be above 0."
            )
        if stacks not in STACKS:
            raise UsageError(asked, f"stacks is {stacks!r}.", f"It may be {' or '.join(map(repr, STACKS))}.")
        self.path, self._asked = Path(path), asked
        self._max_entries, self._devices, self._stacks = max_entries, devices, stacks
        self._on_exit, self._interval_s = on_exit, interval_s
        self._recorder: Recorder | None = None
        self.written = 0
        self.failure: Exception | None = None

    def __enter__(self) -> watch:
        if not self.path.absolute().parent.is_dir():
            raise UsageError(self._asked, f"There is no folder {self.path.absolute().parent}.")
        if self.path.is_file() and self.path.stat().st_size and self._first_byte() not in _FIRST_BYTES:
            raise UsageError(self._asked, "The file exists and is not a recording.", "Name another file.")
        if not _open.acquire(blocking=False):
            raise UsageError(self._asked, "Another watch is open.", "Use one watch for the whole run.")
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
            if not self.written and error is not None and _wants_memory(error):
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
            if self.failure is not None or (self.written and _wants_memory(error)):
                error.add_note(self._note())
        elif self.failure is not None:
            raise UsageError(self._asked, f"It could not be written: {self.failure}.") from self.failure

    def _note(self) -> str:
        """What is added below the error that goes on."""
        if self.failure is not None:
            return f"brim.watch could not write {self.path}: {type(self.failure).__name__} {self.failure}"
        return f"The memory recording is in {self.path}. To view it: brim explain {self.path}"

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call is watched."""

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return watched

    def _choose(self) -> Recorder:
        import torch

        if torch.cuda.is_available():
            from brim.measure.watch_cuda import CudaRecorder

            return CudaRecorder(self._asked, self._max_entries, self._devices, self._stacks)
        if self._devices is not None:
            raise UsageError(self._asked, f"devices is {list(self._devices)}.", "There is no CUDA on this machine.")
        return RamRecorder(self._max_entries, self._interval_s)

    def _write(self, why: str) -> None:
        """Raises nothing: what is under way is an out-of-memory error, which must not be hidden by another one."""
        assert self._recorder is not None
        try:
            with replacing(self.path) as partial:
                self._recorder.write(partial, why=why)
            self.written += 1
        except Exception as error:  # the host may be out of memory as well; told when the block is left
            self.failure = error


def _wants_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError is one; the CPU's allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and (
        "out of memory" in str(error) or "can't allocate memory" in str(error)
    )


class Resident:
    """This process's resident bytes. On Linux one read of an open file: a sample is to disturb nobody."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY)  # proc_pid_statm(5)
        except OSError:
            self._file = None
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if self._file is not None else 0

    def bytes(self) -> int:
        if self._file is None:
            return int(psutil.Process().memory_info().rss)
        return int(os.pread(self._file, 100, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RamRecorder:
    """The resident set of this process, looked at by a thread; its changes are a Timeline's events.

    When more than ``most`` of them are there, every second one is dropped and half as many are taken from then on:
    the whole run stays in sight.
    """

    def __init__(self, most: int, interval_s: float) -> None:
        self._most, self._interval_s = max(2, most), interval_s
        self._samples: list[tuple[float, int]] = []
        self._resident = Resident()
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
        self._resident.close()

    def write(self, path: Path, *, why: str) -> None:
        import json

        self._sample()
        path.write_text(json.dumps(self.timeline(why).to_json()), encoding="utf-8")

    def timeline(self, why: str) -> Timeline:
        """Each sample that differs from the one before is one block in the place of the one before."""
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
        resident = self._resident.bytes()
        with self._lock:
            self._samples.append((time.perf_counter() - self._begin_s, resident))
            if len(self._samples) > self._most:
                self._samples = self._thinned()
                self._interval_s *= 2

    def _thinned(self) -> list[tuple[float, int]]:
        """Of every two samples the higher one: peaks stay."""
        pairs = zip(self._samples[::2], self._samples[1::2], strict=False)
        kept = [max(pair, key=lambda sample: sample[1]) for pair in pairs]
        return kept + self._samples[len(kept) * 2 :]
