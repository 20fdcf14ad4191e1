"""Layers of a KV cache whose older tokens rest in RAM and pass through a ring of slots in the compute tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from brim.core.hardware import RAM
from brim.core.trace import Category
from brim.memory.pool import Buffer, Pool
from brim.memory.tiers import Memory
from brim.memory.transfer import All, Done, Settled, Waitable
from brim.techniques.streaming.ring import Ring


class RestingLayers:
    """Per layer the oldest ``resting`` tokens in RAM and room for the newer ones beside the ring of ``slots``.

    ``records``: layer -> bytes that a token of all sequences takes. A slot has room for all tokens of a layer.
    """

    def __init__(self, memory: Memory, records: Mapping[int, int], tokens: int, resting: int, slots: int) -> None:
        self.buffers: list[Buffer] = []
        self.layers: dict[int, Resting] = {}
        self._ring: Ring | None = None
        self._open: int | None = None
        try:
            for index, record in records.items():
                older = self._allocate(memory.ram, record * resting, f"kv_cache {index}, older")
                newer = self._allocate(memory.compute, record * (tokens - resting), f"kv_cache {index}, newer")
                self.layers[index] = Resting(self, index, record, resting, older, newer, memory)
            size = max(records.values()) * tokens
            ring = [self._allocate(memory.compute, size, f"kv_cache slot {number}") for number in range(slots)]
        except BaseException:
            self.free()
            raise
        names = {index: f"kv_cache {index}" for index in records}
        self._ring = Ring(memory, self.layers, names, ring)

    def _allocate(self, pool: Pool, size: int, label: str) -> Buffer:
        buffer = pool.allocate(size, label, category=Category.KV_CACHE)
        self.buffers.append(buffer)
        return buffer

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [buffer.tensor for buffer in self.buffers]

    def acquire(self, index: int) -> Buffer:
        """The slot of layer ``index``; the one before it has been computed, or its work has been asked for."""
        assert self._ring is not None
        if self._open is not None:
            opened, self._open = self._open, None
            self._ring.release(opened)
        buffer = self._ring.acquire(index)
        self._open = index
        return buffer

    def save(self, index: int) -> None:
        assert self._ring is not None
        self._ring.save(index)

    def forget(self, index: int) -> None:
        """What slots hold of a layer is not its contents any more."""
        if self._ring is None:
            return
        if self._open == index:
            self._open = None
            self._ring.release(index)
        self._ring.forget({index})

    def free(self) -> None:
        """Give all memory back once nothing is under way. A second call does nothing."""
        for layer in self.layers.values():
            layer.finish()
        for buffer in self.buffers:
            buffer.free()
        self.buffers.clear()


class Resting:
    """A layer of the KV cache, for the ring its backing store: tokens ``[0, resting)`` in RAM, others in VRAM."""

    tier = RAM

    def __init__(
        self,
        layers: RestingLayers,
        index: int,
        record: int,
        resting: int,
        older: Buffer,
        newer: Buffer,
        memory: Memory,
    ) -> None:
        self._layers, self._index, self._record, self._resting = layers, index, record, resting
        self._older, self._newer, self._memory = older, newer, memory
        self._length = 0  # tokens that are where they belong
        self._unsaved = (0, 0)
        self._slot: torch.Tensor | None = None
        self._loaded: Waitable = Done()
        self._saved: Waitable = Done()

    # -- for the cache

    def open(self, count: int) -> torch.Tensor:
        """The slot, uint8, with the first ``count`` tokens in it."""
        slot = self._slot = self._layers.acquire(self._index).tensor
        newer = count - self._resting
        if newer > 0:
            begin, size = self._resting * self._record, newer * self._record
            slot[begin : begin + size].copy_(self._newer.tensor[:size])
        whole = slot.numel() // self._record * self._record
        return slot[:whole]

    def written(self, begin: int, end: int) -> None:
        """Tokens ``[begin, end)`` are in the slot: keep them where they belong."""
        self._length = end
        slot = self._slot
        assert slot is not None, "it was not opened"
        first = max(begin, self._resting)
        if end > first:
            record, at = self._record, first - self._resting
            kept = self._newer.tensor[at * record : (end - self._resting) * record]
            kept.copy_(slot[first * record : end * record])
        if begin < self._resting:
            self._unsaved = (begin, min(end, self._resting))
            self._layers.save(self._index)

    def keep(self, tokens: int) -> None:
        """Only the first ``tokens`` are still of use."""
        self._length = tokens

    def forget(self) -> None:
        self.finish()
        self._length = 0
        self._layers.forget(self._index)

    def finish(self) -> None:
        """Wait, on the host, for what is under way."""
        for move in (self._loaded, self._saved):
            self._memory.engine.finish(Settled(move))

    # -- for the ring

    def stage(self) -> bool:
        """RAM is where it rests: there is nothing nearer."""
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        size = min(self._length, self._resting) * self._record
        if not size:
            return All(after)  # compute is about to write where something may still be saved from
        way = (RAM, self._memory.compute.tier)
        source = self._older.tensor[:size]
        self._loaded = self._memory.engine.copy(source, slot, label, [*after, self._saved], way)
        return self._loaded

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        begin, end = (tokens * self._record for tokens in self._unsaved)
        place, way = self._older.part(begin, end), (self._memory.compute.tier, RAM)
        waits = [*after, Settled(self._saved)]
        self._saved = self._memory.engine.copy(slot.tensor[begin:end], place, label, waits, way)
        return self._saved
