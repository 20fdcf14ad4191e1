"""Where blocks without a file of their own rest, and how files are seen as memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from brim.errors import TransferError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.pool import PAGE_BYTES, round_up
from brim.units import format_bytes

# Linux, Documentation/admin-guide/mm/pagemap.rst: 64 bits per page.
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)
_OF_FILE = np.uint64(1 << 61)


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
        """The tensor that begins at ``offset`` of the file; the mapping lives as long as its last view."""
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
        pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [False] * len(views)
    try:
        return [_has_own_page(pages, view) for view in views]
    finally:
        os.close(pages)


def _has_own_page(pages: int, view: torch.Tensor) -> bool:
    if not view.numel():
        return False
    first = view.data_ptr() // PAGE_BYTES
    last = (view.data_ptr() + view.numel() * view.element_size() - 1) // PAGE_BYTES
    entries = np.frombuffer(os.pread(pages, (last + 1 - first) * 8, first * 8), dtype=np.uint64)
    return bool(((entries & _PRESENT_OR_SWAPPED != 0) & (entries & _OF_FILE == 0)).any())


class Store(Protocol):
    """Takes blocks that have no file."""

    path: str

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        """Append ``tensors`` in the form that a block has in memory; returns where they are now."""

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        """Replace the values of what ``store`` returned."""

    def map(self, offset: int, bytes: int) -> FileMap: ...

    def close(self) -> None: ...


class PlannedScratch:
    """Says where a scratch file would hold what it is given, and writes nothing: for prediction."""

    path = "(scratch file)"

    def __init__(self) -> None:
        self._end = 0

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        stored = []
        for source, tensor in zip(sources, tensors, strict=True):
            self._end = round_up(self._end, PACKED_ALIGNMENT_BYTES)
            size = tensor.numel() * tensor.element_size()
            extent = Extent(path=self.path, offset=self._end, bytes=size)
            stored.append(
                TensorSource(name=source.name, dtype=tensor.dtype, shape=tuple(tensor.shape), extents=(extent,))
            )
            self._end += size
        self._end = round_up(self._end, PAGE_BYTES)  # whole pages, for the mapping and for direct reads
        return tuple(stored)

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        """There are no values."""

    def map(self, offset: int, bytes: int) -> FileMap:
        raise AssertionError("a prediction reads no values")

    def close(self) -> None:
        """Nothing is open."""


class Scratch(PlannedScratch):
    """One unlinked file for blocks that have no file of their own: gone with the process, however it ends."""

    def __init__(self, files: OpenFiles) -> None:
        super().__init__()
        directory = Path(os.environ.get("BRIM_SCRATCH") or tempfile.gettempdir())
        try:
            self._fd, name = tempfile.mkstemp(prefix="brim-", dir=directory)
            Path(name).unlink()
        except OSError as error:
            raise TransferError(
                f"A scratch file was to be made in {directory}.",
                f"{error.strerror}.",
                "Set BRIM_SCRATCH to a folder with room.",
            ) from error
        files.adopt(self.path, self._fd)

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        stored = super().store(sources, tensors)
        os.ftruncate(self._fd, self._end)
        self.overwrite(stored, tensors)
        return stored

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        for source, tensor in zip(sources, tensors, strict=True):
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self._write(flat, source.extents[0].offset)
        os.fdatasync(self._fd)  # dirty pages could not be dropped
        for source in sources:
            os.posix_fadvise(self._fd, source.extents[0].offset, source.bytes, os.POSIX_FADV_DONTNEED)

    def _write(self, flat: torch.Tensor, offset: int) -> None:
        view, done = memoryview(flat.numpy().data), 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done : done + (16 << 20)], offset + done)
            except OSError as error:
                raise TransferError(
                    f"{format_bytes(len(view))} were to be written to a scratch file.",
                    f"{error.strerror} after {format_bytes(done)}.",
                    "Set BRIM_SCRATCH to a folder with room, or give a larger budget.",
                ) from error

    def map(self, offset: int, bytes: int) -> FileMap:
        return FileMap(self._fd, offset, bytes)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
