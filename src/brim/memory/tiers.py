"""A run's memory: its pools, its engine, and the homes where blocks rest while they are not in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.checkpoint_files import TensorSource
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import BlockLayout, file_layout, packed_layout
from brim.memory.mapped import FileMap, MappedFile, written
from brim.memory.pool import Buffer, HostSource, Pool, TorchSource
from brim.memory.recorder import Recorder
from brim.memory.scratch import SCRATCH_PATH, PlannedScratch, Scratch
from brim.memory.transfer import Engine, NullEngine, Settled, ThreadEngine, Waitable

# Of a block that rests in RAM, compared to tell whether it was written to: some microseconds' worth.
_SAMPLED_WORDS = 509  # a prime, so that it does not keep meeting the same columns

_CPU = torch.device("cpu")


class Memory:
    """The pools of one run and the engine between them.

    ``compute`` is the tier that kernels work in. ``host`` is RAM where that is not the same; None where it is.
    ``device`` is PyTorch's name for where kernels work. ``fake``: tensors have no bytes and nothing is moved; the
    events are the prediction.
    """

    def __init__(
        self,
        *,
        compute: Pool,
        host: Pool | None,
        recorder: Recorder,
        device: torch.device = _CPU,
        fake: bool = False,
    ) -> None:
        self.compute, self.host, self.recorder, self.device, self.fake = compute, host, recorder, device, fake
        self.files = OpenFiles()
        engine = NullEngine if fake else ThreadEngine
        self.engine: Engine = engine(recorder, self.files, self._bounce)
        self._mapped: dict[str, MappedFile] = {}
        self._scratch: PlannedScratch | None = None
        self._disk_folder: str | None = None
        self._disk_bytes: int | None = None
        self.staging: Staging | None = None

    @property
    def ram(self) -> Pool:
        return self.host or self.compute

    def _bounce(self, bytes: int) -> Buffer:
        return self.ram.allocate(bytes, "bounce buffer")

    def file(self, path: str) -> MappedFile:
        """A checkpoint file, or the scratch file, as memory."""
        if path == SCRATCH_PATH:
            file = self.scratch().file
            assert file is not None, "a prediction has no values"
            return file
        if path not in self._mapped:
            self._mapped[path] = MappedFile.open(path)
        return self._mapped[path]

    def scratch(self) -> PlannedScratch:
        if self._scratch is None:
            if self.fake:
                self._scratch = PlannedScratch(limit_bytes=self._disk_bytes)
            else:
                self._scratch = Scratch(self.files, directory=self._disk_folder, limit_bytes=self._disk_bytes)
        return self._scratch

    def use_disk(self, *, folder: str | None, limit_bytes: int | None) -> None:
        """Where the scratch file goes and how long it may become. To be said before it is first used."""
        assert self._scratch is None
        self._disk_folder, self._disk_bytes = folder, limit_bytes

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""
        self.engine.close()
        self.files.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        for file in self._mapped.values():
            file.close()
        self._mapped.clear()

    def __del__(self) -> None:
        # A module that is dropped without remove() takes its threads and files with it.
        if hasattr(self, "staging"):
            self.close()


def cpu_memory(timeline: Timeline, *, ram_bytes: int) -> Memory:
    """No GPU: RAM is the compute tier, the rest is on disk."""
    recorder = Recorder(timeline)
    return Memory(compute=Pool(RAM, ram_bytes, HostSource(), recorder), host=None, recorder=recorder)


def emulated_memory(timeline: Timeline, *, vram_bytes: int, ram_bytes: int) -> Memory:
    """A pool in RAM plays VRAM and a thread plays its copy engine: the GPU's logic without a GPU."""
    recorder = Recorder(timeline)
    host = Pool(RAM, ram_bytes, HostSource(), recorder)
    return Memory(compute=Pool(VRAM, vram_bytes, HostSource(), recorder), host=host, recorder=recorder)


def cuda_memory(timeline: Timeline, *, vram_bytes: int, ram_bytes: int, device: torch.device) -> Memory:
    """VRAM through PyTorch's caching allocator, page-locked host memory, and a copy stream."""
    from brim.memory.cuda import CudaEngine, PinnedSource

    recorder = Recorder(timeline)
    host = Pool(RAM, ram_bytes, PinnedSource(), recorder)
    compute = Pool(VRAM, vram_bytes, TorchSource(device), recorder)
    memory = Memory(compute=compute, host=host, recorder=recorder, device=device)
    memory.engine = CudaEngine(recorder, memory.files, memory._bounce, device)
    return memory


def fake_memory(
    timeline: Timeline,
    *,
    compute_tier: str,
    compute_bytes: int,
    ram_bytes: int,
    device: torch.device = _CPU,
) -> Memory:
    """For prediction: the same pools and limits over tensors without bytes.

    ``device`` is where a traced program's compute tensors say that they are.
    """
    recorder = Recorder(timeline)
    host = None if compute_tier == RAM else Pool(RAM, ram_bytes, TorchSource(_CPU), recorder)
    compute = Pool(compute_tier, compute_bytes, TorchSource(device), recorder)
    return Memory(compute=compute, host=host, recorder=recorder, device=device, fake=True)


