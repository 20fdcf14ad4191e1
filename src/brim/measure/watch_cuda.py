"""PyTorch's recorder of CUDA's allocator, for ``brim.watch``.

``torch/cuda/memory.py`` (``_record_memory_history``, ``_snapshot``) and ``CUDACachingAllocator.cpp``
(``attachOutOfMemoryObserver``: observers are called where the allocation fails, and are never detached).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import UsageError


class _Observer:
    """The one observer of this process. PyTorch has no way to take one off, so it is put on once and switched."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None
        self.devices: frozenset[int] | None = None
        self.attached = False

    def attach(self) -> None:
        if not self.attached:
            vars(torch._C)["_cuda_attach_out_of_memory_observer"](self.notice)  # absent from CPU builds and stubs
            self.attached = True

    def notice(self, device: int, allocated: int, device_allocated: int, device_free: int) -> None:
        if self.call is not None and (self.devices is None or device in self.devices):
            self.call()


_observer = _Observer()


class CudaRecorder:
    def __init__(self, asked: str, max_entries: int, devices: Sequence[int] | None, stacks: str) -> None:
        self._max_entries, self._stacks, self._ours = max_entries, stacks, False
        self._devices = None if devices is None else frozenset(devices)
        count = torch.cuda.device_count()
        if self._devices is not None and not self._devices <= set(range(count)):
            raise UsageError(asked, f"devices is {sorted(self._devices)}.", f"There are devices 0 to {count - 1}.")

    def start(self, on_out_of_memory: Callable[[], None]) -> None:
        torch.cuda.init()
        self._ours = not torch._C._cuda_isHistoryEnabled()
        if self._ours:  # else it goes on as it is: its settings cannot be read, so they could not be given back
            torch.cuda.memory._record_memory_history(
                enabled="all", context="all", stacks=self._stacks, max_entries=self._max_entries
            )
        _observer.attach()
        _observer.devices, _observer.call = self._devices, on_out_of_memory

    def stop(self) -> None:
        _observer.call = None
        if self._ours:
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, path: Path, *, why: str) -> None:
        write_snapshot(path, torch.cuda.memory._snapshot())


def write_snapshot(path: Path, snapshot: Any) -> None:
    """A snapshot as ``torch.cuda.memory._dump_snapshot`` writes it: plain values, pickled."""
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)
