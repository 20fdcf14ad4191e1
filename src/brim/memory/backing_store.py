"""Backing stores hold blocks in RAM or files while they are not in use, and move them to slots and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from brim.core.hardware import DISK, RAM
from brim.errors import TransferError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.layout import BlockLayout, ReadRun, StagedLayout, file_layout, packed_layout, staged_layout
from brim.memory.mapped import FileMap, written
from brim.memory.pool import Buffer
from brim.memory.scratch import SCRATCH_PATH
from brim.memory.tiers import Memory
from brim.memory.transfer import Done, Settled, Waitable

# Words of a block in RAM that are compared to detect writes, in some microseconds.
_SAMPLED_WORDS = 509  # a prime, so that the samples vary in column


class BackingStore(Protocol):
    """Holds a block. ``layout`` is the block's constant layout in a slot of the compute tier."""

    tier: str
    layout: BlockLayout

    def stage(self) -> bool:
        """Start to read the block into RAM if loading needs that first. Return False if there is no room."""

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Copy the block into ``slot`` once ``after`` is done."""

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Copy ``slot`` back into the store once ``after`` is done. The result is done when ``slot`` is free again.

        Later calls wait for the copy, and raise its TransferError.
        """

    def settle(self) -> None:
        """Wait until the last ``save`` has arrived. Raises TransferError."""

    def rest(self) -> list[torch.Tensor | None]:
        """Return views of the stored values for the parameters while the block is in no slot, without new memory.

        None for a tensor that is not contiguous in the file; ``values`` has it. Valid after ``settle``.
        """

    def value(self, index: int) -> torch.Tensor:
        """Return a copy of a tensor of the block on the CPU."""

    def values(self) -> list[torch.Tensor]:
        """Return copies of all tensors of the block on the CPU."""

    def written(self) -> list[bool]:
        """Return for each tensor whether its stored values were written to, as far as that can be detected."""

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the block's values by ``tensors``."""

    def free(self) -> None:
        """Free the store's RAM; the store cannot be used after that."""


