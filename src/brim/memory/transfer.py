"""Moving bytes between tiers: one interface, three engines.

``ThreadEngine`` moves with threads (disk -> RAM, RAM -> a pool in RAM that plays VRAM), ``StreamEngine``
(``streams.py``) with streams and events, ``NullEngine`` only writes down what would be moved, for fake tensors. The
code above them is the same, so what is predicted, what is tested without a GPU and what runs on one cannot differ.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
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
        """Return when what this stands for is done, or is certain to be before later device work.

        Raises the BrimError that it ended with.
        """

    @property
    def done(self) -> bool:
        """Whether it is over, well or badly."""


class Ticket:
    """A move under way on a thread."""

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
            # A copy: what is raised keeps every frame that it passes, and with them what a failed step had made.
            raise copy.copy(self._error) from self._error.__cause__


class Done:
    """Something that needs no waiting for."""

    done = True

    def wait(self) -> None:
        """It is done."""


class All:
    """All of several conditions; the first failure is everybody's."""

    def __init__(self, conditions: Sequence[Waitable]) -> None:
        self._conditions = tuple(conditions)

    @property
    def done(self) -> bool:
        return all(condition.done for condition in self._conditions)

    def wait(self) -> None:
        for condition in self._conditions:
            condition.wait()


class Settled:
    """Waits for a move whose failure does not matter to the next one: a buffer is free however it went."""

    def __init__(self, condition: Waitable) -> None:
        self.condition = condition

    def wait(self) -> None:
        with contextlib.suppress(BrimError):
            self.condition.wait()

    @property
    def done(self) -> bool:
        return self.condition.done


def whole(source: torch.Tensor) -> list[Move]:
    return [Move(source=0, target=0, bytes=source.numel())]


def copied_bytes(source: torch.Tensor, moves: Sequence[Move]) -> int:
    """What counts as copied: with ``moves`` the block in its slot, what lies between its tensors included."""
    if not moves:
        return source.numel()
    return round_up(max(move.target + move.bytes for move in moves), PAGE_BYTES)


class Engine(Protocol):
    recorder: Recorder

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Files -> RAM, once all of ``after`` is done."""

    def copy(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        way: tuple[str, str],
        moves: Sequence[Move] = (),
    ) -> Waitable:
        """``source`` (uint8) -> the head of ``target``, once all of ``after`` is done; ``way`` names the tiers.

        With ``moves`` these parts of it alone, each to its place.
        """

    def cross(self, source: torch.Tensor, target: torch.Tensor, label: str, way: tuple[str, str]) -> None:
        """``source`` -> ``target`` (both uint8, of one length) in the order of compute, past what is queued.

        ``finish(mark())`` makes the host wait for it.
        """

    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Waitable:
        """The head of ``source`` (uint8 in RAM, page-aligned, whole pages long) -> ``extent`` of a file.

        It begins once all of ``after`` is done; ``source`` must stay as it is until then and until it is done. The
        extent begins on a page; the file's bytes up to the end of its last page are written too.
        """

    def mark(self) -> Waitable:
        """Stands for all the compute that has been asked for until now."""

    def finish(self, condition: Waitable) -> None:
        """Make the host wait, also for what would otherwise make only later device work wait."""

    def close(self) -> None:
        """Stop what is under way, wait for it, end every thread. Safe to call twice."""


class _Lane:
    """A thread that does one thing after another. It starts with its first job."""

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
        """Begin to end the thread once all that it was asked for is done. Jobs are done by who asks from now on."""
        with self._submitting:
            self._retired = True
        self._jobs.put(None)

    def join(self) -> None:
        """After ``retire``: wait for the thread's end."""
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        # In a call of its own: while a lane waits for work, it must not keep the last job's memory alive.
        entry = self._jobs.get()
        if entry is None:
            return False
        job, ticket = entry
        del entry
        error = self.outcome(job)
        del job  # who waits may count on the memory that it held
        ticket.finish(error)
        return True

    def outcome(self, job: Callable[[], None]) -> BrimError | None:
        """Do ``job`` at once. Returns what it failed with."""
        if self.stopped.is_set():
            return _closed()
        try:
            job()
        except BrimError as failure:
            return failure
        except Exception as failure:  # a thread must hand over whatever happened, or the waiter hangs
            error = TransferError("Cannot move bytes between tiers.", repr(failure))
            error.__cause__ = failure
            return error
        return None


