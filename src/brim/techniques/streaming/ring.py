"""A ring of slots in the compute tier that streamed blocks pass through, and the predictor of their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from brim.errors import UnsupportedError
from brim.memory.pool import Buffer
from brim.memory.slots import Loads, Slot, Slots
from brim.memory.tiers import Memory
from brim.memory.transfer import Settled, Waitable

# Blocks on disk are loaded into RAM this many blocks ahead, enough to include the next few of them.
_STAGE_AHEAD = 64


class RingStore(Loads, Protocol):
    """The methods of a ``brim.memory.backing_store.BackingStore`` that the ring calls."""

    def stage(self) -> bool: ...

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable: ...


class Ring:
    """Slots that are loaded ahead of use. ``misses`` counts the loads that compute had to wait for."""

    def __init__(
        self, memory: Memory, stores: Mapping[int, RingStore], names: Mapping[int, str], buffers: Sequence[Buffer]
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
        self._ahead = [slot for slot in self._ahead if slot.holds in expected]  # the prediction has changed
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
        loaded = {slot.holds for slot in self._slots}
        for block in self._order.upcoming(min(_STAGE_AHEAD, 2 * len(self._stores))):
            if block not in loaded and not self._stores[block].stage():
                return

    def acquire(self, block: int) -> Buffer:
        """Wait for the slot that holds ``block``. Pair with ``release``.

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
        """Copy the slot of ``block`` to its backing store, at the end of its last use."""
        slot = self._in_use(block)
        slot.saved = Settled(self._stores[block].save(slot.buffer, self._names[block], [self._memory.engine.mark()]))

    def holder(self, tensor: torch.Tensor) -> int | None:
        """The block in use whose slot contains ``tensor``, or None."""
        slot = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if slot is None or not slot.users else slot.holds

    def buffer(self, block: int) -> Buffer:
        return self._in_use(block).buffer

    def _in_use(self, block: int) -> Slot:
        slot = self._slots.find(block, in_use=True)
        assert slot is not None, f"{self._names[block]} is not in use"
        return slot

    def forget(self, blocks: Collection[int] | None = None) -> None:
        """Drop the copies of ``blocks`` (all by default) that are not in use."""
        self._slots.forget(blocks)
        self._ahead = [slot for slot in self._ahead if slot.holds is not None]

    def recover(self) -> None:
        """Reset after an interrupt, which may have left the ring's state incomplete."""
        if self._slots.interrupted():
            self.forget()
            self._order.restart()

    def _take(self, block: int) -> Slot:
        slot = self._slots.find(block, in_use=True)
        if slot is not None:
            return slot
        for position, slot in enumerate(self._ahead):
            if slot.holds == block:
                self._ahead = self._ahead[position + 1 :]  # blocks before it were predicted wrongly
                return slot
        for slot in self._slots:  # just used, and not overwritten since
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
        # Best a slot that still holds the block, else an empty one.
        return min(free, key=lambda slot: (slot.holds != block, slot.holds is not None), default=None)


class OrderPredictor:
    """Predicts a repeating sequence of block numbers.

    A step repeats: the block that followed the last two blocks will follow them again. If these two are new, the
    block that followed the last one is predicted; if that is new too, the next in definition order. Definition order
    can be wrong, a block can come twice in a step, and an encoder runs once before a decoder loops: all are learned
    in one pass. Blocks that come in reverse order are a backward pass, which is predicted the first time.
    """

    def __init__(self, definition_order: Sequence[int]) -> None:
        order = list(definition_order)
        self._first = order[0] if order else None
        self._defined = dict(zip(order, order[1:] + order[:1], strict=True))
        self._after_one: dict[int, int] = {}
        self._after_two: dict[tuple[int | None, int], int] = {}
        self._before_two: dict[tuple[int, int], int | None] = {}
        self._last: tuple[int | None, int | None] = (None, None)

    def observe(self, block: int) -> None:
        before, last = self._last
        if last is not None:
            self._after_one[last] = block
            self._after_two[before, last] = block
            self._before_two[last, block] = before
        self._last = last, block

    def restart(self) -> None:
        self._last = (None, None)

    def upcoming(self, count: int) -> Iterator[int]:
        """The next ``count`` blocks, as far as they are known."""
        before, last = self._last
        for _ in range(count):
            following = self._first if last is None else self._next(before, last)
            if following is None:
                return
            yield following
            before, last = last, following

    def _next(self, before: int | None, last: int) -> int | None:
        pair = self._after_two.get((before, last))
        if pair is not None:
            return pair
        if before is not None:
            turned = self._before_two.get((last, before))
            if turned is not None:
                return turned
        return self._after_one.get(last, self._defined.get(last))
