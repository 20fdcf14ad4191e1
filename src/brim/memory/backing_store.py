"""Where blocks rest while they are not in use: RAM, or files, and how they come to a slot and back."""

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

# Of a block that rests in RAM, compared to tell whether it was written to: some microseconds' worth.
_SAMPLED_WORDS = 509  # a prime, so that it does not keep meeting the same columns


class BackingStore(Protocol):
    """Where a block rests. ``layout`` is the block's form in a slot of the compute tier, the same for good."""

    tier: str
    layout: BlockLayout

    def stage(self) -> bool:
        """Start bringing the block nearer (disk -> RAM) where that is a step of its own; False: no room now."""

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Fill ``slot`` with the block once ``after`` is done."""

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Make what is in ``slot`` the block's values once ``after`` is done. Returns when ``slot`` is free again.

        Whatever is asked of the home afterwards waits for it, and raises the TransferError that it ended with.
        """

    def settle(self) -> None:
        """Wait until what was saved is here. Raises TransferError."""

    def rest(self) -> list[torch.Tensor | None]:
        """What the parameters point to meanwhile: their true values, without holding memory for them.

        None where the file has no such contiguous run; ``values`` has those too. True once ``settle`` returns.
        """

    def value(self, index: int) -> torch.Tensor:
        """One of the block's tensors on the CPU, in memory of its own."""

    def values(self) -> list[torch.Tensor]:
        """All of them."""

    def written(self) -> list[bool]:
        """For each tensor, whether someone wrote to where it rests, as far as that shows there."""

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make ``tensors`` the block's values from now on."""


class DiskStore:
    """A block that stays in files: the checkpoint itself, or once it was changed, the scratch file.

    There it lies as it lies in its slot, on pages of its own, so that it is written as one.
    ``layout`` is its form there where that is not for it to choose.
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
        # In RAM a block takes the form that it has in the file; VRAM wants the alignment that kernels expect.
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
        way = (RAM, self._memory.compute.tier)
        staged = self._in_staging()
        copied = engine.copy(buffer.tensor[: staged.bytes], slot, label, [read, *after], way, staged.moves)
        staging.give(buffer, copied)
        return copied

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        self.drop_staged()
        engine, staging = self._memory.engine, self._memory.staging
        self._move_to(self._own_pages())
        image = self._image()
        after, whole = [*after, Settled(self._saved)], slot.tensor[: self.layout.bytes]
        if self._memory.host is None:
            self._saved = engine.write(whole, image, label, after)
            return self._saved
        assert staging is not None, "what rests on disk came through staging"
        buffer, free = staging.claim()
        copied = engine.copy(whole, buffer, label, [*free, *after], (self._memory.compute.tier, RAM))
        self._saved = engine.write(buffer.tensor[: self.layout.bytes], image, label, [copied])
        staging.give(buffer, self._saved)
        return copied

    def _own_pages(self) -> int:
        """Where in the scratch file the block's slot is written to. Nothing has changed yet."""
        return self._image().offset if self._in_scratch else self._memory.scratch().reserve(self.layout.bytes).offset

    def _image(self) -> Extent:
        first = self.layout.runs[0]
        return Extent(path=SCRATCH_PATH, offset=first.offset - first.at, bytes=self.layout.bytes)

    def _moved_to(self, begin: int) -> tuple[TensorSource, ...]:
        """The sources of a slot's image at ``begin`` of the scratch file."""
        pairs = zip(self._sources, self.layout.tensors, strict=True)
        return tuple(
            replace(source, extents=(Extent(path=SCRATCH_PATH, offset=begin + placed.offset, bytes=placed.bytes),))
            for source, placed in pairs
        )

    def _move_to(self, begin: int) -> None:
        """From now on the block is read from its image at ``begin`` of the scratch file."""
        self._sources = self._moved_to(begin)
        run = ReadRun(path=SCRATCH_PATH, offset=begin, bytes=self.layout.bytes, at=0, direct=True)
        self.layout = replace(self.layout, runs=(run,))
        self._resting = None  # pages of its own go with the mapping

    def settle(self) -> None:
        self._memory.engine.finish(self._saved)

    def drop_staged(self) -> None:
        """Forget what was staged: the prediction was wrong, or the values changed."""
        if self._staged is not None and self._memory.staging is not None:
            (buffer, read), self._staged = self._staged, None
            self._memory.staging.give(buffer, read)

    def rest(self) -> list[torch.Tensor | None]:
        if self._resting is None:
            maps = self._maps()
            self._resting = [_view(source, maps) for source in self._sources]
        return list(self._resting)

    def _maps(self) -> dict[str, FileMap]:
        """The block's range of each file that it lies in."""
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
        whole = torch.empty(source.bytes, dtype=torch.uint8)
        at = 0
        for extent in source.extents:
            self._memory.file(extent.path).read(extent.offset, whole[at : at + extent.bytes])
            at += extent.bytes
        return whole.view(source.dtype).view(source.shape)

    def check_rows(self, index: int, rows: Iterable[int]) -> None:
        """Raise TransferError unless these rows of the block's tensor ``index`` can be read.

        They are about to be read through ``rest()``, where a disk error or a file that was cut short would end the
        process (SIGBUS).
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
            if not self._in_scratch:  # the old values are still where they were
                scratch.release(Extent(path=SCRATCH_PATH, offset=begin, bytes=self.layout.bytes))
            raise
        self._move_to(begin)
        self._memory.recorder.copied(RAM, DISK, self.layout.bytes, begin_s, self._label)


def _view(source: TensorSource, maps: Mapping[str, FileMap]) -> torch.Tensor | None:
    if not source.bytes:
        return torch.empty(source.shape, dtype=source.dtype)
    if not source.is_mappable:
        return None
    (extent,) = source.extents
    return maps[extent.path].view(extent.offset, source.dtype, source.shape)


class RamStore:
    """A block that rests in host memory, in the form that it takes in the compute tier: one copy brings it there."""

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
        way = (RAM, self._memory.compute.tier)
        self._take_sample()
        self._loaded = self._memory.engine.copy(self._buffer.tensor, slot, label, [*after, self._saved], way)
        return self._loaded

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        way, whole = (self._memory.compute.tier, RAM), slot.tensor[: self.layout.bytes]
        self._sample = torch.empty(0)
        self._saved = self._memory.engine.copy(whole, self._buffer, label, [*after, Settled(self._saved)], way)
        return self._saved

    def settle(self) -> None:
        self._memory.engine.finish(self._saved)

    def settle_copies(self) -> None:
        """Wait until no copy writes here, nor reads from here: what lies here may be changed in place."""
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
        """By a sample, compared with what was last loaded from here."""
        changed = self._sample.numel() > 0 and not torch.equal(self._sample, self._sampled())
        return [changed] * len(self._views)

    def _take_sample(self) -> None:
        if not self._memory.fake:
            # While values are on their way here they change by themselves.
            self._sample = self._sampled() if self._saved.done else torch.empty(0)

    def _sampled(self) -> torch.Tensor:
        words = self._buffer.tensor.view(torch.int64)
        return words[:: max(1, words.numel() // _SAMPLED_WORDS)].clone()

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        self.settle_copies()  # one that was prefetched may still read the old values
        for view, tensor in zip(self._views, tensors, strict=True):
            if self._memory.fake or tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        if self._sample.numel():
            self._take_sample()

    def free(self) -> None:
        self._views = []
        self._buffer.free()