_lanes: weakref.WeakSet[_Lane] = weakref.WeakSet()  # what the end of the process has to wait for
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_lanes.clear)  # a child has none of the threads


@atexit.register
def _retire_all() -> None:
    """End all threads while Python is whole. One that is killed later within PyTorch's code aborts the process.

    (A thread that asks for the interpreter's lock when that is being taken down is ended by ``pthread_exit``, which
    cannot pass C++ code that must not throw; CPython, Python/ceval_gil.c.)
    """
    lanes = list(_lanes)
    for lane in lanes:
        lane.retire()
    for lane in lanes:
        lane.join()


def _closed() -> TransferError:
    return TransferError("Cannot move bytes between tiers.", "The transfer engine is closed.")


class ThreadEngine:
    """Lanes of threads: one reads files, with another's help for large blocks; one writes files; one copies to the
    compute tier, one back from it.

    Compute is synchronous, so a mark is always done. ``make_bounce`` gives the buffer that unaligned reads pass
    through; it is taken from a pool on first use.
    """

    def __init__(self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer]) -> None:
        self.recorder = recorder
        self._reader = DirectReader(make_bounce, files)
        self._disk, self._disk_helper, self._copy = _Lane("disk"), _Lane("disk-helper"), _Lane("copy")
        self._files, self._write, self._back = files, _Lane("write"), _Lane("back")

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Ticket:
        def job() -> None:
            for condition in after:
                condition.wait()
            begin_s = self.recorder.now_s()
            mine, helped = _shares(runs)
            help_ = self._disk_helper.submit(lambda: self._fill(helped, target)) if helped else Done()
            try:
                self._fill(mine, target)
            finally:
                Settled(help_).wait()  # it writes into the target: nobody may have it before
            help_.wait()
            self.recorder.copied(DISK, RAM, sum(run.bytes for run in runs), begin_s, label)

        return self._disk.submit(job)

    def _fill(self, runs: Sequence[ReadRun], target: Buffer) -> None:
        for run in runs:
            self._reader.read(run, target.tensor, self._disk.stopped.is_set)
        if self._disk.stopped.is_set():
            raise _closed()

    def copy(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        way: tuple[str, str],
        moves: Sequence[Move] = (),
    ) -> Ticket:
        def job() -> None:
            for condition in after:
                condition.wait()
            begin_s = self.recorder.now_s()
            for move in moves or whole(source):
                piece = source[move.source : move.source + move.bytes]
                target.tensor[move.target : move.target + move.bytes].copy_(piece)
            self.recorder.copied(*way, copied_bytes(source, moves), begin_s, label)

        return (self._back if way[1] == RAM else self._copy).submit(job)

    def cross(self, source: torch.Tensor, target: torch.Tensor, label: str, way: tuple[str, str]) -> None:
        begin_s = self.recorder.now_s()
        target.copy_(source)
        self.recorder.copied(*way, source.numel(), begin_s, label)

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

    def mark(self) -> Done:
        return Done()

    def finish(self, condition: Waitable) -> None:
        condition.wait()

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
    """What one reader takes and what its helper does: two requests in flight get 10 to 15 % more out of a drive.

    Only direct runs are shared, cut at multiples of the request size so that every piece stays aligned.
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


class NullEngine:
    """Moves nothing: the same calls on fake tensors become a predicted Timeline."""

    def __init__(self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer]) -> None:
        self.recorder = recorder
        self._reader = DirectReader(make_bounce, files)

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Done:
        for run in runs:
            if not run.direct:
                self._reader.bounce_for(run)
        self.recorder.copied(DISK, RAM, sum(run.bytes for run in runs), self.recorder.now_s(), label)
        return Done()

    def copy(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        way: tuple[str, str],
        moves: Sequence[Move] = (),
    ) -> Done:
        self.recorder.copied(*way, copied_bytes(source, moves), self.recorder.now_s(), label)
        return Done()

    def cross(self, source: torch.Tensor, target: torch.Tensor, label: str, way: tuple[str, str]) -> None:
        self.recorder.copied(*way, source.numel(), self.recorder.now_s(), label)

    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Done:
        self.recorder.copied(RAM, DISK, extent.bytes, self.recorder.now_s(), label)
        return Done()

    def mark(self) -> Done:
        return Done()

    def finish(self, condition: Waitable) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""
