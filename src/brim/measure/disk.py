"""Measure the rates of the disk under a directory, bypassing the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from brim.core.hardware import DISK, RAM, Link
from brim.errors import TransferError, UnsupportedError, UsageError
from brim.units import KIB, MIB, format_bytes

FILE_BYTES = 256 * MIB
# Reads and writes go through a ring: a buffer that is reused at once stays in the last-level cache, which gave rates
# a quarter above those of a run.
RING_BYTES = 128 * MIB
_WRITE_LIMIT_S, _READ_LIMIT_S = 1.0, 0.15
_WRITE_RATE_LIMIT_S, _LEAST_WRITES = 0.4, 4
# As a run reads large blocks (memory/direct_io.py and transfer.py, which this package does not import).
RUN_CHUNK_BYTES, RUN_CONCURRENCY = 16 * MIB, 2
_LEAST_FILE_BYTES, _RATES_LIMIT_S = 64 * MIB, 0.4
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, kw_only=True)
class UncachedFile:
    """An open file whose reads come from the disk: ``direct`` by O_DIRECT, else after its cache is dropped.

    ``writable``: a scratch file in ``directory``.
    """

    directory: Path
    descriptor: int
    size_bytes: int
    direct: bool
    writable: bool


@contextmanager
def uncached_file(directory: Path, *, instead: Path | None = None) -> Iterator[UncachedFile]:
    """Open a file on the disk of ``directory``: a scratch file, which has no name on Linux.

    If the directory cannot be written, its largest file is opened; if it has none, or the disk is full, that of
    ``instead``. Raises UsageError if ``directory`` does not exist or holds nothing to read; TransferError when the
    disk is full or fails.
    """
    if not hasattr(os, "preadv"):
        raise UnsupportedError("Cannot measure the disk.", f"{sys.platform} has no preadv.")
    if not directory.is_dir():
        raise UsageError(f"Cannot measure the disk under {directory}.", "There is no such directory.")
    try:
        file = _opened(directory)
    except (TransferError, UsageError) as error:
        if instead is None:
            raise
        file = _largest(instead, error)
    try:
        yield file
    finally:
        os.close(file.descriptor)


def _opened(directory: Path) -> UncachedFile:
    try:
        descriptor, direct = _open_scratch(directory)
    except OSError as error:
        return _largest(directory, error)
    size_bytes = _fill(descriptor, directory)
    return UncachedFile(
        directory=directory, descriptor=descriptor, size_bytes=size_bytes, direct=direct, writable=True
    )


def disk_link(file: UncachedFile) -> Link:
    """Measure disk -> RAM by sequential reads, as runs do them. Raises TransferError."""
    ring = touched_ring()
    large, small = _rates(file, ring)
    return Link(
        source=DISK,
        target=RAM,
        bytes_per_s=large,
        latency_s=_latency_s(file, ring[: 4 * KIB]),
        single_bytes_per_s=small,
        chunk_bytes=RUN_CHUNK_BYTES,
        concurrency=RUN_CONCURRENCY,
    )


def file_rates(path: Path) -> tuple[float, float] | None:
    """Return the bytes per second of reading a file as runs do, for large blocks and for small ones.

    Small blocks have one request in flight. None if the file is too small to measure or cannot be opened; code that
    needs it will raise an error. The rates of a given file may differ from the disk's known rates: it may lie on
    another drive, or a recently written file in the cache of a drive or host. Takes about a quarter of a second.
    Raises TransferError if reading fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    size_bytes = os.fstat(descriptor).st_size // MIB * MIB
    if not hasattr(os, "preadv") or size_bytes < _LEAST_FILE_BYTES:
        os.close(descriptor)
        return None
    try:
        descriptor, direct = _past_the_cache(descriptor)
    except OSError as error:
        raise TransferError(f"Cannot read {path} past the page cache.", f"{error.strerror}.") from error
    file = UncachedFile(
        directory=path.parent, descriptor=descriptor, size_bytes=size_bytes, direct=direct, writable=False
    )
    try:
        return _rates(file, touched_ring())
    finally:
        os.close(descriptor)


