"""Move bytes between tiers, by one interface and three engines.

``ThreadEngine`` uses threads (disk -> RAM, RAM -> a pool in RAM that emulates VRAM), ``StreamEngine``
(``streams.py``) streams and events, ``NullEngine`` only records the moves, for fake tensors. Predictions, tests
without a GPU and runs on one share the code above them.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import copy
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from brim.core.hardware import DISK, RAM
from brim.errors import BrimError, TransferError
from brim.memory.checkpoint_files import Extent
from brim.memory.direct_io import CHUNK_BYTES, DirectReader, OpenFiles, write_pages
from brim.memory.layout import Move, ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.memory.recorder import Recorder
from brim.threads import Flag, Worker

_THREAD_NAME = "brim-transfer"


class Waitable(Protocol):
    def wait(self) -> None:
        """Return when the work is done, or certain to be done before later device work. Raises its BrimError."""

    @property
    def done(self) -> bool:
        """True if the work has ended, successfully or not."""


class Ticket:
    """The completion of a job on a thread."""

    def __init__(self) -> None:
        self._done = Flag()
        self._error: BrimError | None = None

    def finish(self, error: BrimError | None = None) -> None:
        self._error = error
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            # A copy, as a raised error references the frames that it passes, with the tensors of a failed step.
            raise copy.copy(self._error) from self._error.__cause__


class Done:
    """Completed work."""

    done = True

    def wait(self) -> None:
        """Return at once."""


class All:
    """Waits for several conditions and raises the first error."""

    def __init__(self, conditions: Sequence[Waitable]) -> None:
        self._conditions = tuple(conditions)

    @property
    def done(self) -> bool:
        return all(condition.done for condition in self._conditions)

    def wait(self) -> None:
        for condition in self._conditions:
            condition.wait()


class Settled:
    """Waits for a move and ignores its error: a buffer is free after a failure too."""

    def __init__(self, condition: Waitable) -> None:
        self.condition = condition

    def wait(self) -> None:
        with contextlib.suppress(BrimError):
            self.condition.wait()

    @property
    def done(self) -> bool:
        return self.condition.done


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copy:
    """A copy of ``source`` (uint8) to the head of ``target`` once ``after`` is done; ``route`` names the two tiers.

    With ``moves``, only these parts are copied, each to its place.
    """

    source: torch.Tensor
    target: Buffer
    label: str
    after: Sequence[Waitable]
    route: tuple[str, str]
    moves: Sequence[Move]

    @property
    def bytes(self) -> int:
        """The bytes that count as copied: with ``moves``, those of the block in its slot, padding included."""
        if not self.moves:
            return self.source.numel()
        return round_up(max(move.target + move.bytes for move in self.moves), PAGE_BYTES)

    def pieces(self, limit_bytes: int = sys.maxsize) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over pairs of target and source of at most ``limit_bytes`` each."""
        for move in self.moves or [Move(source=0, target=0, bytes=self.source.numel())]:
            for begin in range(0, move.bytes, limit_bytes):
                piece = self.source[move.source + begin : move.source + min(begin + limit_bytes, move.bytes)]
                into = move.target + begin
                yield self.target.tensor[into : into + piece.numel()], piece