class DiskStore:
    """A block in files: in the checkpoint, or in the scratch file after a change.

    The scratch file has the block in its slot's layout and on its own pages, so that one write suffices. ``layout``
    overrides the store's own choice.
    """

    tier = DISK

    def __init__(
        self, memory: Memory, sources: Sequence[TensorSource], label: str, layout: BlockLayout | None = None
    ) -> None:
        self._memory, self._sources, self._label = memory, tuple(sources), label
        self._staged: tuple[Buffer, Waitable] | None = None
        self._resting: list[torch.Tensor | None] | None = None
        self._saved: Waitable = Done()
        self._as_staged: tuple[BlockLayout, StagedLayout] | None = None  # the layout that was staged
        # In RAM a block has the layout of its file; in VRAM it has the alignment that kernels expect.
        self.layout = layout or (file_layout if memory.host is None else packed_layout)(self._sources)

    @property
    def _in_scratch(self) -> bool:
        return all(extent.path == SCRATCH_PATH for source in self._sources for extent in source.extents)

    def stage(self) -> bool:
        staging = self._memory.staging
        if staging is None or self._staged is not None:
            return True
        slot = staging.take()
        if slot is None:
            return False
        self._read_into(*slot)
        return True

    def _read_into(self, buffer: Buffer, after: Sequence[Waitable]) -> None:
        runs = self._in_staging().runs
        self._staged = buffer, self._memory.engine.read(runs, buffer, self._label, [*after, self._saved])

    def _in_staging(self) -> StagedLayout:
        if self._as_staged is None or self._as_staged[0] is not self.layout:
            self._as_staged = self.layout, staged_layout(self.layout)
        return self._as_staged[1]

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        engine, staging = self._memory.engine, self._memory.staging
        if staging is None:
            return engine.read(self.layout.runs, slot, label, [*after, self._saved])
        if self._staged is None:
            self._read_into(*staging.claim())
        assert self._staged is not None
        (buffer, read), self._staged = self._staged, None
        route = (RAM, self._memory.compute.tier)
        staged = self._in_staging()
        copied = engine.copy(buffer.tensor[: staged.bytes], slot, label, [read, *after], route, staged.moves)
        staging.give(buffer, copied)
        return copied

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        self.drop_staged()
        engine, staging = self._memory.engine, self._memory.staging
        self._move_to(self._own_pages())
        image = self._image()
        after, block = [*after, Settled(self._saved)], slot.tensor[: self.layout.bytes]
        if self._memory.host is None:
            self._saved = engine.write(block, image, label, after)
            return self._saved
        assert staging is not None, "blocks on disk pass through staging"
        buffer, free = staging.claim()
        copied = engine.copy(block, buffer, label, [*free, *after], (self._memory.compute.tier, RAM))
        self._saved = engine.write(buffer.tensor[: self.layout.bytes], image, label, [copied])
        staging.give(buffer, self._saved)
        return copied

    def _own_pages(self) -> int:
        """Return the offset in the scratch file for the block's slot, without changing the store."""
        return self._image().offset if self._in_scratch else self._memory.scratch().reserve(self.layout.bytes).offset

    def _image(self) -> Extent:
        first = self.layout.runs[0]
        return Extent(path=SCRATCH_PATH, offset=first.offset - first.at, bytes=self.layout.bytes)

    def _moved_to(self, begin: int) -> tuple[TensorSource, ...]:
        """Return the sources of a slot's image at ``begin`` of the scratch file."""
        pairs = zip(self._sources, self.layout.tensors, strict=True)
        return tuple(
            replace(source, extents=(Extent(path=SCRATCH_PATH, offset=begin + placed.offset, bytes=placed.bytes),))
            for source, placed in pairs
        )

    def _move_to(self, begin: int) -> None:
        """Read the block from its image at ``begin`` of the scratch file from now on."""
        self._sources = self._moved_to(begin)
        run = ReadRun(path=SCRATCH_PATH, offset=begin, bytes=self.layout.bytes, at=0, direct=True)
        self.layout = replace(self.layout, runs=(run,))
        self._resting = None  # copied pages are freed with the mapping

    def settle(self) -> None:
        self._memory.engine.finish(self._saved)

    def drop_staged(self) -> None:
        """Free the staged copy: the prediction was wrong, or the values changed."""
        if self._staged is not None and self._memory.staging is not None:
            (buffer, read), self._staged = self._staged, None
            self._memory.staging.give(buffer, read)

    def rest(self) -> list[torch.Tensor | None]:
        if self._resting is None:
            maps = self._maps()
            self._resting = [_view(source, maps) for source in self._sources]
        return list(self._resting)

    def _maps(self) -> dict[str, FileMap]:
        """Map the block's range of each of its files."""
        spans: dict[str, tuple[int, int]] = {}
        for extent in (extent for source in self._sources for extent in source.extents if extent.bytes):
            begin, end = spans.get(extent.path, (extent.offset, 0))
            spans[extent.path] = min(begin, extent.offset), max(end, extent.offset + extent.bytes)
        return {path: self._memory.file(path).map(begin, end - begin) for path, (begin, end) in spans.items()}

    def values(self) -> list[torch.Tensor]:
        return [self.value(index) for index in range(len(self._sources))]

    def value(self, index: int) -> torch.Tensor:
        self.settle()
        source = self._sources[index]
        flat = torch.empty(source.bytes, dtype=torch.uint8)
        at = 0
        for extent in source.extents:
            self._memory.file(extent.path).read(extent.offset, flat[at : at + extent.bytes])
            at += extent.bytes
        return flat.view(source.dtype).view(source.shape)

    def check_rows(self, index: int, rows: Iterable[int]) -> None:
        """Raise TransferError unless these rows of tensor ``index`` can be read.

        Through ``rest()``, a disk error or a truncated file would kill the process (SIGBUS).
        """
        self.settle()
        source = self._sources[index]
        into = torch.empty(source.bytes // source.shape[0], dtype=torch.uint8)
        for row in rows:
            for extent in source.extents:
                if extent.path != SCRATCH_PATH:
                    self._memory.file(extent.path).read(extent.offset + row * into.numel(), into)

    def written(self) -> list[bool]:
        return written([torch.empty(0) if view is None else view for view in self.rest()])

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        self.drop_staged()
        self.settle()
        begin_s, scratch, begin = self._memory.recorder.now_s(), self._memory.scratch(), self._own_pages()
        try:
            scratch.overwrite(self._moved_to(begin), tensors)
        except TransferError:
            if not self._in_scratch:  # the old values are intact
                scratch.release(Extent(path=SCRATCH_PATH, offset=begin, bytes=self.layout.bytes))
            raise
        self._move_to(begin)
        self._memory.recorder.copied(RAM, DISK, self.layout.bytes, begin_s, self._label)

    def free(self) -> None:
        pass


def _view(source: TensorSource, maps: Mapping[str, FileMap]) -> torch.Tensor | None:
    if not source.bytes:
        return torch.empty(source.shape, dtype=source.dtype)
    if not source.is_mappable:
        return None
    (extent,) = source.extents
    return maps[extent.path].view(extent.offset, source.dtype, source.shape)


class RamStore:
    """A block in host memory with its layout in the compute tier, so that one copy loads it."""

    tier = RAM

    def __init__(self, memory: Memory, sources: Sequence[TensorSource], label: str) -> None:
        self._memory = memory
        self.layout = packed_layout(sources)
        self._buffer = memory.ram.allocate(self.layout.bytes, label)
        self._views = self.layout.views(self._buffer.tensor)
        self._sample = torch.empty(0)
        self._saved: Waitable = Done()
        self._loaded: Waitable = Done()

    def fill_from_files(self, label: str) -> Waitable:
        return self._memory.engine.read(self.layout.runs, self._buffer, label, [])

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        route = (RAM, self._memory.compute.tier)
        self._take_sample()
        self._loaded = self._memory.engine.copy(self._buffer.tensor, slot, label, [*after, self._saved], route)
        return self._loaded

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        route, block = (self._memory.compute.tier, RAM), slot.tensor[: self.layout.bytes]
        self._sample = torch.empty(0)
        self._saved = self._memory.engine.copy(block, self._buffer, label, [*after, Settled(self._saved)], route)
        return self._saved

    def settle(self) -> None:
        self._memory.engine.finish(self._saved)

    def settle_copies(self) -> None:
        """Wait for all copies from and to the store, so that its values can be changed in place."""
        self.settle()
        self._memory.engine.finish(Settled(self._loaded))

    def rest(self) -> list[torch.Tensor | None]:
        return list(self._views)

    def value(self, index: int) -> torch.Tensor:
        self.settle()
        return self._views[index].clone()

    def values(self) -> list[torch.Tensor]:
        self.settle()
        return [view.clone() for view in self._views]

    def written(self) -> list[bool]:
        """Compare a sample with that of the last load."""
        changed = self._sample.numel() > 0 and not torch.equal(self._sample, self._sampled())
        return [changed] * len(self._views)

    def _take_sample(self) -> None:
        if not self._memory.fake:
            # While a save is under way, the values change.
            self._sample = self._sampled() if self._saved.done else torch.empty(0)

    def _sampled(self) -> torch.Tensor:
        words = self._buffer.tensor.view(torch.int64)
        return words[:: max(1, words.numel() // _SAMPLED_WORDS)].clone()

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        self.settle_copies()  # a prefetch may still read the old values
        for view, tensor in zip(self._views, tensors, strict=True):
            if self._memory.fake or tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        if self._sample.numel():
            self._take_sample()

    def free(self) -> None:
        self._views = []
        self._buffer.free()
