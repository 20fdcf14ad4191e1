"""A few slots in the compute tier through which all streamed blocks pass, filled ahead of use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from brim.errors import UnsupportedError
from brim.memory.pool import Buffer
from brim.memory.slots import Loads, Slot, Slots
from brim.memory.tiers import Memory
from brim.memory.transfer import Settled, Waitable
from brim.techniques.streaming.order import OrderPredictor

# How far ahead a block on disk is brought into RAM, in blocks: enough to find the next few of them.
_STAGE_AHEAD = 64


class Carried(Loads, Protocol):
    """What the ring asks of a ``brim.memory.backing_store.BackingStore``."""

    def stage(self) -> bool: ...

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable: ...


class Ring:
    """Slots, what is in them, and what is being fetched. ``misses`` counts loads that compute had to wait for."""

    def __init__(
        self, memory: Memory, stores: Mapping[int, Carried], names: Mapping[int, str], buffers: Sequence[Buffer]
    ) -> None:
        self._memory, self._stores, self._names = memory, stores, names
        self._slots = Slots(memory, stores, names.__getitem__, buffers)
        self._by_storage = {slot.buffer.tensor.untyped_storage()._cdata: slot for slot in self._slots}
        self._ahead: list[Slot] = []  # prefetched, in the order of expected use
        self._order = OrderPredictor(sorted(stores))
        self.misses = 0

    def prefetch(self) -> None:
        """Fill every free slot with the blocks that come next."""
        in_use = {slot.holds for slot in self._slots if slot.users}
        expected = list(self._order.upcoming(len(self._slots)))
        self._ahead = [slot for slot in self._ahead if slot.holds in expected]  # the others will not come after all
        for block in expected:
            if block in in_use or any(slot.holds == block for slot in self._ahead):
                continue
            slot = self._free_slot(block)
            if slot is None:
                break
            self._slots.load(slot, block)
            self._ahead.append(slot)
        if self._memory.staging is not None:
            self._stage()

    def _stage(self) -> None:
        """Start disk reads for the blocks beyond the ring."""
        loaded = {slot.holds for slot in self._slots}
        for block in self._order.upcoming(min(_STAGE_AHEAD, 2 * len(self._stores))):
            if block not in loaded and not self._stores[block].stage():
                return

    def acquire(self, block: int) -> Buffer:
        """The slot that holds ``block``, after whatever wait that takes. Pair with ``release``.

        Raises UnsupportedError when every slot is in use.
        """
        self._order.observe(block)
        misses = self.misses
        slot = self._take(block)
        try:
            with self._slots.entering(slot):
                self.prefetch()
                self._slots.wait(slot, block, ahead=misses == self.misses)
        except BaseException:
            self._ahead.clear()
            self._order.restart()
            raise
        return slot.buffer

    def release(self, block: int) -> None:
        if self._slots.leave(self._in_use(block)):
            self.prefetch()

    def save(self, block: int) -> None:
        """Send what is in the slot of ``block``, which is in use for the last time, to where the block rests."""
        slot = self._in_use(block)
        slot.saved = Settled(self._stores[block].save(slot.buffer, self._names[block], [self._memory.engine.mark()]))

    def holder(self, tensor: torch.Tensor) -> int | None:
        """The block in whose slot ``tensor`` lies while it is in use; None: it lies elsewhere."""
        slot = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if slot is None or not slot.users else slot.holds

    def buffer(self, block: int) -> Buffer:
        """The slot of ``block``, which is in use."""
        return self._in_use(block).buffer

    def _in_use(self, block: int) -> Slot:
        slot = self._slots.find(block, in_use=True)
        assert slot is not None, f"{self._names[block]} is not in use"
        return slot

    def forget(self, blocks: Collection[int] | None = None) -> None:
        """Drop what is prefetched or kept, but not in use: all of it unless told."""
        self._slots.forget(blocks)
        self._ahead = [slot for slot in self._ahead if slot.holds is not None]

    def let_go(self) -> None:
        """What counts as in use was interrupted, and so perhaps was our own accounting: begin anew."""
        if self._slots.interrupted():
            self.forget()
            self._order.restart()

    def _take(self, block: int) -> Slot:
        slot = self._slots.find(block, in_use=True)
        if slot is not None:
            return slot
        for position, slot in enumerate(self._ahead):
            if slot.holds == block:
                self._ahead = self._ahead[position + 1 :]  # those before it did not come
                return slot
        for slot in self._slots:  # used a moment ago and still whole
            if slot.holds == block and slot not in self._ahead:
                return slot
        self.misses += 1
        chosen = self._free_slot(block) or (self._ahead.pop() if self._ahead else None)
        if chosen is None:
            used = ", ".join(self._names[slot.holds] for slot in self._slots if slot.holds is not None)
            raise UnsupportedError(
                f"{self._names[block]} was called while {used} were running.",
                f"The ring has {len(self._slots)} slots, so no more blocks than that can be in use at once.",
                "Give a budget that holds one of them resident.",
            )
        self._slots.load(chosen, block)
        return chosen

    def _free_slot(self, block: int) -> Slot | None:
        free = [slot for slot in self._slots if not slot.users and slot not in self._ahead]
        # The emptiest first; one that still holds the very block is best of all.
        return min(free, key=lambda slot: (slot.holds != block, slot.holds is not None), default=None)
