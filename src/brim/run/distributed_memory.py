"""What a rank's tensors take, to the byte, as a timeline: every storage from its making until its last owner lets go.

A dispatch mode sees what operations make; what was there before counts from the beginning. What lies in no tensor
(buffers of gloo or NCCL, scratch memory of kernels) is not seen.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from brim.core import Category, Timeline
from brim.core.hardware import RAM, VRAM
from brim.core.timeline import EventKind
from brim.run.distributed_model import Part

_WATCHED = 4


class TensorMeter(TorchDispatchMode):
    """Counts storages while it is entered. ``timeline`` has the events, ``peak_bytes`` the most that there was.

    ``held``: tensors that are there already, with the category of each.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline(name, measured=True)
        self.live_bytes = self.peak_bytes = 0
        self._tier = VRAM if device.type == "cuda" else RAM
        self._device = device.type
        self._live: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}  # number, bytes
        self._count = 0
        self._begin_s = time.perf_counter()

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count what was made before."""
        for tensor in tensors:
            for plain in _plain(tensor):
                self._notice(plain, "", category)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # it runs on this rank's share, which comes back here
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                for plain in _plain(tensor):
                    self._notice(plain, str(func), "")
        return result

    def _notice(self, tensor: torch.Tensor, label: str, category: str) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != self._device:  # DTensor tries out shapes on fake tensors, which have no memory
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] != size:
                self.resized(storage)
            return
        self._count += 1
        self._live[key] = (self._count, size, weakref.ref(storage, lambda _: self._died(key)))
        self._change(EventKind.ALLOC, self._count, size, label, category)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 lets whole weights go, and makes room for them, by resizing their storages."""
        known = self._live.get(storage._cdata)
        if known is None or known[1] == storage.nbytes():
            return
        self._change(EventKind.FREE, known[0], known[1], "resize_", "")
        self._count += 1
        self._live[storage._cdata] = (self._count, storage.nbytes(), known[2])
        self._change(EventKind.ALLOC, self._count, storage.nbytes(), "resize_", "")

    def _died(self, key: int) -> None:
        number, size, _ = self._live.pop(key)
        self._change(EventKind.FREE, number, size, "", "")

    def _change(self, kind: EventKind, number: int, size: int, label: str, category: str) -> None:
        self.live_bytes += size if kind is EventKind.ALLOC else -size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        now_s = time.perf_counter() - self._begin_s
        self.timeline.add(kind, self._tier, size, storage=number, label=label, category=category, time_s=now_s)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count all that happens while open, in backward passes too."""
        with mock.patch.object(torch.UntypedStorage, "resize_", _resizing(self)), self:
            yield


class Watched:
    """A rank's memory over the first steps of a run: the first makes the optimizer's states, the others have all.

    Those others do the same, and the least of their peaks is told: gloo's threads let go of a buffer some time after
    they have told that it is sent, and what is late in one step is not in all. On a GPU the caching allocator counts,
    for the whole run, and there is no timeline.
    """

    def __init__(self, part: Part, device: torch.device, rank: int) -> None:
        self._part, self._device, self._rank = part, device, rank
        self._meter = TensorMeter(f"rank {rank}", device) if device.type == "cpu" else None
        self._peaks: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number`` of this run, from 0 on."""
        if self._meter is None or number >= _WATCHED:
            yield
            return
        if number == 0:
            for chunk in self._part.chunks:
                self._meter.hold(chunk.module.parameters(), Category.PARAMETER)
                self._meter.hold(chunk.module.buffers(), Category.BUFFER)
        for state in self._part.optimizer.state.values():
            held = [value for value in state.values() if isinstance(value, torch.Tensor)]
            self._meter.hold(held, Category.OPTIMIZER_STATE)
        self._meter.peak_bytes = self._meter.live_bytes
        with self._meter.watching():
            yield
        self._peaks.append(self._meter.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        if self._meter is None:
            return torch.cuda.max_memory_allocated(self._device)
        return max([*self._peaks[:1], min(self._peaks[1:], default=0)], default=0)

    def write(self, output: Path) -> None:
        """``timeline-RANK.json`` for ``brim explain``."""
        if self._meter is not None:
            path = output / f"timeline-{self._rank}.json"
            path.write_text(json.dumps(self._meter.timeline.to_json()) + "\n", encoding="utf-8")


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a wrapper is made of: a DTensor's share, what a collective will have filled."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh too
                yield from _plain(inner)
    else:
        yield tensor


def _resizing(meter: TensorMeter) -> Callable[..., Any]:
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        made = resize(storage, size)
        meter.resized(storage)
        return made

    return resize_
