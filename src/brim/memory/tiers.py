"""A run's memory: its pools, its engine, and the homes where blocks rest while they are not in use."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import TransferError
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.direct_io import OpenFiles, map_file
from brim.memory.layout import PACKED_ALIGNMENT_BYTES, BlockLayout, file_layout, packed_layout
from brim.memory.pool import PAGE_BYTES, Buffer, HostSource, Pool, Source, TorchSource, round_up
from brim.memory.recorder import Recorder
from brim.memory.transfer import Engine, NullEngine, ThreadEngine, Waitable
from brim.units import format_bytes

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
        self.engine: Engine = NullEngine(recorder) if fake else ThreadEngine(recorder, self.files, self._bounce)
        self._maps: dict[str, mmap.mmap] = {}
        self._scratch: Scratch | None = None
        self.staging: Staging | None = None

    @property
    def ram(self) -> Pool:
        return self.host or self.compute

    def _bounce(self, bytes: int) -> Buffer:
        return self.ram.allocate(bytes, "bounce buffer")

    def map(self, path: str) -> mmap.mmap:
        """A checkpoint file as memory: copy on write, so that nobody changes the user's file."""
        if path not in self._maps:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise TransferError(f"{path} was to be opened for reading.", f"{error.strerror}.") from error
            try:
                self._maps[path] = map_file(fd, shared=False)
            finally:
                os.close(fd)
        return self._maps[path]

    def scratch(self) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch(self.files)
        return self._scratch

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""
        self.engine.close()
        self.files.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        self._maps.clear()


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


def fake_memory(timeline: Timeline, *, compute_tier: str, compute_bytes: int, ram_bytes: int) -> Memory:
    """For prediction: the same pools and limits over tensors without bytes."""
    recorder = Recorder(timeline)
    source: Source = TorchSource(_CPU)
    host = None if compute_tier == RAM else Pool(RAM, ram_bytes, source, recorder)
    compute = Pool(compute_tier, compute_bytes, source, recorder)
    return Memory(compute=compute, host=host, recorder=recorder, fake=True)


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

    def values(self) -> list[torch.Tensor]:
        """The block's tensors on the CPU, read now."""

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make ``tensors`` the block's values from now on."""


class DiskHome:
    """A block that stays in files: the checkpoint itself, or a scratch file after it was changed."""

    tier = DISK

    def __init__(self, memory: Memory, sources: Sequence[TensorSource]) -> None:
        self._memory, self._sources = memory, tuple(sources)
        self._staged: tuple[Buffer, Waitable] | None = None
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
        self._staged = buffer, self._memory.engine.read(self.layout.runs, buffer, self._label(), after)
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

    def _label(self) -> str:
        return self._sources[0].name.rpartition(".")[0]

    def rest(self) -> list[torch.Tensor | None]:
        return [self._view(source) for source in self._sources]

    def _view(self, source: TensorSource) -> torch.Tensor | None:
        if len(source.extents) != 1 or source.extents[0].offset % source.dtype.itemsize:
            return None
        extent = source.extents[0]
        mapped = self._map(extent.path)
        with torch.inference_mode(False):
            count = source.bytes // source.dtype.itemsize
            flat = torch.frombuffer(mapped, dtype=source.dtype, count=count, offset=extent.offset)
            return flat.view(source.shape)

    def _map(self, path: str) -> mmap.mmap:
        scratch = self._memory._scratch
        return scratch.map() if scratch is not None and scratch.path == path else self._memory.map(path)

    def values(self) -> list[torch.Tensor]:
        return [_assemble(source, self._map) for source in self._sources]

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        self.drop_staged()
        scratch = self._memory.scratch()
        if any(extent.path != scratch.path for source in self._sources for extent in source.extents):
            self._sources = scratch.store(self._sources, tensors)
            self._make_layout()
            return
        for view, tensor in zip(self.rest(), tensors, strict=True):
            assert view is not None
            view.copy_(tensor)


def _assemble(source: TensorSource, mapped: Callable[[str], mmap.mmap]) -> torch.Tensor:
    """A tensor out of its extents, as a copy."""
    whole = torch.empty(source.bytes, dtype=torch.uint8)
    at = 0
    for extent in source.extents:
        view = memoryview(mapped(extent.path))[extent.offset : extent.offset + extent.bytes]
        if extent.bytes:
            whole[at : at + extent.bytes].copy_(torch.frombuffer(view, dtype=torch.uint8))
        at += extent.bytes
    return whole.view(source.dtype).view(source.shape)


class RamHome:
    """A block that rests in host memory, in the form that it takes in the compute tier: one copy brings it there."""

    tier = RAM

    def __init__(self, memory: Memory, sources: Sequence[TensorSource], label: str) -> None:
        self._memory = memory
        self.layout = packed_layout(sources)
        self._buffer = memory.ram.allocate(self.layout.bytes, label)
        self._views = self.layout.views(self._buffer.tensor)

    def fill_from_files(self, label: str) -> Waitable:
        return self._memory.engine.read(self.layout.runs, self._buffer, label, [])

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        way = (RAM, self._memory.compute.tier)
        return self._memory.engine.copy(self._buffer.tensor, slot, label, after, way)

    def rest(self) -> list[torch.Tensor | None]:
        return list(self._views)

    def values(self) -> list[torch.Tensor]:
        return [view.clone() for view in self._views]

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
        self._free.append((buffer, [after]))

    def attach(self, homes: Sequence[DiskHome]) -> None:
        self._homes = list(homes)

    def reclaim(self) -> None:
        """Take back what was staged for blocks that did not come."""
        for home in self._homes:
            home.drop_staged()


class Scratch:
    """One unlinked file for blocks that have no file of their own: gone with the process, however it ends."""

    path = "(scratch file)"

    def __init__(self, files: OpenFiles) -> None:
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
        self._end = 0
        self._mapped: mmap.mmap | None = None
        self._files = files
        files.adopt(self.path, self._fd)

    def store(self, sources: Sequence[TensorSource], tensors: Sequence[torch.Tensor]) -> tuple[TensorSource, ...]:
        """Append ``tensors`` in the form that a block has in memory; returns where they are now."""
        stored = []
        for source, tensor in zip(sources, tensors, strict=True):
            self._end = round_up(self._end, PACKED_ALIGNMENT_BYTES)
            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self._write(flat, self._end)
            extent = Extent(path=self.path, offset=self._end, bytes=flat.numel())
            stored.append(
                TensorSource(name=source.name, dtype=tensor.dtype, shape=tuple(tensor.shape), extents=(extent,))
            )
            self._end += flat.numel()
        self._end = round_up(self._end, PAGE_BYTES)
        os.ftruncate(self._fd, self._end)  # whole pages, for the mapping and for direct reads
        self._mapped = None
        return tuple(stored)

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
        os.fdatasync(self._fd)  # dirty pages could not be dropped
        os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def map(self) -> mmap.mmap:
        if self._mapped is None:
            self._mapped = map_file(self._fd, shared=True)
        return self._mapped

    def close(self) -> None:
        self._mapped = None
        with contextlib.suppress(OSError):
            os.close(self._fd)
