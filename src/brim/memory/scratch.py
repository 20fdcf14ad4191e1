"""Where blocks without a file of their own rest."""

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
from brim.memory import system
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import WEIGHT_ALIGNMENT_BYTES
from brim.memory.mapped import MappedFile
from brim.memory.pool import PAGE_BYTES, round_up
from brim.units import format_bytes

SCRATCH_PATH = "(scratch file)"


def scratch_folder(given: str | Path | None = None) -> Path:
    """Where a scratch file goes: as given, else ``BRIM_SCRATCH``, else the temporary folder."""
    return Path(given or os.environ.get("BRIM_SCRATCH") or tempfile.gettempdir())


class PlannedScratch:
    """Says where a scratch file would hold what it is given, and writes nothing: for prediction.

    ``limit_bytes`` is the disk's budget. ``peak_bytes`` is how long the file has been at most.
    """

    file: MappedFile | None = None

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self._end = 0
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Extent]] = {}  # by length: what comes and goes has few sizes

    @property
    def peak_bytes(self) -> int:
        return self._end

    def reserve(self, bytes: int) -> Extent:
        """Whole pages that are nobody else's until ``release``. Raises BudgetError and TransferError."""
        length = round_up(bytes, PAGE_BYTES)
        if self._free.get(length):
            return replace(self._free[length].pop(), bytes=bytes)
        begin = round_up(self._end, PAGE_BYTES)
        self._grow(begin + length)
        return Extent(path=SCRATCH_PATH, offset=begin, bytes=bytes)

    def release(self, extent: Extent) -> None:
        """Somebody else may have these pages."""
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
        """Append ``tensors`` in the form that a block has in memory; returns where they are now."""
        stored, end = [], self._end
        for source, tensor in zip(sources, tensors, strict=True):
            end = round_up(end, WEIGHT_ALIGNMENT_BYTES)
            size = tensor.numel() * tensor.element_size()
            extent = Extent(path=SCRATCH_PATH, offset=end, bytes=size)
            stored.append(
                TensorSource(name=source.name, dtype=tensor.dtype, shape=tuple(tensor.shape), extents=(extent,))
            )
            end += size
        self._grow(round_up(end, PAGE_BYTES))  # whole pages, for the mapping and for direct reads
        return tuple(stored)

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        """Replace the values of what ``store`` returned: here there are none."""

    def close(self) -> None:
        """Nothing is open."""


class Scratch(PlannedScratch):
    """One file without a name for blocks that have none of their own: gone with the process, however it ends."""

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
        with self._told(end):
            os.ftruncate(self._fd, end)

    def overwrite(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> None:
        with self._told(sum(source.bytes for source in sources)):
            for source, tensor in zip(sources, tensors, strict=True):
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                self._write(flat, source.extents[0].offset)
            system.flush(self._fd)  # dirty pages could not be dropped
        for source in sources:
            system.forget_cached(self._fd, source.extents[0].offset, source.bytes)

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
                f"Cannot write {format_bytes(bytes)} to a scratch file in {self._directory}.",
                f"{error.strerror}.",
                "Set BRIM_SCRATCH to a folder with room, or give a larger budget.",
            ) from error

    def close(self) -> None:
        """Let the file go. A second call does nothing."""
        fd, self._fd, self.file = self._fd, -1, None
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