def write_link(file: UncachedFile) -> Link:
    """Measure RAM -> disk by sequential writes over existing pages to the disk. Raises TransferError."""
    assert file.writable
    ring = touched_ring()
    stop_s = time.perf_counter() + _WRITE_RATE_LIMIT_S
    rates: list[float] = []
    try:
        while len(rates) < _LEAST_WRITES or (time.perf_counter() < stop_s and len(rates) < 4 * _LEAST_WRITES):
            offset = len(rates) * RUN_CHUNK_BYTES % (file.size_bytes - RUN_CHUNK_BYTES + 1) // MIB * MIB
            at = len(rates) * RUN_CHUNK_BYTES % RING_BYTES
            began_s = time.perf_counter()
            count = os.pwrite(file.descriptor, ring[at : at + RUN_CHUNK_BYTES], offset)
            if not file.direct:
                os.fdatasync(file.descriptor)
            rates.append(count / (time.perf_counter() - began_s))
        os.fdatasync(file.descriptor)
    except OSError as error:
        raise TransferError("Cannot measure the disk's write rate.", f"{error}.") from error
    rate = statistics.median(rates)
    return Link(
        source=RAM, target=DISK, bytes_per_s=rate, single_bytes_per_s=rate, chunk_bytes=RUN_CHUNK_BYTES, concurrency=1
    )


def _rates(file: UncachedFile, ring: memoryview) -> tuple[float, float]:
    """Return the bytes per second of large blocks and of small ones, which have one request in flight.

    Both are measured in each round (noise hits them alike), each round in another part of the file.
    """
    rates: dict[int, list[float]] = {RUN_CONCURRENCY: [], 1: []}
    stop_s = time.perf_counter() + _RATES_LIMIT_S
    for index in range(5):
        if index and time.perf_counter() > stop_s:
            break
        start_bytes = index * RING_BYTES % file.size_bytes
        count_bytes = min(RING_BYTES, file.size_bytes - start_bytes)
        if count_bytes < RUN_CHUNK_BYTES:
            start_bytes, count_bytes = 0, min(RING_BYTES, file.size_bytes)
        for concurrency, measured in rates.items():
            measured.append(_read_rate(file, concurrency, ring, start_bytes, count_bytes))
    large, small = map(statistics.median, rates.values())
    return large, min(large, small)


def _read_rate(file: UncachedFile, concurrency: int, ring: memoryview, start_bytes: int, count_bytes: int) -> float:
    """Return the bytes per second of a pass over a part of the file, cut short on a slow disk."""
    offsets = range(start_bytes, start_bytes + count_bytes - RUN_CHUNK_BYTES + 1, RUN_CHUNK_BYTES)
    drop_cache(file)
    began_s = time.perf_counter()

    def read_share(index: int) -> int:
        done_bytes = 0
        for offset in offsets[index::concurrency]:
            at = (offset - start_bytes) % RING_BYTES
            done_bytes += _read(file, ring[at : at + RUN_CHUNK_BYTES], offset)
            if time.perf_counter() - began_s > _READ_LIMIT_S:
                break
        return done_bytes

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        total_bytes = sum(pool.map(read_share, range(concurrency)))
    return total_bytes / (time.perf_counter() - began_s)


