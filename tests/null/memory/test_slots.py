"""What holds of slots whoever has them: a ring of blocks, a cache of experts, or their own pool alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from brim.core import Timeline
from brim.errors import TransferError
from brim.memory.pool import Buffer
from brim.memory.slots import Slots
from brim.memory.tiers import Memory, cpu_memory
from brim.memory.transfer import Ticket, Waitable
from brim.techniques.experts.cache import ExpertCache
from brim.techniques.streaming.ring import Ring

BYTES, ITEMS, SLOTS = 64, 6, 2


class NumberedStore:
    """An item that consists of its own number."""

    def __init__(self, number: int, failing: set[int]) -> None:
        self._number, self._failing = number, failing

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        for condition in after:
            condition.wait()
        if self._number in self._failing:
            raise TransferError(f"{label} was asked for", "no read could begin")
        slot.tensor.fill_(self._number)
        ticket = Ticket()
        ticket.finish()
        return ticket

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise NotImplementedError


class Owner(Protocol):
    def take(self, item: int) -> list[int]: ...

    def give(self, item: int) -> None: ...

    def forget(self) -> None: ...


class Alone:
    """The pool itself under the simplest policy: the first slot that is not in use."""

    def __init__(self, memory: Memory, stores: dict[int, Any], whole: Buffer) -> None:
        parts = [whole.part(at, at + BYTES) for at in range(0, whole.bytes, BYTES)]
        self.slots = Slots(memory, stores, str, parts)

    def take(self, item: int) -> list[int]:
        slot = self.slots.find(item) or next(slot for slot in self.slots if not slot.users)
        self.slots.load(slot, item)
        with self.slots.entering(slot):
            self.slots.wait(slot, item, ahead=False)
        return slot.buffer.tensor.tolist()

    def give(self, item: int) -> None:
        slot = self.slots.find(item, in_use=True)
        assert slot is not None
        self.slots.leave(slot)

    def forget(self) -> None:
        self.slots.forget()


class InRing:
    def __init__(self, memory: Memory, stores: dict[int, Any], whole: Buffer) -> None:
        parts = [whole.part(at, at + BYTES) for at in range(0, whole.bytes, BYTES)]
        self.ring = Ring(memory, stores, {item: str(item) for item in stores}, parts)
        self.give, self.forget = self.ring.release, self.ring.forget

    def take(self, item: int) -> list[int]:
        return self.ring.acquire(item).tensor.tolist()


class InCache:
    def __init__(self, memory: Memory, stores: dict[int, Any], whole: Buffer) -> None:
        self.cache = ExpertCache(memory, [stores[item] for item in sorted(stores)], "layer", whole, BYTES)
        self.give, self.forget = self.cache.release, self.cache.forget

    def take(self, item: int) -> list[int]:
        return self.cache.part(self.cache.acquire(item)).tensor.tolist()


@pytest.fixture
def failing() -> set[int]:
    return set()


@pytest.fixture(params=[Alone, InRing, InCache])
def owner(request: pytest.FixtureRequest, failing: set[int]) -> Owner:
    memory = cpu_memory(Timeline("slots", measured=True), ram_bytes=1 << 20)
    stores = {item: NumberedStore(item, failing) for item in range(ITEMS)}
    made: Owner = request.param(memory, stores, memory.compute.allocate(SLOTS * BYTES, "slots"))
    return made


def test_whatever_is_asked_for_is_there(owner: Owner) -> None:
    for item in (0, 1, 2, 3, 4, 5, 3, 3, 0, 5, 1):
        assert owner.take(item) == [item] * BYTES
        owner.give(item)


def test_what_is_in_use_stays_whole_beside_what_comes(owner: Owner) -> None:
    owner.take(4)
    for item in (0, 1, 2):
        assert owner.take(item) == [item] * BYTES
        owner.give(item)
    assert owner.take(4) == [4] * BYTES  # a second user of the same slot
    owner.give(4)
    owner.give(4)


def test_a_load_that_could_not_begin_leaves_nothing_behind(owner: Owner, failing: set[int]) -> None:
    owner.take(1)
    owner.give(1)
    owner.forget()
    failing.add(3)
    for _ in range(2):
        with pytest.raises(TransferError, match="no read could begin"):
            owner.take(3)
    failing.clear()
    for item in (3, 1):
        assert owner.take(item) == [item] * BYTES
        owner.give(item)


def test_what_is_forgotten_comes_again(owner: Owner) -> None:
    owner.take(2)
    owner.give(2)
    owner.forget()
    assert owner.take(2) == [2] * BYTES
    owner.give(2)
