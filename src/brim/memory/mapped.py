"""Files seen as memory, and the same files for reads that can fail without ending the process."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from brim.errors import TransferError
from brim.memory.pool import PAGE_BYTES
from brim.units import format_bytes

_CHUNK_BYTES = 8 << 20
# Linux, Documentation/admin-guide/mm/pagemap.rst: 64 bits per page.
_PRESENT, _PRESENT_OR_SWAPPED = np.uint64(1 << 63), np.uint64(3 << 62)
_OF_FILE = np.uint64(1 << 61)


class MappedFile:
    """An open file. ``map`` gives ranges of it as private memory; nobody changes the file through them."""

    def __init__(self, path: str, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def open(cls, path: str) -> MappedFile:
        try:
            return cls(path, os.open(path, os.O_RDONLY))
        except OSError as error:
            raise TransferError(f"Cannot open {path} for reading.", f"{error.strerror}.") from error

    def map(self, offset: int, bytes: int) -> FileMap:
        try:
            return FileMap(self._fd, offset, bytes)
        except (OSError, ValueError) as error:  # ValueError: the file has become too short
            raise TransferError(f"Cannot map {self._path}.", f"{error}.", "Fetch it again.") from error

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8) from ``offset`` on, through the page cache. Raises TransferError."""
        view, done = memoryview(into.numpy().data), 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done : done + _CHUNK_BYTES]], offset + done)
            except OSError as error:
                raise self._failed(offset, len(view), f"{error.strerror}.") from error
            if got == 0:
                raise self._failed(offset, len(view), f"The file ends {format_bytes(len(view) - done)} too early.")
            done += got

    def _failed(self, offset: int, bytes: int, found: str) -> TransferError:
        return TransferError(
            f"Cannot read {format_bytes(bytes)} at offset {offset:,} of {self._path}.",
            found,
            "Check the disk and that nothing changes the file while it is in use.",
        )

    def close(self) -> None:
        """Close the file; mapped memory goes with its last view."""
        os.close(self._fd)


class FileMap:
    """A range of a file as memory. Nothing is read until it is touched, and no write reaches the file."""

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
        """The tensor (not empty) that begins at ``offset`` of the file; the mapping lives as long as its views."""
        count = 1
        for size in shape:
            count *= size
        with torch.inference_mode(False):  # a view made in inference mode could not become a Parameter's data
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset - self._start)
            return flat.view(tuple(shape))


def written(views: Sequence[torch.Tensor]) -> list[bool]:
    """For each view of a FileMap, whether someone wrote to it: the kernel keeps a page of its own for each write.

    ``tensor.data.add_()`` leaves no other trace: neither the version nor the address of a Parameter changes. Where
    the kernel does not tell (not Linux), the answer is no.
    """
    try:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return [False] * len(views)
    try:
        return [_has_own_page(pages, view) for view in views]
    finally:
        os.close(pages)


def _has_own_page(pages: int, view: torch.Tensor) -> bool:
    if not view.numel():
        return False
    first = view.data_ptr() // mmap.PAGESIZE
    last = (view.data_ptr() + view.numel() * view.element_size() - 1) // mmap.PAGESIZE
    return _any_own(pages, first, last + 1)


def _any_own(pages: int, first: int, end: int) -> bool:
    """Whether one of these pages is memory of the process's own, in RAM or swapped out."""
    entries = _entries(pages, first, end)
    if entries is None:
        return True
    return bool(((entries & _PRESENT_OR_SWAPPED != 0) & (entries & _OF_FILE == 0)).any())


def _entries(pages: int, first: int, end: int) -> np.ndarray | None:
    """What the kernel tells of these pages, 64 bits each; None: it does not."""
    entries = np.frombuffer(os.pread(pages, (end - first) * 8, first * 8), dtype=np.uint64)
    return entries if len(entries) == end - first else None


def present_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """What of the tensors' storages in RAM is in the resident set: pages that nobody has touched are not.

    Weights fresh from a checkpoint are a file seen as memory, and all but absent. Where the kernel does not tell (not
    Linux), whole storages are counted.
    """
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == "cpu"}
    try:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return sum(storage.nbytes() for storage in storages.values())
    try:
        return sum(_present_bytes(pages, s.data_ptr(), s.nbytes()) for s in storages.values())
    finally:
        os.close(pages)


def _present_bytes(pages: int, begin: int, size: int) -> int:
    if not size:
        return 0
    first, end = begin // mmap.PAGESIZE, (begin + size - 1) // mmap.PAGESIZE + 1
    entries = _entries(pages, first, end)
    return size if entries is None else min(size, int(np.count_nonzero(entries & _PRESENT)) * mmap.PAGESIZE)


def forget(tensors: Sequence[torch.Tensor]) -> None:
    """Let pages of files that ``tensors`` lie in leave the resident set: touched again, they are read again.

    Checkpoints that were opened as mapped files are in the resident set wherever somebody has read them, for as long
    as one tensor of the file lives. Pages that hold anything else than the file does are left alone, and so are
    those of a tensor that was written to. Linux only (madvise(2), MADV_DONTNEED); elsewhere nothing happens.
    """
    try:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return
    try:
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
    finally:
        os.close(pages)


@functools.cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
