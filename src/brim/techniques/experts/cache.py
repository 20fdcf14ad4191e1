"""A cache of a layer's experts in slots of the compute tier, by how often and how recently each was used."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from brim.errors import UnsupportedError
from brim.memory.backing_store import BackingStore
from brim.memory.pool import Buffer
from brim.memory.slots import Slot, Slots
from brim.memory.tiers import Memory

# The number of calls of the layer after which a use counts half. Over router traces with and without favourites,
# constant or changing, more needed experts are in slots than by the latest use alone (LRU) or by the number of uses
# (LFU).
_HALF_LIFE_VISITS = 32.0
_DECAY = math.log(2) / _HALF_LIFE_VISITS


class Usage:
    """Scores of experts by LRFU (Lee et al., 2001): a sum over uses that halves every 32 visits.

    A short half-life is LRU, a long one LFU. Each layer has its own scores: in common ones the next layer would be
    the oldest, which is how LRU fails at cyclic access.
    """

    def __init__(self) -> None:
        self._visits = 0
        self._scores: dict[int, tuple[float, int]] = {}  # expert -> its score at a visit

    def visit(self, shares: Mapping[int, float]) -> None:
        """Count a call of the layer, with the share of tokens that went to each expert."""
        self._visits += 1
        for expert, share in shares.items():
            self._scores[expert] = self.score(expert) + share, self._visits

    def rank(self, expert: int) -> tuple[float, int]:
        return self.score(expert), expert

    def score(self, expert: int) -> float:
        score, visit = self._scores.get(expert, (0.0, 0))
        return score * math.exp(-_DECAY * (self._visits - visit))


class ExpertCache:
    """The slots of a layer: ``expect`` announces the experts of a call, ``acquire`` gives the slot of an expert.

    ``hits`` counts experts that were in slots when a call began, ``loads`` those that were not.
    """

    def __init__(
        self, memory: Memory, stores: Sequence[BackingStore], label: str, slots: Buffer, slot_bytes: int
    ) -> None:
        self.stores, self._label = stores, label
        parts = [slots.part(at, at + slot_bytes) for at in range(0, slots.bytes, slot_bytes)]
        self._parts, self._slots = parts, Slots(memory, stores, self._name, parts)
        self._upcoming: list[int] = []  # experts that the current call still needs, in the order of use
        self.usage = Usage()
        self.hits = self.loads = 0

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def resident(self) -> set[int]:
        """The experts in slots, or being loaded."""
        return {slot.holds for slot in self._slots if slot.holds is not None}

    def expect(self, experts: Collection[int]) -> None:
        """Start to load the experts of a call, given in the order of use."""
        hits = len(self.resident.intersection(experts))
        self.hits, self.loads = self.hits + hits, self.loads + len(experts) - hits
        self._upcoming = list(experts)
        self._fetch_ahead()

    def fill(self) -> None:
        for expert, slot in enumerate(self._slots):
            self._slots.load(slot, expert)

    def acquire(self, expert: int) -> int:
        """Wait for ``expert``, and return the number of its slot. Pair with ``release``.

        Raises UnsupportedError when every slot is in use.
        """
        slot, ahead = self._slots.find(expert), True
        if slot is None:
            slot, ahead = self._any_slot(expert), False
            self._slots.load(slot, expert)
        with self._slots.entering(slot):
            self._slots.wait(slot, expert, ahead=ahead)
        return slot.index

    def release(self, expert: int) -> None:
        slot = self._slots.find(expert)
        assert slot is not None and slot.users
        if self._slots.leave(slot):
            if expert in self._upcoming:
                self._upcoming.remove(expert)
            self._fetch_ahead()

    def end_call(self) -> None:
        """End a call, also after an error."""
        self._upcoming.clear()
        self._slots.interrupted()

    def forget(self, experts: Collection[int] | None = None) -> None:
        """Drop ``experts`` (all by default) that are not in use: their values changed."""
        self._slots.forget(experts)

    def part(self, slot: int) -> Buffer:
        return self._parts[slot]

    def _fetch_ahead(self) -> None:
        for expert in self._upcoming:
            if self._slots.find(expert) is None:
                slot = self._least_used(keep=self._upcoming)
                if slot is None:
                    return
                self._slots.load(slot, expert)

    def _any_slot(self, expert: int) -> Slot:
        """Return a slot for an unpredicted expert, even the slot of an expert that this call needs later."""
        slot = self._least_used(keep=self._upcoming) or self._least_used(keep=())
        if slot is None:
            raise UnsupportedError(
                f"{self._name(expert)} was needed while {self.size} others were in use.",
                f"The layer has {self.size} slots for experts.",
                "Give a larger budget.",
            )
        return slot

    def _least_used(self, keep: Sequence[int]) -> Slot | None:
        free = [slot for slot in self._slots if not slot.users and slot.holds not in keep]
        # An empty slot first.
        return min(free, key=lambda s: (-1.0, 0) if s.holds is None else self.usage.rank(s.holds), default=None)

    def _name(self, expert: int) -> str:
        return f"{self._label}, expert {expert}"