class Home(Protocol):
    """Where a block rests. ``layout`` is the block's form in a slot of the compute tier."""

    tier: str
    layout: BlockLayout

    def stage(self) -> bool:
        """Start bringing the block nearer (disk -> RAM) where that is a step of its own; False: no room now."""

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        """Fill ``slot`` with the block once ``after`` is done."""

    def rest(self) -> list[torch.Tensor | None]:
        """What the parameters point to meanwhile: their true values, without holding memory for them.

        None where the file has no such contiguous run; ``values`` has those too.
        """

    def value(self, index: int) -> torch.Tensor:
        """One of the block's tensors on the CPU, in memory of its own."""

    def values(self) -> list[torch.Tensor]:
        """All of them."""

    def written(self) -> list[bool]:
        """For each tensor, whether someone wrote to where it rests, as far as that shows there."""

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make ``tensors`` the block's values from now on."""


class DiskHome:
    """A block that stays in files: the checkpoint itself, or a scratch file after it was changed."""

    tier = DISK

    def __init__(self, memory: Memory, sources: Sequence[TensorSource], label: str) -> None:
        self._memory, self._sources, self._label = memory, tuple(sources), label
        self._staged: tuple[Buffer, Waitable] | None = None
        self._resting: list[torch.Tensor | None] | None = None
        self._make_layout()

    def _make_layout(self) -> None:
        # In RAM a block takes the form that it has in the file; VRAM wants the alignment that kernels expect.
        self.layout = (file_layout if self._memory.host is None else packed_layout)(self._sources)

    def stage(self) -> bool:
        staging = self._memory.staging
        if staging is None or self._staged is not None:
            return True
        taken = staging.take()
        if taken is None:
            return False
        buffer, after = taken
        self._staged = buffer, self._memory.engine.read(self.layout.runs, buffer, self._label, after)
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        engine, staging = self._memory.engine, self._memory.staging
        if staging is None:
            return engine.read(self.layout.runs, slot, label, after)
        if not self.stage():
            staging.reclaim()
            self.stage()
        assert self._staged is not None
        (buffer, read), self._staged = self._staged, None
        way = (RAM, self._memory.compute.tier)
        copied = engine.copy(buffer.tensor[: self.layout.bytes], slot, label, [read, *after], way)
        staging.give(buffer, copied)
        return copied

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
        scratch = self._memory.scratch()
        if all(extent.path == SCRATCH_PATH for source in self._sources for extent in source.extents):
            scratch.overwrite(self._sources, tensors)
        else:
            self._sources = scratch.store(self._sources, tensors)
            self._make_layout()
        self._resting = None  # pages of its own go with the mapping


def _view(source: TensorSource, maps: Mapping[str, FileMap]) -> torch.Tensor | None:
    if not source.bytes:
        return torch.empty(source.shape, dtype=source.dtype)
    if len(source.extents) != 1 or source.extents[0].offset % source.dtype.itemsize:
        return None
    (extent,) = source.extents
    return maps[extent.path].view(extent.offset, source.dtype, source.shape)


class RamHome:
    """A block that rests in host memory, in the form that it takes in the compute tier: one copy brings it there."""

    tier = RAM

    def __init__(self, memory: Memory, sources: Sequence[TensorSource], label: str) -> None:
        self._memory = memory
        self.layout = packed_layout(sources)
        self._buffer = memory.ram.allocate(self.layout.bytes, label)
        self._views = self.layout.views(self._buffer.tensor)
        self._sample = torch.empty(0)

    def fill_from_files(self, label: str) -> Waitable:
        return self._memory.engine.read(self.layout.runs, self._buffer, label, [])

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        way = (RAM, self._memory.compute.tier)
        if not self._memory.fake:
            self._sample = self._sampled()
        return self._memory.engine.copy(self._buffer.tensor, slot, label, after, way)

    def rest(self) -> list[torch.Tensor | None]:
        return list(self._views)

    def value(self, index: int) -> torch.Tensor:
        return self._views[index].clone()

    def values(self) -> list[torch.Tensor]:
        return [view.clone() for view in self._views]

    def written(self) -> list[bool]:
        """By a sample, compared with what was last loaded from here."""
        changed = self._sample.numel() > 0 and not torch.equal(self._sample, self._sampled())
        return [changed] * len(self._views)

    def _sampled(self) -> torch.Tensor:
        words = self._buffer.tensor.view(torch.int64)
        return words[:: max(1, words.numel() // _SAMPLED_WORDS)].clone()

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)

    def free(self) -> None:
        self._views = []
        self._buffer.free()


class Staging:
    """RAM slots that blocks pass through on their way from disk to VRAM."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._free: list[tuple[Buffer, list[Waitable]]] = [(buffer, []) for buffer in buffers]
        self._homes: list[DiskHome] = []

    def take(self) -> tuple[Buffer, list[Waitable]] | None:
        """A slot and what must be done before it is written to; None when all are on their way."""
        return self._free.pop(0) if self._free else None

    def give(self, buffer: Buffer, after: Waitable) -> None:
        self._free.append((buffer, [Settled(after)]))

    def attach(self, homes: Sequence[DiskHome]) -> None:
        self._homes = list(homes)

    def reclaim(self) -> None:
        """Take back what was staged for blocks that did not come."""
        for home in self._homes:
            home.drop_staged()
