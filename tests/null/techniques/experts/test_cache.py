"""Slots for experts: what was asked for is there, what is used most stays, and failures are told once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import Timeline
from brim.errors import TransferError, UnsupportedError
from brim.memory.layout import BlockLayout
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory, cpu_memory
from brim.memory.transfer import Ticket, Waitable
from brim.techniques.experts.cache import ExpertCache, Usage

BYTES = 64


class NumberedStore:
    """An expert that consists of its own number."""

    tier = "disk"
    layout = BlockLayout(tensors=(), runs=(), bytes=BYTES)

    def __init__(self, number: int, log: list[int], failing: set[int]) -> None:
        self._number, self._log, self._failing = number, log, failing

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        for condition in after:
            condition.wait()
        self._log.append(self._number)
        slot.tensor.fill_(self._number)
        ticket = Ticket()
        failed = self._number in self._failing
        ticket.finish(TransferError("a read failed", "on purpose") if failed else None)
        return ticket


class Bench:
    def __init__(self, slots: int, experts: int = 8) -> None:
        self.memory: Memory = cpu_memory(Timeline("experts", measured=True), ram_bytes=1 << 20)
        self.loads: list[int] = []
        self.failing: set[int] = set()
        stores = [NumberedStore(number, self.loads, self.failing) for number in range(experts)]
        self.buffer = self.memory.compute.allocate(slots * BYTES, "slots")
        self.cache = ExpertCache(self.memory, stores, "layer", self.buffer, BYTES)  # type: ignore[arg-type]

    def use(self, *experts: int) -> None:
        """One call that needs these, one after the other."""
        self.cache.usage.visit(dict.fromkeys(experts, 1.0))
        self.cache.expect(experts)
        for expert in experts:
            self.check(expert, self.cache.acquire(expert))
            self.cache.release(expert)
        self.cache.end_call()

    def check(self, expert: int, slot: int) -> None:
        assert self.buffer.tensor[slot * BYTES : (slot + 1) * BYTES].tolist() == [expert] * BYTES


def test_what_was_used_is_there_the_next_time() -> None:
    bench = Bench(slots=3)
    bench.use(1, 4)
    bench.use(1, 4, 6)
    bench.use(4, 6)
    assert bench.loads == [1, 4, 6]
    assert (bench.cache.hits, bench.cache.loads) == (4, 3)


def test_what_is_used_often_stays_beside_what_comes_once() -> None:
    bench = Bench(slots=3)
    for passing in (2, 3, 4, 5, 6, 7):
        bench.use(0, 1, passing)
    assert bench.loads.count(0) == bench.loads.count(1) == 1


def test_old_favourites_make_way_in_the_end() -> None:
    bench = Bench(slots=2)
    for _ in range(100):
        bench.use(0, 1)
    for _ in range(200):
        bench.use(2, 3)
    bench.loads.clear()
    bench.use(2, 3)
    assert bench.loads == []


def test_more_than_there_are_slots_come_one_after_another() -> None:
    for slots in (1, 2, 3):
        bench = Bench(slots)
        bench.use(*range(8))
        assert bench.loads == [*range(8)]


def test_a_call_loads_ahead_but_never_what_is_in_use() -> None:
    bench = Bench(slots=3)
    bench.cache.expect(range(5))
    assert bench.loads == [0, 1, 2]
    slot = bench.cache.acquire(0)
    bench.cache.acquire(1)
    bench.cache.release(1)
    assert bench.loads == [0, 1, 2, 3]
    bench.check(0, slot)
    with pytest.raises(UnsupportedError, match="expert 7 was needed while 3 others were in use"):
        for expert in (2, 3, 7):
            bench.cache.acquire(expert)
    bench.cache.end_call()
    bench.use(7, 6, 5)


def test_a_failed_load_is_told_to_who_needs_it_and_tried_again() -> None:
    bench = Bench(slots=3)
    bench.failing.add(2)
    bench.use(0, 1)
    for _ in range(2):
        bench.cache.expect([2, 3])
        with pytest.raises(TransferError, match="on purpose"):
            bench.cache.acquire(2)
        bench.cache.end_call()
    bench.failing.clear()
    bench.use(2, 3, 0, 1)


def test_what_failed_before_it_was_needed_is_tried_once_more() -> None:
    bench = Bench(slots=2)
    bench.failing.add(5)
    bench.cache.expect([5])
    bench.failing.clear()
    bench.check(5, bench.cache.acquire(5))


def test_what_is_forgotten_is_loaded_again() -> None:
    bench = Bench(slots=4)
    bench.use(1, 2)
    bench.cache.forget()
    bench.use(1, 2)
    assert bench.loads == [1, 2, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True), max_size=25), st.integers(1, 8))
def test_any_calls_get_the_right_experts(calls: list[list[int]], slots: int) -> None:
    bench = Bench(slots)
    for call in calls:
        bench.use(*sorted(call))
    assert bench.cache.hits + bench.cache.loads == sum(len(call) for call in calls)
    assert len(bench.cache.resident) <= slots


def test_a_use_counts_half_after_the_half_life() -> None:
    usage = Usage()
    usage.visit({3: 1.0})
    for _ in range(32):
        usage.visit({1: 1 / 64})
    assert usage.score(3) == pytest.approx(0.5)
    assert usage.score(2) == 0
    assert 0.25 < usage.score(1) < 1
