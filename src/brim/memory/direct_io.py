"""Read files into buffers, and write them, past the page cache.

A buffered read of a 70 GB checkpoint evicts other programs' cache, costs a second copy, and counts against a memory
cgroup. ``O_DIRECT`` avoids that; on filesystems without it, the cache is dropped after each read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from brim.errors import TransferError, UnsupportedError
from brim.memory.checkpoint_files import Extent
from brim.memory.file_versions import FileVersion, check_version, opened_version
from brim.memory.layout import ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, round_up
from brim.units import format_bytes

CHUNK_BYTES = 16 << 20
_BOUNCE_BYTES = 4 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NEEDED = {
    "preadv(2)": (os, "preadv"),
    "pwrite(2)": (os, "pwrite"),
    "private memory mappings": (mmap, "MAP_PRIVATE"),
}


def require_direct_io() -> None:
    """Raise UnsupportedError if Python cannot read files into given buffers: on Windows."""
    missing = [name for name, (module, attribute) in _NEEDED.items() if not hasattr(module, attribute)]
    if missing:
        raise UnsupportedError(
            "Cannot move a model between memory and disk.",
            f"{sys.platform} has no {' and no '.join(missing)} in Python.",
            "Use Linux, or WSL 2 on Windows. brim estimate, brim plan and brim explain work here.",
        )


def flush(descriptor: int) -> None:
    """Write the file's data to the drive, its times not necessarily."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write ``content`` at ``offset`` of a file, through the page cache."""
    while content:
        count = os.pwrite(descriptor, content[: 1 << 30], offset)
        content, offset = content[count:], offset + count


