"""Memory-mapped files, and reads of them that fail with an error instead of SIGBUS."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from brim import threads
from brim.errors import TransferError
from brim.memory.checkpoint_files import TensorSource
from brim.memory.direct_io import read_error, require_direct_io
from brim.memory.file_versions import FileVersion, check_version, opened_version
from brim.memory.pool import PAGE_BYTES
from brim.units import format_bytes

_CHUNK_BYTES = 8 << 20
_AHEAD_BYTES = 128 << 10  # of a file for which Linux begins to read at one request, where nothing else is set
# Linux, Documentation/admin-guide/mm/pagemap.rst: 64 bits per page.
_PRESENT, _PRESENT_OR_SWAPPED = np.uint64(1 << 63), np.uint64(3 << 62)
_OF_FILE = np.uint64(1 << 61)


@dataclass(eq=False)
class MappedFile:
    """An open file whose ranges ``map`` maps privately, so that writes do not reach the file.

    ``version``: the required version; None for a file that is written to.
    """

    _path: str
    _fd: int
    _version: FileVersion | None = None

    @classmethod
    def open(cls, path: str) -> MappedFile:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise TransferError(f"Cannot open {path} for reading.", f"{error.strerror}.") from error
        try:
            return cls(path, fd, opened_version(path, fd))
        except BaseException:
            os.close(fd)
            raise

    def _check(self) -> None:
        if self._version is not None:
            check_version(self._path, self._fd, self._version)

    def map(self, offset: int, bytes: int) -> FileMap:
        self._check()
        try:
            return FileMap(self._fd, offset, bytes)
        except (OSError, ValueError) as error:  # ValueError: the file has become too short
            raise TransferError(f"Cannot map {self._path}.", f"{error}.", "Fetch it again.") from error

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8) from ``offset`` on, through the page cache. Raises TransferError."""
        failed = partial(read_error, self._path, offset, into.numel())
        view, done = memoryview(into.numpy().data), 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done : done + _CHUNK_BYTES]], offset + done)
            except OSError as error:
                raise failed(f"{error.strerror}.") from error
            if got == 0:
                raise failed(f"The file ends {format_bytes(len(view) - done)} too early.")
            done += got
        self._check()

    def read_ahead(self) -> None:
        """Let the kernel read the file into the page cache, and close it."""
        with suppress(OSError, AttributeError):  # not every system has it
            for offset in range(0, os.fstat(self._fd).st_size, _AHEAD_BYTES):
                os.posix_fadvise(self._fd, offset, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        self.close()

    def close(self) -> None:
        """Close the file; mapped memory is freed with its last view."""
        os.close(self._fd)


class FileMap:
    """A private mapping of a file's range. Pages are read on first access, and writes do not reach the file."""

    def __init__(self, fd: int, offset: int, bytes: int) -> None:
        self._start = offset // PAGE_BYTES * PAGE_BYTES
        self._memory = mmap.mmap(
            fd,
            offset + bytes - self._start,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=self._start,
        )

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor (not empty) at ``offset`` of the file; the mapping lives as long as its views."""
        with torch.inference_mode(False):  # a view created in inference mode cannot become a Parameter's data
            flat = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=offset - self._start)
            return flat.view(tuple(shape))


def mapped_tensors(sources: Mapping[str, TensorSource]) -> dict[str, torch.Tensor]:
    """Return views of mappable tensors' bytes in their files, which are read ahead meanwhile.

    Raises TransferError for a file that cannot be opened, or has changed.
    """
    require_direct_io()
    maps: dict[str, FileMap] = {}
    ends = Counter[str]()
    for extent in (source.extents[0] for source in sources.values()):
        ends[extent.path] = max(ends[extent.path], extent.offset + extent.bytes)
    for path, end in ends.items():
        file = MappedFile.open(path)
        maps[path] = file.map(0, end)
        threads.start(threading.Thread(target=file.read_ahead, name="brim-read-ahead", daemon=True))
    return {
        name: maps[source.extents[0].path].view(source.extents[0].offset, source.dtype, source.shape)
        for name, source in sources.items()
    }


@contextmanager
def _pagemap() -> Iterator[int | None]:
    """Open this process's pagemap; None off Linux."""
    pages = None
    with suppress(OSError):
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        yield pages
    finally:
        if pages is not None:
            os.close(pages)


def written(views: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each view of a FileMap whether it was written to, which copies its page. Linux only, else False.

    ``tensor.data.add_()`` leaves no other trace: neither the version nor the address of a Parameter changes.
    """
    with _pagemap() as pages:
        return [
            pages is not None and view.numel() > 0 and _any_own(pages, *_span(view.data_ptr(), view.nbytes))
            for view in views
        ]


def _span(begin: int, size: int) -> tuple[int, int]:
    """Return the first page of a range of addresses, and the page after it."""
    return begin // mmap.PAGESIZE, (begin + size - 1) // mmap.PAGESIZE + 1


def _any_own(pages: int, first: int, end: int) -> bool:
    """True if one of these pages is private memory of the process, in RAM or swapped out."""
    entries = _entries(pages, first, end)
    if entries is None:
        return True
    return bool(((entries & _PRESENT_OR_SWAPPED != 0) & (entries & _OF_FILE == 0)).any())


def _entries(pages: int, first: int, end: int) -> np.ndarray | None:
    """Return the pagemap entries of these pages, None if the kernel does not have them all."""
    entries = np.frombuffer(os.pread(pages, (end - first) * 8, first * 8), dtype=np.uint64)
    return entries if len(entries) == end - first else None


def present_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages in the resident set; off Linux, of all their storages in RAM.

    Pages of a mapped checkpoint are in it only after their first access. Tensors without a storage count as 0.
    """
    stored = (t.untyped_storage() for t in tensors if t.device.type == "cpu" and has_storage(t))
    storages = {storage._cdata: storage for storage in stored}
    with _pagemap() as pages:
        return sum(_present_bytes(pages, s.data_ptr(), s.nbytes()) for s in storages.values())


def has_storage(tensor: torch.Tensor) -> bool:
    """False for a tensor that only holds others (sparse, sharded), and for a parameter without a shape yet."""
    return torch._C._has_storage(tensor) and not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor)


def _present_bytes(pages: int | None, begin: int, size: int) -> int:
    if not size or pages is None:
        return size
    entries = _entries(pages, *_span(begin, size))
    return size if entries is None else min(size, int(np.count_nonzero(entries & _PRESENT)) * mmap.PAGESIZE)


def forget(tensors: Sequence[torch.Tensor]) -> None:
    """Remove the mapped file pages of ``tensors`` from the resident set; later accesses read them again.

    Accessed pages of a mapped checkpoint otherwise stay in the resident set while any tensor of the file lives.
    Shared pages and tensors that were written to are left alone. Linux only (madvise(2), MADV_DONTNEED).
    """
    with _pagemap() as pages:
        if pages is None:
            return
        for tensor in tensors:
            begin, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            first, end = -(-begin // mmap.PAGESIZE), (begin + size) // mmap.PAGESIZE
            if (
                tensor.device.type == "cpu"
                and tensor.is_contiguous()
                and first < end
                and not _any_own(pages, first, end)
            ):
                _c_library().madvise(first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE, mmap.MADV_DONTNEED)


@functools.cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
