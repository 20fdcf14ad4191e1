"""Where blocks without a file of their own rest."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from brim.errors import TransferError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import PACKED_ALIGNMENT_BYTES
from brim.memory.mapped import MappedFile
from brim.memory.pool import PAGE_BYTES, round_up
from brim.units import format_bytes

SCRATCH_PATH = "(scratch file)"


class PlannedScratch:
    """Says where a scratch file would hold what it is given, and writes nothing: for prediction."""

    file: MappedFile | None = None

    def __init__(self) -> None:
        self._end = 0

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        """Append ``tensors`` in the form that a block has in memory; returns where they are now."""
        stored = []
        for source, tensor in zip(sources, tensors, strict=True):
            self._end = round_up(self._end, PACKED_ALIGNMENT_BYTES)
            size = tensor.numel() * tensor.element_size()
            extent = Extent(path=SCRATCH_PATH, offset=self._end, bytes=size)
            stored.append(
                TensorSource(name=source.name, dtype=tensor.dtype, shape=tuple(tensor.shape), extents=(extent,))
            )
            self._end += size
        self._end = round_up(self._end, PAGE_BYTES)  # whole pages, for the mapping and for direct reads
        return tuple(stored)

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        """Replace the values of what ``store`` returned: here there are none."""

    def close(self) -> None:
        """Nothing is open."""


class Scratch(PlannedScratch):
    """One unlinked file for blocks that have no file of their own: gone with the process, however it ends."""

    def __init__(self, files: OpenFiles) -> None:
        super().__init__()
        try:
            self._directory = Path(os.environ.get("BRIM_SCRATCH") or tempfile.gettempdir())
            self._fd, name = tempfile.mkstemp(prefix="brim-", dir=self._directory)
            Path(name).unlink()
        except OSError as error:
            raise TransferError(
                f"A scratch file was to be made in {os.environ.get('BRIM_SCRATCH') or 'the temporary folder'}.",
                f"{error.strerror}.",
                "Set BRIM_SCRATCH to a folder with room.",
            ) from error
        self.file: MappedFile = MappedFile(SCRATCH_PATH, self._fd)
        files.adopt(SCRATCH_PATH, self._fd)

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        stored = super().store(sources, tensors)
        with self._told(self._end):
            os.ftruncate(self._fd, self._end)
        self.overwrite(stored, tensors)
        return stored

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        with self._told(sum(source.bytes for source in sources)):
            for source, tensor in zip(sources, tensors, strict=True):
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                self._write(flat, source.extents[0].offset)
            os.fdatasync(self._fd)  # dirty pages could not be dropped
        for source in sources:
            os.posix_fadvise(self._fd, source.extents[0].offset, source.bytes, os.POSIX_FADV_DONTNEED)

    def _write(self, flat: torch.Tensor, offset: int) -> None:
        view, done = memoryview(flat.numpy().data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + (16 << 20)], offset + done)

    @contextlib.contextmanager
    def _told(self, bytes: int) -> Iterator[None]:
        """The disk's refusals as TransferError."""
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"{format_bytes(bytes)} were to be written to a scratch file in {self._directory}.",
                f"{error.strerror}.",
                "Set BRIM_SCRATCH to a folder with room, or give a larger budget.",
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
