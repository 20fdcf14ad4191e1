"""How fast the disk under a directory reads, with the page cache out of the way."""

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
_SWEEP_BYTES = 128 * MIB
_CHUNKS_BYTES = (1 * MIB, 4 * MIB, 16 * MIB)
_CONCURRENCIES = (1, 2, 4)
# Reads go to one place after the other, and writes come from there: a buffer that is used again at once stays in the
# last-level cache, and the rates that were seen with it were a quarter above those of a run.
RING_BYTES = 128 * MIB
_WRITE_LIMIT_S, _READ_LIMIT_S, _SWEEP_LIMIT_S, _FINAL_LIMIT_S = 1.0, 0.15, 1.2, 0.8
_WRITE_RATE_LIMIT_S, _LEAST_WRITES = 0.4, 4
# As a run reads large blocks (memory/direct_io.py and transfer.py; this package knows nothing of that one).
RUN_CHUNK_BYTES, RUN_CONCURRENCY = 16 * MIB, 2
_LEAST_FILE_BYTES, _FILE_LIMIT_S = 64 * MIB, 0.2
_DIRECT = getattr(os, "O_DIRECT", 0)
_Way = tuple[int, int]  # bytes of one read, threads that read


@dataclass(frozen=True, kw_only=True)
class UncachedFile:
    """A file open for reads that come from the disk. ``direct``: by O_DIRECT, else dropped from the cache first.

    ``writable``: a scratch file of our own. ``directory``: where it lies.
    """

    directory: Path
    descriptor: int
    size_bytes: int
    direct: bool
    writable: bool


@contextmanager
def uncached_file(directory: Path, *, instead: Path | None = None) -> Iterator[UncachedFile]:
    """Something to read on the disk of ``directory``: a scratch file, which on Linux has no name to be left behind.

    In a directory that cannot be written, its largest file is read; where it has none, or the disk is full, that of
    ``instead``. Raises UsageError when ``directory`` is none, or holds nothing to read; TransferError when the disk
    is full or fails.
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
    """disk -> RAM by sequential reads: each chunk size with each number of threads, then the best again.

    The winner is measured afresh: the best of many noisy medians is too good. Raises TransferError.
    """
    ring = touched_ring()
    ways = [(chunk, threads) for chunk in _CHUNKS_BYTES if chunk <= file.size_bytes for threads in _CONCURRENCIES]
    sweep = _interleaved(file, ways, ring, part_bytes=_SWEEP_BYTES, rounds=3, limit_s=_SWEEP_LIMIT_S)
    alone = {way: rates for way, rates in sweep.items() if way[1] == 1}
    finalists = list(dict.fromkeys((_cheapest_of_the_best(sweep), _cheapest_of_the_best(alone))))
    fresh = _interleaved(file, finalists, ring, part_bytes=FILE_BYTES, rounds=5, limit_s=_FINAL_LIMIT_S)
    chunk_bytes, concurrency = best = _cheapest_of_the_best(fresh)
    return Link(
        source=DISK,
        target=RAM,
        bytes_per_s=statistics.median(fresh[best]),
        latency_s=_latency_s(file, ring[: 4 * KIB]),
        single_bytes_per_s=statistics.median(fresh[finalists[-1]]),
        chunk_bytes=chunk_bytes,
        concurrency=concurrency,
    )


def file_rates(path: Path) -> tuple[float, float] | None:
    """Bytes per second of reading a file that is there, as runs read large blocks, and as they read those that are
    too small for two requests in flight.

    None for one that is too small to tell, or cannot be opened: code that needs it will raise an error.

    What was written just now may come faster, out of the cache of a drive or of a host, than what has rested for
    long, and a file may lie on another drive than the one that is known. Takes a quarter of a second or so. Raises
    TransferError where reading fails.
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
        ways = [(RUN_CHUNK_BYTES, RUN_CONCURRENCY), (RUN_CHUNK_BYTES, 1)]
        rounds = _interleaved(file, ways, touched_ring(), part_bytes=_SWEEP_BYTES, rounds=5, limit_s=_FILE_LIMIT_S)
    finally:
        os.close(descriptor)
    large, small = (statistics.median(rounds[way]) for way in ways)
    return large, min(large, small)


def write_link(file: UncachedFile) -> Link:
    """RAM -> disk by sequential writes over pages that the file has already, until they are on the disk.

    Raises TransferError.
    """
    assert file.writable
    chunk_bytes = max(_CHUNKS_BYTES)
    ring = touched_ring()
    stop_s = time.perf_counter() + _WRITE_RATE_LIMIT_S
    rates: list[float] = []
    try:
        while len(rates) < _LEAST_WRITES or (time.perf_counter() < stop_s and len(rates) < 4 * _LEAST_WRITES):
            offset = len(rates) * chunk_bytes % (file.size_bytes - chunk_bytes + 1) // MIB * MIB
            at = len(rates) * chunk_bytes % RING_BYTES
            began_s = time.perf_counter()
            count = os.pwrite(file.descriptor, ring[at : at + chunk_bytes], offset)
            if not file.direct:
                os.fdatasync(file.descriptor)
            rates.append(count / (time.perf_counter() - began_s))
        os.fdatasync(file.descriptor)
    except OSError as error:
        raise TransferError("Cannot measure the disk's write rate.", f"{error}.") from error
    rate = statistics.median(rates)
    return Link(
        source=RAM, target=DISK, bytes_per_s=rate, single_bytes_per_s=rate, chunk_bytes=chunk_bytes, concurrency=1
    )


