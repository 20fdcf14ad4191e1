"""A scratch file for blocks that are in no checkpoint."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from brim.core.hardware import DISK
from brim.errors import BudgetError, TransferError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.direct_io import OpenFiles, drop_cached, flush, write_all
from brim.memory.layout import WEIGHT_ALIGNMENT_BYTES
from brim.memory.mapped import MappedFile
from brim.memory.pool import PAGE_BYTES, round_up
from brim.units import format_bytes

SCRATCH_PATH = "(scratch file)"


def scratch_folder(given: str | Path | None = None) -> Path:
    """Return the folder of the scratch file: ``given``, else ``BRIM_SCRATCH``, else the temporary folder."""
    return Path(given or os.environ.get("BRIM_SCRATCH") or tempfile.gettempdir())


class PlannedScratch:
    """Allocates space in a scratch file and writes nothing, for predictions.

    ``limit_bytes`` is the disk's budget. ``peak_bytes`` is the largest length of the file.
    """

    file: MappedFile | None = None

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self._end = 0
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Extent]] = {}  # by length, of which there are few

    @property
    def peak_bytes(self) -> int:
        return self._end

    def reserve(self, bytes: int) -> Extent:
        """Reserve full pages until ``release``. Raises BudgetError and TransferError."""
        length = round_up(bytes, PAGE_BYTES)
        if self._free.get(length):
            return replace(self._free[length].pop(), bytes=bytes)
        begin = round_up(self._end, PAGE_BYTES)
        self._grow(begin + length)
        return Extent(path=SCRATCH_PATH, offset=begin, bytes=bytes)

    def release(self, extent: Extent) -> None:
        """Let these pages be reserved again."""
        self._free.setdefault(round_up(extent.bytes, PAGE_BYTES), []).append(extent)

    def _grow(self, end: int) -> None:
        if self._limit_bytes is not None and end > self._limit_bytes:
            raise BudgetError(
                f"Cannot allocate {format_bytes(end)} of disk.",
                f"The budget is {format_bytes(self._limit_bytes)}.",
                "Give more disk or more memory.",
                smallest_bytes={DISK: end},
            )
        self._end = end

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        """Append ``tensors`` in a block's layout, and return their sources."""
        stored, end = [], self._end
        for source, tensor in zip(sources, tensors, strict=True):
            end = round_up(end, WEIGHT_ALIGNMENT_BYTES)
            size = tensor.numel() * tensor.element_size()
            extent = Extent(path=SCRATCH_PATH, offset=end, bytes=size)
            stored.append(
                TensorSource(name=source.name, dtype=tensor.dtype, shape=tuple(tensor.shape), extents=(extent,))
            )
            end += size
        self._grow(round_up(end, PAGE_BYTES))  # full pages, for the mapping and for direct reads
        return tuple(stored)

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        """Replace the values of tensors that ``store`` returned."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""


class Scratch(PlannedScratch):
    """A file without a name, which vanishes however the process ends."""

    def __init__(
        self, files: OpenFiles, *, directory: str | Path | None = None, limit_bytes: int | None = None
    ) -> None:
        super().__init__(limit_bytes=limit_bytes)
        self._directory = scratch_folder(directory)
        try:
            with tempfile.TemporaryFile(prefix="brim-", dir=self._directory, buffering=0) as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise TransferError(
                f"Cannot make a scratch file in {self._directory}.",
                f"{error.strerror}.",
                "Set BRIM_SCRATCH to a folder with room.",
            ) from error
        self.file = MappedFile(SCRATCH_PATH, self._fd)
        files.adopt(SCRATCH_PATH, self._fd)

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        stored = super().store(sources, tensors)
        self.overwrite(stored, tensors)
        return stored

    def _grow(self, end: int) -> None:
        super()._grow(end)
        with self._disk_errors(end):
            os.ftruncate(self._fd, end)

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        with self._disk_errors(sum(source.bytes for source in sources)):
            for source, tensor in zip(sources, tensors, strict=True):
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                write_all(self._fd, memoryview(flat.numpy().data), source.extents[0].offset)
            flush(self._fd)  # dirty pages cannot be dropped
        for source in sources:
            drop_cached(self._fd, source.extents[0].offset, source.bytes)

    @contextlib.contextmanager
    def _disk_errors(self, bytes: int) -> Iterator[None]:
        """Raise OSErrors of the block as TransferError."""
        try:
            yield
        except OSError as error:
            raise TransferError(
                f"Cannot write {format_bytes(bytes)} to a scratch file in {self._directory}.",
                f"{error.strerror}.",
                "Set BRIM_SCRATCH to a folder with room, or give a larger budget.",
            ) from error

    def close(self) -> None:
        fd, self._fd, self.file = self._fd, -1, None
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
