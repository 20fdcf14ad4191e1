"""Memory of a rank's tensors, exact to the byte, as a timeline of every storage's allocation and release.

A dispatch mode sees the results of operations; earlier tensors count from the beginning. Memory outside of tensors
(buffers of gloo or NCCL, workspaces of kernels) is not seen.

Shards in RAM are counted apart from other tensors. On CPUs both are in RAM: there the other tensors count as VRAM, as
the CPU plays the GPU (``techniques.parallel.sharding``).
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brim.core import Category, Timeline
from brim.core.files import write_text
from brim.core.hardware import RAM, VRAM
from brim.core.timeline import EventKind
from brim.model_inputs import tensors_in
from brim.predict.host_residency import Resting
from brim.predict.patches import resizing
from brim.run.ranks.model import Part
from brim.techniques.blocks import inner_tensors

_WATCHED = 4  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class _LiveStorage:
    """A storage that has not been released."""

    number: int
    bytes: int
    tier: str
    storage: weakref.ref[torch.UntypedStorage]


class TensorMeter(TorchDispatchMode):
    """Counts the storages in this machine's RAM while it is entered. ``timeline`` has the events, ``peak_bytes`` the
    peak of each tier. Without ``offloads`` all bytes are RAM's; with it RAM has the offloaded tensors, and if
    ``device`` is the CPU, VRAM has those that a GPU would hold."""

    def __init__(self, name: str, device: torch.device, *, offloads: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline(name, measured=True)
        self._live_bytes = {RAM: 0, VRAM: 0}
        self.peak_bytes = {RAM: 0, VRAM: 0}
        self._plays_gpu = offloads and device.type == "cpu"
        self._live: dict[int, _LiveStorage] = {}
        self._resting = Resting()
        # Reentrant: gloo's threads release storages too, and a collection may release more while one is counted.
        self._counting = threading.RLock()
        self._count = 0
        self._begin_s = time.perf_counter()

    def hold(self, tensors: Iterable[torch.Tensor], category: str, *, in_ram: bool = False) -> None:
        """Count tensors that were created before."""
        for tensor in tensors:
            for plain in inner_tensors(tensor):
                self._notice(plain, "", category, in_ram)

    def restart(self) -> None:
        """Forget the peaks so far."""
        self.peak_bytes = dict(self._live_bytes)

    def crossing(self, *, to_ram: bool) -> AbstractContextManager[None]:
        """While open, new tensors are copies in RAM, or on the device."""
        return self._resting.crossing(to_ram=to_ram)

    def making_in_ram(self) -> AbstractContextManager[None]:
        """While open, tensors created without inputs are in RAM."""
        return self._resting.making()

    def rest_in_ram(self, tensor: torch.Tensor) -> None:
        """Nothing to do: within this mode, tensors are created in the tier of their inputs."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # it calls this mode again with the local shard
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        results = [plain for tensor in tensors_in(result) for plain in inner_tensors(tensor)]
        if results:
            in_ram = self._plays_gpu and self._rests((args, kwargs))
            for plain in results:
                self._notice(plain, str(func), "", in_ram)
        return result

    def _rests(self, arguments: Any) -> bool:
        """True if tensors made from these arguments are in RAM, which is so if all arguments are."""
        inputs = [plain for tensor in tensors_in(arguments) for plain in inner_tensors(tensor)]
        storages = [self._live.get(tensor.untyped_storage()._cdata) for tensor in inputs]
        return self._resting.made_of(storage is not None and storage.tier == RAM for storage in storages)

    def _notice(self, tensor: torch.Tensor, label: str, category: str, in_ram: bool) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # DTensor propagates shapes with fake tensors, which have no memory
            return
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            self.resized(storage)
            return
        self._count += 1
        tier = VRAM if self._plays_gpu and not in_ram else RAM
        reference = weakref.ref(storage, lambda _: self._died(key))
        self._live[key] = entry = _LiveStorage(number=self._count, bytes=size, tier=tier, storage=reference)
        self._change(EventKind.ALLOC, entry, label, category)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a resize: FSDP2 frees full weights, and allocates them again, by resizing their storages."""
        before = self._live.get(storage._cdata)
        if before is None or before.bytes == storage.nbytes():
            return
        self._change(EventKind.FREE, before, "resize_", "")
        self._count += 1
        self._live[storage._cdata] = after = replace(before, number=self._count, bytes=storage.nbytes())
        self._change(EventKind.ALLOC, after, "resize_", "")

    def _died(self, key: int) -> None:
        self._change(EventKind.FREE, self._live.pop(key), "", "")

    def _change(self, kind: EventKind, entry: _LiveStorage, label: str, category: str) -> None:
        tier, size = entry.tier, entry.bytes
        with self._counting:
            self._live_bytes[tier] += size if kind is EventKind.ALLOC else -size
            self.peak_bytes[tier] = max(self.peak_bytes[tier], self._live_bytes[tier])
            now_s = time.perf_counter() - self._begin_s
            self.timeline.add(kind, tier, size, storage=entry.number, label=label, category=category, time_s=now_s)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count every event while open, backward passes included."""
        with mock.patch.object(torch.UntypedStorage, "resize_", resizing(self.resized)), self:
            yield


class Watched:
    """A rank's memory over the first steps of a run: the first creates the optimizer's states, later ones have them.

    The smallest peak of the later steps is reported (that of the first if there is no other): they do the same, but
    gloo's threads release a buffer some time after they report it as sent, which is late in some steps and not in
    all. On a GPU the caching allocator counts, over the entire run, and a timeline has only tensors in RAM.
    """

    def __init__(self, part: Part, device: torch.device, rank: int) -> None:
        self._part, self._device, self._rank = part, device, rank
        self._offloads = any(chunk.handle.offloads for chunk in part.chunks)
        counts = device.type == "cpu" or self._offloads
        self._meter = TensorMeter(f"rank {rank}", device, offloads=self._offloads) if counts else None
        self._peaks: list[dict[str, int]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure step ``number`` of this run, from 0 on."""
        if self._meter is None or number >= _WATCHED:
            yield
            return
        if number == 0:
            for chunk in self._part.chunks:
                self._meter.hold(chunk.module.parameters(), Category.PARAMETER, in_ram=self._offloads)
                self._meter.hold(chunk.module.buffers(), Category.BUFFER)
        for state in self._part.optimizer.state.values():
            states = [value for value in state.values() if isinstance(value, torch.Tensor)]
            self._meter.hold(states, Category.OPTIMIZER_STATE, in_ram=self._offloads)
        self._meter.restart()
        with self._meter.watching():
            yield
        self._peaks.append(self._meter.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak on the device; on a CPU of all tensors, or of those that a GPU would hold."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._most(VRAM if self._offloads else RAM)

    @property
    def ram_bytes(self) -> int:
        """Peak of the tensors offloaded to RAM; 0 without any."""
        return self._most(RAM) if self._offloads else 0

    def _most(self, tier: str) -> int:
        return min((peak[tier] for peak in self._peaks[1:] or self._peaks), default=0)

    def write(self, output: Path) -> None:
        """``timeline-RANK.json`` for ``brim explain``."""
        if self._meter is not None:
            path = output / f"timeline-{self._rank}.json"
            write_text(path, json.dumps(self._meter.timeline.to_json()) + "\n", alone=True)
