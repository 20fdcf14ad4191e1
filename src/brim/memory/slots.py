"""Slots of the compute tier that things from another tier pass through: what each holds, and when it may be written.

Which slot is given up for what comes next is the policy of the owner of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from brim.errors import BrimError
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory
from brim.memory.transfer import Done, Settled, Waitable


class Loads(Protocol):
    """Where an item rests: a ``brim.memory.backing_store.BackingStore``, say."""

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable: ...


@dataclass(eq=False)
class Slot:
    index: int
    buffer: Buffer
    holds: int | None = None  # the item that is in it, or on its way into it
    users: int = 0
    ready: Waitable = field(default_factory=Done)
    idle: Waitable = field(default_factory=Done)  # compute is done with what was in it
    saved: Waitable = field(default_factory=Done)  # what was changed in it has been taken out of it


class Slots:
    """One slot per buffer. ``stores`` has where each item rests, and may grow; ``name`` is what recordings and errors
    call it."""

    def __init__(
        self,
        memory: Memory,
        stores: Mapping[int, Loads] | Sequence[Loads],
        name: Callable[[int], str],
        buffers: Sequence[Buffer],
    ) -> None:
        self._memory, self._stores, self._name = memory, stores, name
        self._slots = [Slot(index, buffer) for index, buffer in enumerate(buffers)]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, item: int, *, in_use: bool = False) -> Slot | None:
        """The slot that holds ``item``, or will; with ``in_use`` only one that has users."""
        return next((slot for slot in self._slots if slot.holds == item and (slot.users or not in_use)), None)

    def load(self, slot: Slot, item: int) -> None:
        """Begin to bring ``item`` into ``slot``, once nobody needs what is there; nothing where it is there."""
        if slot.holds == item:
            return
        after = [slot.idle, slot.saved, Settled(slot.ready)]
        slot.holds = None  # until the load is under way: what fails before that has brought nothing
        slot.ready = self._stores[item].load(slot.buffer, self._name(item), after)
        slot.holds, slot.saved = item, Done()

    @contextmanager
    def entering(self, slot: Slot) -> Iterator[None]:
        """One user more, unless what is done within fails: then nothing that is not in use counts as loaded."""
        slot.users += 1
        try:
            yield
        except BaseException:
            slot.users -= 1
            slot.holds = None
            self.forget()  # what was fetched ahead may have met the same error
            if self._memory.staging is not None:
                self._memory.staging.reclaim()
            raise

    def wait(self, slot: Slot, item: int, *, ahead: bool) -> None:
        """Return when ``item`` is in ``slot``. ``ahead``: its load began before it was needed."""
        begin_s = self._memory.recorder.now_s()
        try:
            slot.ready.wait()
        except BrimError:
            if not ahead:
                raise
            slot.holds = None  # it failed while nobody needed it: whether it still does is known only now
            self.load(slot, item)
            slot.ready.wait()
        self._memory.recorder.waited(self._memory.compute.tier, begin_s, self._name(item))

    def leave(self, slot: Slot) -> bool:
        """One user less; whether that was the last."""
        slot.users -= 1
        if slot.users == 0:
            slot.idle = self._memory.engine.mark()
        return slot.users == 0

    def forget(self, items: Collection[int] | None = None) -> None:
        """Drop what is there and not in use: the values changed, or an error broke the sequence. All unless told."""
        for slot in self._slots:
            if not slot.users and (items is None or slot.holds in items):
                slot.holds = None

    def interrupted(self) -> bool:
        """Where something counts as in use, nothing does any more; whether that was so."""
        in_use = any(slot.users for slot in self._slots)
        for slot in self._slots if in_use else ():
            slot.users, slot.idle = 0, self._memory.engine.mark()
        return in_use
