"""How one activation's bytes leave the compute tier and come back: to RAM by a copy, to disk by direct writes."""

from __future__ import annotations

from typing import Protocol

import torch

from brim.core.hardware import DISK, RAM
from brim.memory.arena import Arena
from brim.memory.layout import PACKED_ALIGNMENT_BYTES, ReadRun
from brim.memory.pool import PAGE_BYTES, Buffer, TorchSource, round_up
from brim.memory.tiers import Memory
from brim.memory.transfer import Settled, Waitable

_LABEL = "activations"
_TORCH = TorchSource(torch.device("cpu"))
MIB = 1 << 20


class OffloadedActivation(Protocol):
    """The bytes of one storage, elsewhere. ``moved``: they are there."""

    moved: Waitable

    def fetch(self) -> Fetch:
        """Start bringing them back. Raises BudgetError when the compute tier has no room."""

    def release(self) -> None:
        """Nobody will fetch them again. Nothing may be under way."""


class Fetch:
    """Bytes on their way back into ``buffer``."""

    def __init__(self, offloaded: OffloadedActivation, buffer: Buffer, there: Waitable, at: int, bytes: int) -> None:
        self._offloaded, self._buffer, self._there = offloaded, buffer, there
        self._at, self._bytes = at, bytes

    def arrive(self) -> torch.Tensor:
        """The bytes (uint8), in memory that is theirs alone. Raises the BrimError that the move ended with."""
        self._there.wait()
        if isinstance(self._offloaded, ActivationOnDisk):
            self._offloaded.fill_edges(self._buffer.tensor, self._at)
        return self._buffer.hand_over()[self._at : self._at + self._bytes]

    def drop(self) -> None:
        """Wait, and give the buffer back."""
        Settled(self._there).wait()
        self._buffer.free()


class Way(Protocol):
    """Where activations go. ``smallest_bytes`` and ``window_bytes`` are what is sensible there."""

    tier: str
    smallest_bytes: int
    window_bytes: int

    def send(self, source: torch.Tensor) -> OffloadedActivation:
        """Start moving ``source`` (uint8, the whole of a storage), which must stay as it is until it is moved.

        Raises BudgetError and TransferError when there is no room.
        """

    def trim(self) -> None:
        """Give back what is not in use."""


def way_for(memory: Memory) -> Way:
    return ToDisk(memory) if memory.host is None else ToRam(memory)


class ToRam:
    """From VRAM into pieces of a few page-locked slabs."""

    tier = RAM
    smallest_bytes = MIB
    window_bytes = 256 * MIB

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = Arena(memory.ram, _LABEL)

    def send(self, source: torch.Tensor) -> OffloadedActivation:
        return _ActivationInRam(self._memory, self._arena.take(source.numel()), source)

    def trim(self) -> None:
        self._arena.trim()
        self._memory.compute.settle()


class _ActivationInRam:
    def __init__(self, memory: Memory, piece: Buffer, source: torch.Tensor) -> None:
        self._memory, self._piece, self._bytes = memory, piece, source.numel()
        engine = memory.engine
        self.moved = engine.copy(source, piece, _LABEL, [engine.mark()], (memory.compute.tier, RAM))

    def fetch(self) -> Fetch:
        memory = self._memory
        buffer = memory.compute.allocate(round_up(self._bytes, PACKED_ALIGNMENT_BYTES), _LABEL)
        after = [self.moved, memory.engine.mark()]  # on a GPU the buffer's memory may still be in use by compute
        source = self._piece.tensor[: self._bytes]
        there = memory.engine.copy(source, buffer, _LABEL, after, (RAM, memory.compute.tier))
        return Fetch(self, buffer, there, 0, self._bytes)

    def release(self) -> None:
        self._piece.free()


class ToDisk:
    """From RAM into the scratch file, straight from the tensor's own pages and back into pages of ours."""

    tier = DISK
    smallest_bytes = 256 << 10
    window_bytes = 64 * MIB

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def send(self, source: torch.Tensor) -> OffloadedActivation:
        return ActivationOnDisk(self._memory, source)

    def trim(self) -> None:
        """The scratch file keeps its length: its pages are used again."""
        self._memory.compute.settle()


class ActivationOnDisk:
    """Whole pages are on disk; what lies before the first page boundary and after the last stays in RAM (< 8 KiB).

    PyTorch's memory begins somewhere in a page. Writing the pages inside needs no copy, and the bytes come back to
    the same place within a page, so that kernels whose rounding depends on alignment compute the same.
    """

    def __init__(self, memory: Memory, source: torch.Tensor) -> None:
        self._memory, self._bytes = memory, source.numel()
        self._pages_bytes = pages_bytes(self._bytes)
        self._before = 0 if memory.fake else -source.data_ptr() % PAGE_BYTES
        after = self._before + self._pages_bytes
        self._edges = torch.empty(self._bytes - self._pages_bytes, dtype=torch.uint8, device="cpu")
        self._edges[: self._before].copy_(source[: self._before])
        self._edges[self._before :].copy_(source[after:])
        self._extent = memory.scratch().reserve(self._pages_bytes)
        self.moved = memory.engine.write(source[self._before : after], self._extent, _LABEL, [])

    def fetch(self) -> Fetch:
        memory, extent = self._memory, self._extent
        # A page to align in, one for what comes before, two for what comes after. From PyTorch's allocator: what
        # forward let go of is there again, and its pages need not be made anew, which takes longer than reading them.
        buffer = memory.compute.allocate(self._pages_bytes + 4 * PAGE_BYTES, _LABEL, _TORCH)
        at = PAGE_BYTES + (0 if memory.fake else -buffer.tensor.data_ptr() % PAGE_BYTES)
        run = ReadRun(path=extent.path, offset=extent.offset, bytes=extent.bytes, at=at, direct=True)
        there = memory.engine.read([run], buffer, _LABEL, [self.moved])
        return Fetch(self, buffer, there, at - self._before, self._bytes)

    def fill_edges(self, buffer: torch.Tensor, at: int) -> None:
        after = self._before + self._pages_bytes
        buffer[at : at + self._before].copy_(self._edges[: self._before])
        buffer[at + after : at + self._bytes].copy_(self._edges[self._before :])

    def release(self) -> None:
        self._memory.scratch().release(self._extent)


def pages_bytes(bytes: int) -> int:
    """The whole pages inside of ``bytes`` wherever they begin: one less than fit, so that prediction knows it."""
    return max(0, bytes // PAGE_BYTES - 1) * PAGE_BYTES
