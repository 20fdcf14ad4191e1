"""The thread that writes a checkpoint while training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from brim.run.checkpoint.stream import Ring, Window, pieces
from brim.run.checkpoint.writer import FolderWriter, PlannedFile
from brim.threads import Worker


@dataclass(frozen=True, slots=True)
class _Piece:
    file: int
    name: str
    at: int
    window: Window


class _Abandoned(Exception):
    """The producer of the tensors has failed."""


class WriterThread:
    """Writes the tensors fed to it, then calls ``complete``; after a failure it removes the incomplete checkpoint.

    Only this thread touches the disk. It ends after ``end`` or ``abandon`` was called.
    """

    def __init__(self, writer: FolderWriter, ring: Ring, complete: Callable[[], None]) -> None:
        self._writer, self._ring, self._complete = writer, ring, complete
        self._jobs: queue.SimpleQueue[_Piece | bool] = queue.SimpleQueue()  # True: all fed; False: abandon
        self._error: BaseException | None = None
        self._failed = threading.Event()
        # Not a daemon: a program that exits without waiting for it still gets its checkpoint.
        self._thread = Worker(self._work, "brim-checkpoint", daemon=False)
        self._thread.start()

    def feed(self, first: int, plans: Sequence[PlannedFile], values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor of ``plans``, whose files begin at number ``first``; waits while the ring is full.

        Returns early when writing has failed; ``wait`` raises the error.
        """
        files = {name: first + number for number, plan in enumerate(plans) for name in plan.sources}
        for name, tensor in values:
            file = files.pop(name)
            source = plans[file - first].sources[name]
            layout = (tensor.dtype, tuple(tensor.shape))
            assert layout == (source.dtype, source.shape), f"{name}: {layout} is not what the layout announced"
            if not self._pass_on(file, name, tensor):
                return
        assert not files, f"announced but not given: {sorted(files)}"

    def _pass_on(self, file: int, name: str, tensor: torch.Tensor) -> bool:
        at = 0
        for piece in pieces(tensor, self._ring.piece_bytes):
            window = self._ring.take(piece.numel(), self._failed.is_set)
            if window is None:
                return False
            window.tensor.copy_(piece)
            self._jobs.put(_Piece(file, name, at, window))
            at += piece.numel()
        return True

    def end(self) -> None:
        """Announce that all tensors were fed."""
        self._jobs.put(True)

    def abandon(self) -> None:
        """Discard the checkpoint. Returns when its files are removed."""
        self._jobs.put(False)
        self.join()

    def join(self) -> None:
        """Wait until the thread has ended, with or without an error."""
        self._thread.join()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error of the thread."""
        self.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._writer.create()
            while isinstance(job := self._jobs.get(), _Piece):
                self._writer.write(job.file, job.name, job.at, job.window.tensor)
                self._ring.give(job.window)
            if not job:
                raise _Abandoned
            self._complete()
        except BaseException as error:  # ``wait`` raises it in the caller's thread
            self._error = error
            self._failed.set()
            self._ring.wake()
            self._writer.abandon()