def drop_cached(descriptor: int, offset: int = 0, size_bytes: int = 0) -> None:
    """Drop pages of a file (all, if 0 bytes) from the page cache, if the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def in_page_cache(descriptor: int, offset: int, size_bytes: int) -> bool:
    """Return True if the page cache has this range of a file, which begins on a page (mincore(2))."""
    with (
        suppress(OSError, ValueError),  # a filesystem without mappings, a file that has become shorter
        mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ, offset=offset) as pages,
    ):
        mapped, resident = np.frombuffer(pages, np.uint8), np.zeros(-(-size_bytes // mmap.PAGESIZE), np.uint8)
        failed = ctypes.CDLL(None).mincore(mapped.ctypes, ctypes.c_size_t(size_bytes), resident.ctypes)
        del mapped  # or the mapping could not be closed
        return not failed and bool((resident & 1).all())
    return False


def bounce_bytes(runs: Iterable[ReadRun]) -> int:
    """Return the bytes of the bounce buffer for ``runs``; 0 if the disk can write directly into the target."""
    longest = max((run.bytes for run in runs if not run.direct), default=0)
    return min(_BOUNCE_BYTES, round_up(longest, PAGE_BYTES) + PAGE_BYTES) if longest else 0


@dataclass(eq=False)
class DirectReader:
    """Reads runs of files into buffers. Not thread-safe, as it owns a bounce buffer.

    ``make_bounce`` allocates a number of bytes from a pool.
    """

    _make_bounce: Callable[[int], Buffer]
    _files: OpenFiles
    _bounce: Buffer | None = None

    def read(self, run: ReadRun, target: torch.Tensor, stopped: Callable[[], bool]) -> None:
        """Read ``run`` into ``target`` (uint8). Returns early when ``stopped()``; raises TransferError."""
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
        """Return a bounce buffer large enough for ``run``."""
        size = bounce_bytes([run])
        if self._bounce is None or self._bounce.bytes < size:
            if self._bounce is not None:
                self._bounce.free()
            self._bounce = self._make_bounce(size)
        return self._bounce

    def close(self) -> None:
        """Free the bounce buffer after all reads."""
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
        """Read ``length`` bytes at a page-aligned ``offset`` into the page-aligned ``at``, in full pages."""
        failed = partial(read_error, run.path, run.offset, run.bytes)
        address = target.data_ptr() + at
        handle = self._files.handle(run.path)
        done = 0
        while done < length and not stopped():
            want = min(CHUNK_BYTES, round_up(length - done, PAGE_BYTES))
            window = (ctypes.c_char * want).from_address(address + done)
            try:
                cached = self._files.read_cached(handle, window, offset + done)
                got = cached or os.preadv(handle.fd, [window], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and handle.direct:
                    handle = self._files.reopen_buffered(run.path)
                    continue
                raise failed(f"{error.strerror} after {format_bytes(done)}.") from error
            if got == 0:
                raise failed(f"The file ends {format_bytes(length - done)} too early.")
            if not handle.direct and not cached:
                drop_cached(handle.fd, offset + done, got)
            self._files.check(run.path, handle)
            done += got
            # A short direct read stops at the file's end; another request would have to start on a page.
            if done < length and handle.direct and done % PAGE_BYTES:
                raise failed(f"The file ends {format_bytes(length - done)} too early.")


def write_pages(files: OpenFiles, source: torch.Tensor, extent: Extent, stopped: Callable[[], bool]) -> None:
    """Write the head of ``source`` to ``extent`` in full pages, past the page cache if possible.

    The file must be open for writing (``OpenFiles.adopt``). Returns early when ``stopped()``; raises TransferError.
    """
    length, done = round_up(extent.bytes, PAGE_BYTES), 0
    assert source.numel() >= length and extent.offset % PAGE_BYTES == 0, "not full pages"
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
            flush(handle.fd)  # dirty pages could not be dropped
            drop_cached(handle.fd, extent.offset + done, put)
        done += put


def read_error(path: str, offset: int, bytes: int, reason: str) -> TransferError:
    return TransferError(
        f"Cannot read {format_bytes(bytes)} at offset {offset:,} of {path}.",
        reason,
        "Check the disk and that nothing changes the file while it is in use.",
    )


@dataclass(eq=False)
class _Handle:
    fd: int
    direct: bool
    reopen: str  # the path to open it again
    mode: int
    version: FileVersion | None  # None for a file opened for writing


class OpenFiles:
    """Opens each file once, bypassing the page cache if the filesystem can.

    ``uses_page_cache``: its bytes need no read. Streamed weights do not use it: plans are made for the drive's rate.
    """

    uses_page_cache = True

    def __init__(self) -> None:
        self._handles: dict[str, _Handle] = {}
        self._stale: list[int] = []
        self._buffered: dict[int, int] = {}  # by the descriptor that bypasses the page cache
        self._lock = threading.Lock()

    def handle(self, path: str) -> _Handle:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = self._open(path)
            return self._handles[path]

    def read_cached(self, handle: _Handle, window: Any, offset: int) -> int:
        """Fill ``window`` from the page cache and return the bytes read; 0 if it does not have them."""
        size_bytes = min(len(window), os.fstat(handle.fd).st_size - offset)
        if not (self.uses_page_cache and size_bytes > 0 and in_page_cache(handle.fd, offset, size_bytes)):
            return 0
        with self._lock:
            if handle.fd not in self._buffered:
                self._buffered[handle.fd] = os.open(f"/proc/self/fd/{handle.fd}", os.O_RDONLY)
        return os.preadv(self._buffered[handle.fd], [window], offset)

    def adopt(self, path: str, fd: int) -> None:
        """Register the unnamed file ``fd`` as ``path``, and open it again to read and write."""
        with self._lock:
            self._handles[path] = self._open(f"/proc/self/fd/{fd}", os.O_RDWR)

    def check(self, path: str, handle: _Handle) -> None:
        """Raise TransferError if the file was written to since its header was read."""
        if handle.version is not None:
            check_version(path, handle.fd, handle.version)

    def reopen_buffered(self, path: str) -> _Handle:
        with self._lock:
            old = self._handles.get(path)
            if old is not None and old.direct:
                self._stale.append(old.fd)  # another thread may be using it
                again = os.open(old.reopen, old.mode)
                self._handles[path] = _Handle(again, False, old.reopen, old.mode, old.version)
                self.check(path, self._handles[path])
            return self._handles[path]

    def close(self) -> None:
        with self._lock:
            for fd in [*(h.fd for h in self._handles.values()), *self._buffered.values(), *self._stale]:
                os.close(fd)
            self._buffered.clear()
            self._handles.clear()
            self._stale.clear()

    @staticmethod
    def _open(path: str, mode: int = os.O_RDONLY) -> _Handle:
        try:
            fd, direct = -1, bool(_O_DIRECT)
            if direct:
                try:
                    fd = os.open(path, mode | _O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    direct = False
            fd = fd if direct else os.open(path, mode)
            try:
                version = opened_version(path, fd) if mode == os.O_RDONLY else None
            except BaseException:
                os.close(fd)
                raise
            return _Handle(fd, direct, path, mode, version)
        except OSError as error:
            raise TransferError(f"Cannot open {path}.", f"{error.strerror}.") from error
