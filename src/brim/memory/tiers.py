"""A run's memory: its pools, its transfer engine, and the staging slots in RAM between disk and VRAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from brim import accelerator
from brim.accelerator import CUDA
from brim.core import Timeline
from brim.core.hardware import RAM, VRAM
from brim.memory.direct_io import OpenFiles, require_direct_io
from brim.memory.mapped import MappedFile
from brim.memory.pool import Buffer, HostSource, Pool, TorchSource
from brim.memory.recorder import Recorder
from brim.memory.scratch import SCRATCH_PATH, PlannedScratch, Scratch
from brim.memory.transfer import Engine, NullEngine, Settled, ThreadEngine, Waitable

_CPU = torch.device("cpu")


class Memory:
    """The pools of a run and the engine between them.

    ``compute`` is the compute tier's pool, ``device`` its device. ``host`` is RAM; None if RAM is the compute tier.
    ``fake``: tensors have no bytes and nothing is moved; the recorded events are the prediction.
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
            require_direct_io()
        self.files = OpenFiles()
        engine = NullEngine if fake else ThreadEngine
        self.engine: Engine = engine(recorder, self.files, self._bounce)
        self._mapped: dict[str, MappedFile] = {}
        self._scratch: PlannedScratch | None = None
        self._disk_folder: str | None = None
        self._disk_bytes: int | None = None
        self.staging: Staging | None = None

    def is_compute(self, device: torch.device) -> bool:
        """True if ``device`` is the compute device. A traced device may have no number, as there is only one."""
        same = None in (device.index, self.device.index) or device.index == self.device.index
        return device.type == self.device.type and same

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is on the GPU of the compute tier."""
        return self.device.type != "cpu" and self.is_compute(tensor.device)

    def is_traced_on_device(self, tensor: torch.Tensor) -> bool:
        """True if a trace counts the tensor's memory in VRAM as long as it is referenced."""
        return self.fake and self.is_on_gpu(tensor)

    @property
    def ram(self) -> Pool:
        return self.host or self.compute

    def _bounce(self, bytes: int) -> Buffer:
        return self.ram.allocate(bytes, "bounce buffer")

    def file(self, path: str) -> MappedFile:
        """Return a checkpoint file, or the scratch file, as a MappedFile."""
        if path == SCRATCH_PATH:
            file = self.scratch().file
            assert file is not None, "predictions have no values"
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
        """The largest length of the scratch file; 0 without one."""
        return 0 if self._scratch is None else self._scratch.peak_bytes

    def use_disk(self, *, folder: str | None, limit_bytes: int | None) -> None:
        """Set folder and limit of the scratch file, before its first use."""
        assert self._scratch is None
        self._disk_folder, self._disk_bytes = folder, limit_bytes

    def empty_cache(self) -> None:
        """Release PyTorch's cached device memory, such as that of a model before it was fitted."""
        if self.device.type != "cpu":
            on = accelerator.of(self.device)
            on.synchronize()
            on.empty_cache()

    def close(self) -> None:
        """End the threads and close the files. A second call does nothing."""
        self.engine.close()
        self.files.close()
        if self._scratch is not None:
            self._scratch.close()  # not removed, as a later ``release`` would open a new one
        for file in self._mapped.values():
            file.close()
        self._mapped.clear()

    def __del__(self) -> None:
        # For a module that is dropped without remove().
        if hasattr(self, "staging"):
            self.close()


def cpu_memory(timeline: Timeline, *, ram_bytes: int) -> Memory:
    """Create memory without a GPU: RAM is the compute tier."""
    recorder = Recorder(timeline)
    return Memory(compute=Pool(RAM, ram_bytes, HostSource(), recorder), host=None, recorder=recorder)


def emulated_memory(timeline: Timeline, *, vram_bytes: int, ram_bytes: int) -> Memory:
    """Create memory with a pool in RAM as VRAM and a thread as copy engine, to test the GPU's logic without one."""
    recorder = Recorder(timeline)
    host = Pool(RAM, ram_bytes, HostSource(), recorder)
    return Memory(compute=Pool(VRAM, vram_bytes, HostSource(), recorder), host=host, recorder=recorder)


def device_memory(timeline: Timeline, *, vram_bytes: int, ram_bytes: int, device: torch.device) -> Memory:
    """Create memory of a GPU: PyTorch's caching allocator, copy streams, and host memory, page-locked for CUDA."""
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
    """Create memory for predictions: the same pools and limits with fake tensors on ``device``."""
    recorder = Recorder(timeline)
    host = None if compute_tier == RAM else Pool(RAM, ram_bytes, TorchSource(_CPU), recorder)
    compute = Pool(compute_tier, compute_bytes, TorchSource(device), recorder)
    return Memory(compute=compute, host=host, recorder=recorder, device=device, fake=True)


class Staged(Protocol):
    """A store with a staging slot."""

    def drop_staged(self) -> None:
        """Return the slot of a prefetch to ``Staging``."""


class Staging:
    """RAM slots that blocks pass through from disk to VRAM, and back if they were changed."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._free: list[tuple[Buffer, list[Waitable]]] = [(buffer, []) for buffer in buffers]
        self._stores: Sequence[Staged] = ()

    def take(self) -> tuple[Buffer, list[Waitable]] | None:
        """Take a slot and the conditions for writing to it; None if all are in use."""
        return self._free.pop(0) if self._free else None

    def claim(self) -> tuple[Buffer, list[Waitable]]:
        """Take a slot, dropping prefetches if all are in use."""
        slot = self.take()
        if slot is None:
            self.reclaim()
            slot = self.take()
        assert slot is not None, "a slot was not returned"
        return slot

    def give(self, buffer: Buffer, after: Waitable) -> None:
        self._free.append((buffer, [Settled(after)]))

    def attach(self, stores: Sequence[Staged]) -> None:
        self._stores = list(stores)

    def reclaim(self) -> None:
        """Drop all prefetches."""
        for store in self._stores:
            store.drop_staged()