class Engine(abc.ABC):
    """Moves bytes between tiers and records each move."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @abc.abstractmethod
    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Read files into RAM once ``after`` is done."""

    def copy(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        route: tuple[str, str],
        moves: Sequence[Move] = (),
    ) -> Waitable:
        """Copy ``source`` to the head of ``target``, as ``Copy`` describes."""
        return self._submit(Copy(source=source, target=target, label=label, after=after, route=route, moves=moves))

    @abc.abstractmethod
    def _submit(self, copy: Copy) -> Waitable: ...

    def cross(self, source: torch.Tensor, target: torch.Tensor, label: str, route: tuple[str, str]) -> None:
        """Copy ``source`` to ``target`` (both uint8, of one length) on the current stream, in order with compute.

        ``finish(mark())`` makes the host wait for it.
        """
        begin_s = self.recorder.now_s()
        target.copy_(source, non_blocking=True)
        self.recorder.copied(*route, source.numel(), begin_s, label)

    @abc.abstractmethod
    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Waitable:
        """Write the head of ``source`` to ``extent`` of a file once ``after`` is done.

        ``source`` is uint8 in RAM, page-aligned and of full pages, and must not change until the write is done. The
        extent begins on a page; the file's bytes up to the end of its last page are overwritten too.
        """

    def mark(self) -> Waitable:
        """Return the completion of all compute queued so far; without streams, compute is synchronous."""
        return Done()

    def finish(self, condition: Waitable) -> None:
        """Make the host wait, even if ``wait`` would only make later device work wait."""
        condition.wait()

    @abc.abstractmethod
    def close(self) -> None:
        """Stop all moves, wait for them, and end the threads. Safe to call twice."""


class _Lane:
    """A thread that does one job after another, and starts with the first."""

    def __init__(self, name: str) -> None:
        self.stopped = threading.Event()
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None] = queue.SimpleQueue()
        self._thread: Worker | None = None
        self._retired, self._submitting = False, threading.RLock()
        _lanes.add(self)

    def submit(self, job: Callable[[], None]) -> Ticket:
        ticket = Ticket()
        if self.stopped.is_set():
            ticket.finish(_closed())
            return ticket
        with self._submitting:
            if not self._retired:
                self._start()
                self._jobs.put((job, ticket))
                return ticket
        ticket.finish(self.outcome(job))
        return ticket

    def _start(self) -> None:
        if self._thread is None:
            thread = Worker(self._work, f"{_THREAD_NAME}-{self._name}", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        self.stopped.set()
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():  # garbage collection may run anywhere
                self._thread.join()
            self._thread = None

    def retire(self) -> None:
        """End the thread after its queued jobs. Later jobs run in the calling thread."""
        with self._submitting:
            self._retired = True
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the thread's end after ``retire``."""
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        # A separate call, so that a waiting lane does not keep the last job's memory alive.
        entry = self._jobs.get()
        if entry is None:
            return False
        job, ticket = entry
        del entry
        error = self.outcome(job)
        del job  # the waiting thread may need the memory that the job holds
        ticket.finish(error)
        return True

    def outcome(self, job: Callable[[], None]) -> BrimError | None:
        """Run ``job`` and return its error."""
        if self.stopped.is_set():
            return _closed()
        try:
            job()
        except BrimError as failure:
            return failure
        except Exception as failure:  # else the waiting thread would hang
            error = TransferError("Cannot move bytes between tiers.", repr(failure))
            error.__cause__ = failure
            return error
        return None


_lanes: weakref.WeakSet[_Lane] = weakref.WeakSet()  # the exit of the process waits for them
if hasattr(os, "register_at_fork"):  # missing on Windows
    os.register_at_fork(after_in_child=_lanes.clear)  # a child has none of the threads


@atexit.register
def _retire_all() -> None:
    """End all threads before the interpreter finalizes; a thread killed later in PyTorch's code aborts the process.

    CPython (Python/ceval_gil.c) ends a thread that requests the lock of a finalizing interpreter by ``pthread_exit``,
    which cannot unwind C++ code declared noexcept.
    """
    lanes = list(_lanes)
    for lane in lanes:
        lane.retire()
    for lane in lanes:
        lane.join()


def _closed() -> TransferError:
    return TransferError("Cannot move bytes between tiers.", "The transfer engine is closed.")


class ThreadEngine(Engine):
    """Moves bytes with one thread each for reads, help with large reads, writes, and copies in either direction.

    ``make_bounce`` allocates the buffer that unaligned reads pass through, on first use.
    """

    def __init__(self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer]) -> None:
        super().__init__(recorder)
        self._reader = DirectReader(make_bounce, files)
        self._disk, self._disk_helper, self._copy = _Lane("disk"), _Lane("disk-helper"), _Lane("copy")
        self._files, self._write, self._back = files, _Lane("write"), _Lane("back")

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Ticket:
        def job() -> None:
            for condition in after:
                condition.wait()
            begin_s = self.recorder.now_s()
            own, helped = _shares(runs)
            help_ = self._disk_helper.submit(lambda: self._fill(helped, target)) if helped else Done()
            try:
                self._fill(own, target)
            finally:
                Settled(help_).wait()  # it writes into the target
            help_.wait()
            self.recorder.copied(DISK, RAM, sum(run.bytes for run in runs), begin_s, label)

        return self._disk.submit(job)

    def _fill(self, runs: Sequence[ReadRun], target: Buffer) -> None:
        for run in runs:
            self._reader.read(run, target.tensor, self._disk.stopped.is_set)
        if self._disk.stopped.is_set():
            raise _closed()

    def _submit(self, copy: Copy) -> Ticket:
        def job() -> None:
            for condition in copy.after:
                condition.wait()
            begin_s = self.recorder.now_s()
            for target, source in copy.pieces():
                target.copy_(source)
            self.recorder.copied(*copy.route, copy.bytes, begin_s, copy.label)

        return (self._back if copy.route[1] == RAM else self._copy).submit(job)

    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Ticket:
        def job() -> None:
            for condition in after:
                condition.wait()
            begin_s = self.recorder.now_s()
            write_pages(self._files, source, extent, self._write.stopped.is_set)
            if self._write.stopped.is_set():
                raise _closed()
            self.recorder.copied(RAM, DISK, extent.bytes, begin_s, label)

        return self._write.submit(job)

    def close(self) -> None:
        self._write.stopped.set()
        self._disk.stopped.set()
        self._disk_helper.stopped.set()
        self._disk.close()
        self._disk_helper.close()
        self._copy.close()
        self._back.close()
        self._write.close()
        self._reader.close()


