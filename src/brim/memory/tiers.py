"""A run's memory: its pools, its engine, and the slots in RAM between disk and VRAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from brim import accelerator
from brim.accelerator import CUDA
from brim.core import Timeline
from brim.core.hardware import RAM, VRAM
from brim.memory import system
from brim.memory.direct_io import OpenFiles
from brim.memory.mapped import MappedFile
from brim.memory.pool import Buffer, HostSource, Pool, TorchSource
from brim.memory.recorder import Recorder
from brim.memory.scratch import SCRATCH_PATH, PlannedScratch, Scratch
from brim.memory.transfer import Engine, NullEngine, Settled, ThreadEngine, Waitable

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
        if not fake:
            system.require()
        self.files = OpenFiles()
        engine = NullEngine if fake else ThreadEngine
        self.engine: Engine = engine(recorder, self.files, self._bounce)
        self._mapped: dict[str, MappedFile] = {}
        self._scratch: PlannedScratch | None = None
        self._disk_folder: str | None = None
        self._disk_bytes: int | None = None
        self.staging: Staging | None = None

    def is_compute(self, device: torch.device) -> bool:
        """Whether ``device`` is where kernels work. A traced device has no number, and there is one of it."""
        same = None in (device.index, self.device.index) or device.index == self.device.index
        return device.type == self.device.type and same

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on the GPU that kernels work on."""
        return self.device.type != "cpu" and self.is_compute(tensor.device)

    def is_traced_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a trace would go on counting the tensor's memory in VRAM if somebody kept it."""
        return self.fake and self.is_on_gpu(tensor)

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

    @property
    def disk_peak_bytes(self) -> int:
        """How long the scratch file has been at most; 0 where nothing has needed one."""
        return 0 if self._scratch is None else self._scratch.peak_bytes

    def use_disk(self, *, folder: str | None, limit_bytes: int | None) -> None:
        """Where the scratch file goes and how long it may become. To be said before it is first used."""
        assert self._scratch is None
        self._disk_folder, self._disk_bytes = folder, limit_bytes

    def give_back(self) -> None:
        """Let the device have what PyTorch keeps of it for nothing: what a model had there before it was fitted."""
        if self.device.type != "cpu":
            on = accelerator.of(self.device)
            on.synchronize()
            on.empty_cache()

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""
        self.engine.close()
        self.files.close()
        if self._scratch is not None:
            self._scratch.close()  # and it stays: freeing something in it later must not make a new one
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


def device_memory(timeline: Timeline, *, vram_bytes: int, ram_bytes: int, device: torch.device) -> Memory:
    """VRAM through PyTorch's caching allocator, a copy stream each way, and host memory, page-locked for CUDA."""
    from brim.memory.streams import PinnedSource, StreamEngine

    recorder = Recorder(timeline)
    host = Pool(RAM, ram_bytes, PinnedSource(device) if device.type == CUDA else HostSource(), recorder)
    compute = Pool(VRAM, vram_bytes, TorchSource(device), recorder)
    memory = Memory(compute=compute, host=host, recorder=recorder, device=device)
    memory.engine = StreamEngine(recorder, memory.files, memory._bounce, device)
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


class Staged(Protocol):
    """Where a block rests, as far as ``Staging`` knows it."""

    def drop_staged(self) -> None:
        """Give back the slot that was taken ahead of use."""


class Staging:
    """RAM slots that blocks pass through on their way from disk to VRAM, and back when they were changed."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._free: list[tuple[Buffer, list[Waitable]]] = [(buffer, []) for buffer in buffers]
        self._stores: Sequence[Staged] = ()

    def take(self) -> tuple[Buffer, list[Waitable]] | None:
        """A slot and what must be done before it is written to; None when all are on their way."""
        return self._free.pop(0) if self._free else None

    def claim(self) -> tuple[Buffer, list[Waitable]]:
        """A slot in any case: what was only brought ahead of use makes way."""
        slot = self.take()
        if slot is None:
            self.reclaim()
            slot = self.take()
        assert slot is not None, "a slot was taken and not given back"
        return slot

    def give(self, buffer: Buffer, after: Waitable) -> None:
        self._free.append((buffer, [Settled(after)]))

    def attach(self, stores: Sequence[Staged]) -> None:
        self._stores = list(stores)

    def reclaim(self) -> None:
        """Take back what was staged for blocks that did not come."""
        for store in self._stores:
            store.drop_staged()
