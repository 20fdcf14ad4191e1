"""Slots of the compute tier that items of another tier are loaded into. Their owner chooses which slot to replace."""

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
    """The store of an item, such as a ``brim.memory.backing_store.BackingStore``."""

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable: ...


@dataclass(eq=False)
class Slot:
    index: int
    buffer: Buffer
    holds: int | None = None  # the item that is loaded or being loaded
    users: int = 0
    ready: Waitable = field(default_factory=Done)
    idle: Waitable = field(default_factory=Done)  # compute has finished with the previous item
    saved: Waitable = field(default_factory=Done)  # changes have been copied out


class Slots:
    """A slot for each buffer. ``stores`` holds the items, and may grow; ``name`` names them for recordings."""

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
        """Return the slot that holds or loads ``item``; with ``in_use`` only if it has users."""
        return next((slot for slot in self._slots if slot.holds == item and (slot.users or not in_use)), None)

    def load(self, slot: Slot, item: int) -> None:
        """Start to load ``item`` into ``slot`` once its previous item is unused; do nothing if it is loaded."""
        if slot.holds == item:
            return
        after = [slot.idle, slot.saved, Settled(slot.ready)]
        slot.holds = None  # in case the load cannot start
        slot.ready = self._stores[item].load(slot.buffer, self._name(item), after)
        slot.holds, slot.saved = item, Done()

    @contextmanager
    def entering(self, slot: Slot) -> Iterator[None]:
        """Add a user of ``slot``; if the block fails, remove it and drop all unused items."""
        slot.users += 1
        try:
            yield
        except BaseException:
            slot.users -= 1
            slot.holds = None
            self.forget()  # prefetches may have the same error
            if self._memory.staging is not None:
                self._memory.staging.reclaim()
            raise

    def wait(self, slot: Slot, item: int, *, ahead: bool) -> None:
        """Wait until ``item`` is in ``slot``. ``ahead``: it was prefetched, so a failed load is repeated."""
        begin_s = self._memory.recorder.now_s()
        try:
            slot.ready.wait()
        except BrimError:
            if not ahead:
                raise
            slot.holds = None
            self.load(slot, item)
            slot.ready.wait()
        self._memory.recorder.waited(self._memory.compute.tier, begin_s, self._name(item))

    def leave(self, slot: Slot) -> bool:
        """Remove a user of ``slot``; return whether it was the last."""
        slot.users -= 1
        if slot.users == 0:
            slot.idle = self._memory.engine.mark()
        return slot.users == 0

    def forget(self, items: Collection[int] | None = None) -> None:
        """Drop unused items (None: all), because their values changed or an error broke the sequence."""
        for slot in self._slots:
            if not slot.users and (items is None or slot.holds in items):
                slot.holds = None

    def interrupted(self) -> bool:
        """Remove all users after an interrupt; return whether there were any."""
        in_use = any(slot.users for slot in self._slots)
        for slot in self._slots if in_use else ():
            slot.users, slot.idle = 0, self._memory.engine.mark()
        return in_use
