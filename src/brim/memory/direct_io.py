"""File reads into our buffers, and writes out of them, that leave the page cache alone.

A buffered read of a 70 GB checkpoint evicts everybody's cache, costs a second copy, and counts against a memory
cgroup. ``O_DIRECT`` has none of that; where a filesystem refuses it, the cache is dropped behind each read instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable

import torch

from brim.errors import TransferError
from brim.memory import system
from brim.memory.checkpoint_files import Extent
from brim.memory.layout import ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.units import format_bytes

CHUNK_BYTES = 16 << 20
_BOUNCE_BYTES = 4 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def bounce_bytes(runs: Iterable[ReadRun]) -> int:
    """The bounce buffer that reading ``runs`` takes: 0 when the device can write into the target itself."""
    longest = max((run.bytes for run in runs if not run.direct), default=0)
    return min(_BOUNCE_BYTES, round_up(longest, PAGE_BYTES) + PAGE_BYTES) if longest else 0


class DirectReader:
    """Reads runs of files into buffers. One thread at a time per reader: it owns its bounce buffer.

    ``make_bounce`` takes a number of bytes and gives a buffer out of a pool.
    """

    def __init__(self, make_bounce: Callable[[int], Buffer], files: OpenFiles) -> None:
        self._make_bounce, self._files = make_bounce, files
        self._bounce: Buffer | None = None

    def read(self, run: ReadRun, target: torch.Tensor, stopped: Callable[[], bool]) -> None:
        """Fill ``target`` (uint8) as ``run`` says. Returns early when ``stopped()``; raises TransferError."""
        if run.direct:
            lead = run.offset % PAGE_BYTES
            self._fill(run, run.offset - lead, run.bytes + lead, target, run.at - lead, stopped)
            return
        bounce, done = self.bounce_for(run).tensor, 0
        while done < run.bytes and not stopped():
            lead = (run.offset + done) % PAGE_BYTES
            take = min(run.bytes - done, bounce.numel() - lead)
            self._fill(run, run.offset + done - lead, take + lead, bounce, 0, stopped)
            target[run.at + done : run.at + done + take].copy_(bounce[lead : lead + take])
            done += take

    def bounce_for(self, run: ReadRun) -> Buffer:
        """The buffer that an indirect ``run`` passes through, made or made larger where that is needed."""
        size = bounce_bytes([run])
        if self._bounce is None or self._bounce.bytes < size:
            if self._bounce is not None:
                self._bounce.free()
            self._bounce = self._make_bounce(size)
        return self._bounce

    def close(self) -> None:
        """Give the bounce buffer back. Nothing may be reading."""
        if self._bounce is not None:
            self._bounce.free()
            self._bounce = None

    def _fill(
        self,
        run: ReadRun,
        offset: int,
        length: int,
        target: torch.Tensor,
        at: int,
        stopped: Callable[[], bool],
    ) -> None:
        """``length`` bytes at the page-aligned ``offset`` into the page-aligned ``at``; whole pages are read."""
        address = target.data_ptr() + at
        handle = self._files.handle(run.path)
        done = 0
        while done < length and not stopped():
            want = min(CHUNK_BYTES, round_up(length - done, PAGE_BYTES))
            window = (ctypes.c_char * want).from_address(address + done)
            try:
                got = os.preadv(handle.fd, [window], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and handle.direct:
                    handle = self._files.reopen_buffered(run.path)
                    continue
                raise _failed(run, f"{error.strerror} after {format_bytes(done)}.") from error
            if got == 0:
                raise _failed(run, f"The file ends {format_bytes(length - done)} too early.")
            if not handle.direct:
                system.forget_cached(handle.fd, offset + done, got)
            done += got
            # A short direct read stops at the file's end; the next request must start on a page again.
            if done < length and handle.direct and done % PAGE_BYTES:
                raise _failed(run, f"The file ends {format_bytes(length - done)} too early.")


def write_pages(files: OpenFiles, source: torch.Tensor, extent: Extent, stopped: Callable[[], bool]) -> None:
    """Write the head of ``source`` to ``extent``, in whole pages, past the page cache where the filesystem lets us.

    The file must have been opened for writing (``OpenFiles.adopt``). Returns early when ``stopped()``; raises
    TransferError.
    """
    length, done = round_up(extent.bytes, PAGE_BYTES), 0
    assert source.numel() >= length and extent.offset % PAGE_BYTES == 0, "pages are written whole"
    handle = files.handle(extent.path)
    while done < length and not stopped():
        want = min(CHUNK_BYTES, length - done)
        window = (ctypes.c_char * want).from_address(source.data_ptr() + done)
        try:
            put = os.pwrite(handle.fd, window, extent.offset + done)
        except OSError as error:
            if error.errno == errno.EINVAL and handle.direct:
                handle = files.reopen_buffered(extent.path)
                continue
            raise TransferError(
                f"Cannot write {format_bytes(extent.bytes)} at offset {extent.offset:,} of {extent.path}.",
                f"{error.strerror} after {format_bytes(done)}.",
                "Give a folder with more room, or a larger memory budget.",
            ) from error
        if not handle.direct:
            system.flush(handle.fd)  # dirty pages could not be dropped
            system.forget_cached(handle.fd, extent.offset + done, put)
        done += put


def _failed(run: ReadRun, found: str) -> TransferError:
    return TransferError(
        f"Cannot read {format_bytes(run.bytes)} at offset {run.offset:,} of {run.path}.",
        found,
        "Check the disk and that nothing changes the file while it is in use.",
    )


class _Handle:
    def __init__(self, fd: int, direct: bool, reopen: str, mode: int) -> None:
        self.fd, self.direct = fd, direct
        self.reopen, self.mode = reopen, mode  # the name and the way to open it again


class OpenFiles:
    """Each file opened once, without the page cache where the filesystem allows it."""

    def __init__(self) -> None:
        self._handles: dict[str, _Handle] = {}
        self._stale: list[int] = []
        self._lock = threading.Lock()

    def handle(self, path: str) -> _Handle:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = self._open(path)
            return self._handles[path]

    def adopt(self, path: str, fd: int) -> None:
        """Let ``path`` stand for a file that has no name: ``fd`` is opened again, to read and write."""
        with self._lock:
            self._handles[path] = self._open(f"/proc/self/fd/{fd}", os.O_RDWR)

    def reopen_buffered(self, path: str) -> _Handle:
        with self._lock:
            old = self._handles.get(path)
            if old is not None and old.direct:
                self._stale.append(old.fd)  # another thread may be reading through it
                again = os.open(old.reopen, old.mode)
                self._handles[path] = _Handle(again, False, old.reopen, old.mode)
            return self._handles[path]

    def close(self) -> None:
        with self._lock:
            for fd in [*(h.fd for h in self._handles.values()), *self._stale]:
                os.close(fd)
            self._handles.clear()
            self._stale.clear()

    @staticmethod
    def _open(path: str, mode: int = os.O_RDONLY) -> _Handle:
        try:
            if _O_DIRECT:
                try:
                    return _Handle(os.open(path, mode | _O_DIRECT), True, path, mode)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            return _Handle(os.open(path, mode), False, path, mode)
        except OSError as error:
            raise TransferError(f"Cannot open {path}.", f"{error.strerror}.") from error