def _interleaved(
    file: UncachedFile, ways: list[_Way], ring: memoryview, *, part_bytes: int, rounds: int, limit_s: float
) -> dict[_Way, list[float]]:
    """Rates of every way, round by round (noise hits all alike), each round in another part of the file."""
    rates: dict[_Way, list[float]] = {way: [] for way in ways}
    stop_s = time.perf_counter() + limit_s
    for index in range(rounds):
        if index and time.perf_counter() > stop_s:
            break
        start_bytes = index * part_bytes % file.size_bytes
        count_bytes = min(part_bytes, file.size_bytes - start_bytes)
        if count_bytes < max(chunk for chunk, _ in ways):
            start_bytes, count_bytes = 0, min(part_bytes, file.size_bytes)
        for way in ways:
            rates[way].append(_read_rate(file, way, ring, start_bytes, count_bytes))
    return rates


def _cheapest_of_the_best(samples: dict[_Way, list[float]]) -> _Way:
    """Of the ways within 3 % of the best median (less is noise), the one that needs the least buffer memory."""
    rates = {way: statistics.median(values) for way, values in samples.items()}
    good = [way for way, rate in rates.items() if rate >= 0.97 * max(rates.values())]
    return min(good, key=lambda way: (way[0] * way[1], way[1]))


def _read_rate(file: UncachedFile, way: _Way, ring: memoryview, start_bytes: int, count_bytes: int) -> float:
    """Bytes per second of one pass over a part of the file, cut short after a while on a slow disk."""
    chunk_bytes, concurrency = way
    offsets = range(start_bytes, start_bytes + count_bytes - chunk_bytes + 1, chunk_bytes)
    _forget(file)
    began_s = time.perf_counter()

    def read_share(index: int) -> int:
        done_bytes = 0
        for offset in offsets[index::concurrency]:
            at = (offset - start_bytes) % RING_BYTES  # chunks fill it without a rest
            done_bytes += _read(file, ring[at : at + chunk_bytes], offset)
            if time.perf_counter() - began_s > _READ_LIMIT_S:
                break
        return done_bytes

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        total_bytes = sum(pool.map(read_share, range(concurrency)))
    return total_bytes / (time.perf_counter() - began_s)


def _latency_s(file: UncachedFile, buffer: memoryview) -> float:
    """Median seconds of one small read at a place that was not read just before."""
    _forget(file)
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


def _forget(file: UncachedFile) -> None:
    if not file.direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _open_scratch(directory: Path) -> tuple[int, bool]:
    """A new file without a name: it is gone when it is closed, whatever ends the process."""
    with tempfile.TemporaryFile(prefix=".brim-probe-", dir=directory, buffering=0) as file:
        return _past_the_cache(os.dup(file.fileno()))


def _largest(directory: Path, refusal: Exception) -> UncachedFile:
    """The largest file there is in ``directory``, which cannot be written for ``refusal``."""
    least_bytes = 4 * max(_CHUNKS_BYTES)
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
        f"It cannot be written ({reason}) and holds no file of {format_bytes(least_bytes)}.",
        "Name another directory on the same disk, or set XDG_CACHE_HOME to one that can be written.",
    ) from refusal


def _past_the_cache(descriptor: int) -> tuple[int, bool]:
    """The same file, and whether reads go past the page cache now: not every filesystem takes that."""
    import fcntl  # not there on Windows, where nothing is measured

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
    """``RING_BYTES`` whose pages exist already, huge ones where there are any, as a run's own buffers have.

    The first read into them must not pay for making pages, and with small ones the kernel's accounting for direct
    reads costs more than the transfer: 4.5 instead of 8 GB/s were seen. The bytes are random: a disk may store zeros
    without writing them.
    """
    buffer = mmap.mmap(-1, RING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    piece = os.urandom(max(_CHUNKS_BYTES))
    for _ in range(RING_BYTES // len(piece)):
        buffer.write(piece)
    return memoryview(buffer)


def _fill(descriptor: int, directory: Path) -> int:
    """Write what a disk cannot compress until the file is large enough or took long enough; its size in bytes."""
    piece_bytes = max(_CHUNKS_BYTES)
    wanted_bytes = min(FILE_BYTES, shutil.disk_usage(directory).free // 4)
    piece = mmap.mmap(-1, piece_bytes)
    piece[:] = os.urandom(piece_bytes)
    size_bytes, stop_s = 0, time.perf_counter() + _WRITE_LIMIT_S
    try:
        while size_bytes + piece_bytes <= wanted_bytes and (size_bytes == 0 or time.perf_counter() < stop_s):
            size_bytes += os.pwrite(descriptor, piece, size_bytes)
        os.fsync(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise TransferError(f"Cannot write a scratch file in {directory}.", f"{error}.") from error
    if size_bytes < piece_bytes:
        os.close(descriptor)
        raise TransferError(
            f"Cannot write a scratch file of at least {format_bytes(4 * piece_bytes)} in {directory}.",
            f"Its disk has {format_bytes(4 * wanted_bytes)} free.",
            "Free some space, or name another directory.",
        )
    return size_bytes