def _latency_s(file: UncachedFile, buffer: memoryview) -> float:
    """Return the median seconds of a small random read."""
    drop_cache(file)
    seconds = []
    for index in range(32):
        offset = (index * 37 % 32) * (file.size_bytes // 32) // (4 * KIB) * (4 * KIB)
        began_s = time.perf_counter()
        _read(file, buffer, offset)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _read(file: UncachedFile, buffer: memoryview, offset: int) -> int:
    try:
        count = os.preadv(file.descriptor, [buffer], offset)
    except OSError as error:
        raise TransferError("Cannot measure the disk's read rate.", f"{error}.") from error
    if count == 0:
        raise TransferError("Cannot measure the disk's read rate.", f"The file ended at byte {offset}.")
    return count


def drop_cache(file: UncachedFile) -> None:
    """Drop the file from the page cache unless its reads bypass it."""
    if not file.direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _open_scratch(directory: Path) -> tuple[int, bool]:
    """Open a file without a name, which vanishes however the process ends."""
    with tempfile.TemporaryFile(prefix=".brim-probe-", dir=directory, buffering=0) as file:
        return _past_the_cache(os.dup(file.fileno()))


def _largest(directory: Path, refusal: Exception) -> UncachedFile:
    """Open the largest file in ``directory``, which cannot be written because of ``refusal``."""
    least_bytes = 4 * RUN_CHUNK_BYTES
    try:
        sizes = {entry.path: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
        largest = max(sizes, key=lambda path: sizes[path], default="")
        if sizes.get(largest, 0) >= least_bytes:
            descriptor, direct = _past_the_cache(os.open(largest, os.O_RDONLY))
            size_bytes = min(FILE_BYTES, sizes[largest] // MIB * MIB)
            return UncachedFile(
                directory=directory, descriptor=descriptor, size_bytes=size_bytes, direct=direct, writable=False
            )
    except OSError as error:
        raise TransferError(f"Cannot read a file in {directory} to measure its disk.", f"{error}.") from error
    reason = refusal.strerror if isinstance(refusal, OSError) else "see above"
    raise UsageError(
        f"Cannot measure the disk under {directory}.",
        f"It is not writable ({reason}), and has no file of {format_bytes(least_bytes)} to read instead.",
        "Name another directory on the same disk, or set XDG_CACHE_HOME to a writable one.",
    ) from refusal


def _past_the_cache(descriptor: int) -> tuple[int, bool]:
    """Make reads bypass the page cache if the filesystem can; return the descriptor and whether they do."""
    import fcntl  # missing on Windows, where nothing is measured

    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor, True
    if not _DIRECT:
        return descriptor, False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
        return descriptor, False
    return descriptor, True


def touched_ring() -> memoryview:
    """Return ``RING_BYTES`` of allocated pages, huge ones if possible, as a run's buffers have.

    With small pages the kernel's accounting for direct reads costs more than the transfer (4.5 instead of 8 GB/s).
    The bytes are random, as a disk may store zeros without writing them.
    """
    buffer = mmap.mmap(-1, RING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    piece = os.urandom(RUN_CHUNK_BYTES)
    for _ in range(RING_BYTES // len(piece)):
        buffer.write(piece)
    return memoryview(buffer)


def _fill(descriptor: int, directory: Path) -> int:
    """Write random bytes until the file is large enough or time is up; return its size in bytes."""
    wanted_bytes = min(FILE_BYTES, shutil.disk_usage(directory).free // 4)
    piece = mmap.mmap(-1, RUN_CHUNK_BYTES)
    piece[:] = os.urandom(RUN_CHUNK_BYTES)
    size_bytes, stop_s = 0, time.perf_counter() + _WRITE_LIMIT_S
    try:
        while size_bytes + RUN_CHUNK_BYTES <= wanted_bytes and (size_bytes == 0 or time.perf_counter() < stop_s):
            size_bytes += os.pwrite(descriptor, piece, size_bytes)
        os.fsync(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise TransferError(f"Cannot write a scratch file in {directory}.", f"{error}.") from error
    if size_bytes < RUN_CHUNK_BYTES:
        os.close(descriptor)
        raise TransferError(
            f"Cannot write a scratch file of at least {format_bytes(4 * RUN_CHUNK_BYTES)} in {directory}.",
            f"Its disk has {format_bytes(4 * wanted_bytes)} free.",
            "Free some space, or name another directory.",
        )
    return size_bytes