def _shares(runs: Sequence[ReadRun]) -> tuple[list[ReadRun], list[ReadRun]]:
    """Divide runs between a reader and its helper: two requests in flight read 10 to 15 % faster.

    Only direct runs are divided, at multiples of the request size so that every piece stays aligned.
    """
    direct = sum(run.bytes for run in runs if run.direct)
    if direct < 2 * CHUNK_BYTES:
        return list(runs), []
    pieces = [piece for run in runs if run.direct for piece in _cut(run)]
    return [*(run for run in runs if not run.direct), *pieces[::2]], pieces[1::2]


def _cut(run: ReadRun) -> list[ReadRun]:
    pieces = []
    start = run.offset
    while start < run.offset + run.bytes:
        end = min((start // CHUNK_BYTES + 1) * CHUNK_BYTES, run.offset + run.bytes)
        pieces.append(replace(run, offset=start, bytes=end - start, at=run.at + start - run.offset))
        start = end
    return pieces


class NullEngine(Engine):
    """Records moves of fake tensors without moving anything."""

    def __init__(self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer]) -> None:
        super().__init__(recorder)
        self._reader = DirectReader(make_bounce, files)

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Done:
        for run in runs:
            if not run.direct:
                self._reader.bounce_for(run)
        return self._record(DISK, RAM, sum(run.bytes for run in runs), label)

    def _submit(self, copy: Copy) -> Done:
        return self._record(*copy.route, copy.bytes, copy.label)

    def cross(self, source: torch.Tensor, target: torch.Tensor, label: str, route: tuple[str, str]) -> None:
        self._record(*route, source.numel(), label)

    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Done:
        return self._record(RAM, DISK, extent.bytes, label)

    def _record(self, source: str, target: str, bytes: int, label: str) -> Done:
        self.recorder.copied(source, target, bytes, self.recorder.now_s(), label)
        return Done()

    def close(self) -> None:
        pass
