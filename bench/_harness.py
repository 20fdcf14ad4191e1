"""What every benchmark needs: a page cache that is cold, a memory limit that is real, and counters that do not lie.

Linux only: the numbers come from ``/proc`` and the limit from a memory cgroup (v1 or v2) where we may make one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import json
import mmap
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
_MADV_DONTNEED = 4
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def files_below(paths: Iterable[Path]) -> list[Path]:
    """Every regular file in the given files and folders, sorted."""
    found = [p for path in paths for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()]
    return sorted(set(found))


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Put every file below ``paths`` out of the page cache.

    Pages that this process maps are let go of first: the kernel keeps what is mapped, whatever fadvise says.
    """
    files = files_below(paths)
    _unmap_pages({str(file.resolve()) for file in files})
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # dirty pages would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _unmap_pages(names: set[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        # A private page that was written to is anonymous memory, and letting go of it would lose it: checkpoints are
        # only read, so what is mapped of them may always be read again.
        if len(fields) == 6 and fields[5].removesuffix(" (deleted)") in names:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            libc.madvise(start, end - start, _MADV_DONTNEED)


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of the files below ``paths`` that the page cache holds now (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    held = 0
    for file in files_below(paths):
        size = file.stat().st_size
        if not size:
            continue
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), size, flags=mmap.MAP_PRIVATE) as mapping:
            pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
            anchor = ctypes.c_char.from_buffer(mapping)
            libc.mincore(ctypes.addressof(anchor), size, pages)
            del anchor
            held += sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
    return held


class RawReader:
    """Reads files with O_DIRECT into memory that was touched before, with ``readers`` threads, and times it.

    The memory has huge pages, as a fair bound must: with small ones the kernel's page accounting takes the cores away
    from whatever runs beside (a third of them was seen).
    """

    def __init__(self, files: Sequence[Path], *, readers: int = 1, piece_bytes: int = 16 * MIB) -> None:
        self._pieces = [
            (file, offset, min(piece_bytes, _direct_bytes(file) - offset))
            for file in files
            for offset in range(0, _direct_bytes(file), piece_bytes)
        ]
        self._descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}
        self._buffers = [
            mmap.mmap(-1, piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(readers)
        ]
        for buffer in self._buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(bytes(piece_bytes))

    def read(self, limit_bytes: int | None = None) -> float:
        """Seconds to read all files, or their first ``limit_bytes``."""
        pieces = self._pieces
        if limit_bytes is not None:
            ends = itertools.accumulate(piece[2] for piece in pieces)
            pieces = [piece for piece, end in zip(pieces, ends, strict=True) if end - piece[2] < limit_bytes]
        queue, lock = iter(pieces), threading.Lock()

        def work(buffer: mmap.mmap) -> None:
            with memoryview(buffer) as view:
                while True:
                    with lock:
                        piece = next(queue, None)
                    if piece is None:
                        return
                    file, offset, count = piece
                    os.preadv(self._descriptors[file], [view[:count]], offset)

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_s

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def raw_read_s(files: Sequence[Path], *, readers: int = 1) -> float:
    """Seconds to read all ``files`` once."""
    reader = RawReader(files, readers=readers)
    try:
        return reader.read()
    finally:
        reader.close()


def _direct_bytes(file: Path) -> int:
    """The file's length rounded up to a page: O_DIRECT wants whole blocks and stops by itself at the end."""
    return -(-file.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE


class MemoryLimit:
    """A memory cgroup of our own. ``kind`` is "v1" or "v2"."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    @classmethod
    def make(cls, name: str) -> MemoryLimit | None:
        """None where this user may not make one; then only the RSS high water is known."""
        for root, kind in ((_CGROUP_ROOT / "memory", "v1"), (_CGROUP_ROOT, "v2")):
            probe = "memory.limit_in_bytes" if kind == "v1" else "memory.max"
            folder = root / name
            with suppress(OSError):
                folder.mkdir()
                if (folder / probe).exists():
                    return cls(folder, kind)
                folder.rmdir()
        return None

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def set_bytes(self, limit_bytes: int) -> None:
        name = "memory.limit_in_bytes" if self.kind == "v1" else "memory.max"
        (self.folder / name).write_text(str(limit_bytes))
        if self.kind == "v2":
            with suppress(OSError):  # absent without swap accounting
                (self.folder / "memory.swap.max").write_text("0")

    def killed(self) -> bool:
        """Whether the kernel killed something here for want of memory."""
        name = "memory.oom_control" if self.kind == "v1" else "memory.events"
        match = re.search(r"oom_kill (\d+)", (self.folder / name).read_text())
        return match is not None and int(match[1]) > 0

    def remove(self) -> None:
        for _ in range(50):  # the last process may still be on its way out
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


def reset_rss_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(key: str, pid: int | str = "self") -> int:
    """One line of ``/proc/<pid>/status`` (VmHWM, VmRSS, RssAnon) in bytes; 0 when the process is gone."""
    with suppress(OSError):
        match = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    return 0


def disk_read_bytes() -> int:
    """Bytes that this process made the disk read, page faults and read-ahead included."""
    match = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


class AnonymousPeak:
    """The most anonymous memory that a process held, looked at from outside, twenty times a second."""

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes = pid, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, status_bytes("RssAnon", self.pid))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median of the rounds, with the least and the most beside it."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), least=min(values), most=max(values))


def machine_facts(packages: Sequence[str]) -> dict[str, Any]:
    """What the numbers depend on: processor, kernel, memory, package versions."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
    }


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
