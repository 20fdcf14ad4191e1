"""The ring gives every block, in whatever order it is asked for, and prefetches what it can foresee."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import Timeline
from brim.errors import TransferError, UnsupportedError
from brim.memory.layout import BlockLayout
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory, cpu_memory
from brim.memory.transfer import Ticket, Waitable
from brim.report.idle import attribute
from brim.techniques.streaming.ring import OrderPredictor, Ring

BYTES = 64


class NumberedStore:
    """A block that consists of its own number. Loads are done at once, or when ``finish`` says so."""

    tier = "disk"
    layout = BlockLayout(tensors=(), runs=(), bytes=BYTES)

    def __init__(self, number: int, log: list[int], failing: set[int]) -> None:
        self._number, self._log, self._failing = number, log, failing

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        for condition in after:
            condition.wait()
        self._log.append(self._number)
        ticket = Ticket()
        failed = self._number in self._failing
        slot.tensor.fill_(255 if failed else self._number)
        ticket.finish(TransferError("a read failed", "on purpose") if failed else None)
        return ticket

    def rest(self) -> list[torch.Tensor | None]:
        return []

    def value(self, index: int) -> torch.Tensor:
        raise NotImplementedError

    def values(self) -> list[torch.Tensor]:
        return []

    def written(self) -> list[bool]:
        return []

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError


class Bench:
    def __init__(self, blocks: int = 6, slots: int = 2) -> None:
        self.memory: Memory = cpu_memory(Timeline("ring", measured=True), ram_bytes=1 << 20)
        self.loads: list[int] = []
        self.failing: set[int] = set()
        stores = {i: NumberedStore(i, self.loads, self.failing) for i in range(blocks)}
        buffers = [self.memory.compute.allocate(BYTES, f"slot {i}") for i in range(slots)]
        self.ring = Ring(self.memory, stores, {i: f"block {i}" for i in stores}, buffers)

    def use(self, *blocks: int) -> None:
        for block in blocks:
            buffer = self.ring.acquire(block)
            assert buffer.tensor.tolist() == [block] * BYTES
            self.ring.release(block)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.ring.prefetch()
    return made


def test_the_first_blocks_are_there_before_anybody_asks(bench: Bench) -> None:
    assert bench.loads == [0, 1]


def test_in_order_each_block_is_loaded_once_a_step_and_never_waited_for(bench: Bench) -> None:
    bench.use(*range(6), *range(6))
    assert bench.loads == [*range(6), *range(6), 0, 1]  # the end prefetches the beginning
    assert bench.ring.misses == 0


def test_a_wrong_order_is_served_and_learned(bench: Bench) -> None:
    order = [5, 3, 0, 4, 1, 2]
    bench.use(*order, *order[:2])
    before = bench.ring.misses
    bench.use(*order[2:], *order, *order)
    assert bench.ring.misses == before > 0


def test_a_block_used_again_at_once_is_not_loaded_again(bench: Bench) -> None:
    step = [0, 1, 1, 2, 3, 4, 5]
    bench.use(*step, *step)  # seen once
    before = len(bench.loads)
    bench.use(*step, *step)
    assert len(bench.loads) - before == 2 * 6


def test_what_compute_waited_for_is_in_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = NumberedStore.load

    def slow(store: NumberedStore, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        whole(store, slot, label, after)
        ticket = Ticket()
        threading.Timer(0.1 if label == "block 3" else 0.0, ticket.finish, [None]).start()
        return ticket

    monkeypatch.setattr(NumberedStore, "load", slow)
    bench = Bench()
    bench.use(*range(6))
    found = attribute(bench.memory.recorder.timeline)
    assert (found.waits[0].label, found.waits[0].cause) == ("block 3", "copy")
    assert 0.05 < found.waits[0].seconds < found.wall_s


def test_skipped_blocks_make_way(bench: Bench) -> None:
    bench.use(0, 3, 4)
    bench.use(0, 3, 4)
    before = bench.ring.misses
    bench.use(0, 3, 4, 0, 3, 4)
    assert bench.ring.misses == before


def test_a_block_in_use_twice_is_one(bench: Bench) -> None:
    first = bench.ring.acquire(0)
    assert bench.ring.acquire(0) is first
    bench.ring.release(0)
    bench.use(1, 2)
    assert first.tensor.tolist() == [0] * BYTES  # still in use
    bench.ring.release(0)


def test_two_at_once_fill_a_ring_of_two_and_a_third_is_refused(bench: Bench) -> None:
    held = [bench.ring.acquire(0), bench.ring.acquire(4)]
    with pytest.raises(UnsupportedError, match="block 2 was called while block 0, block 4 were running"):
        bench.ring.acquire(2)
    assert [buffer.tensor[0].item() for buffer in held] == [0, 4]
    bench.ring.release(4)
    bench.use(2)
    bench.ring.release(0)
    bench.use(*range(6))


def test_what_is_forgotten_is_loaded_again_but_not_what_is_in_use(bench: Bench) -> None:
    buffer = bench.ring.acquire(0)
    loaded = bench.loads.count(1)
    bench.ring.forget()
    assert buffer.tensor.tolist() == [0] * BYTES
    bench.ring.release(0)
    bench.use(1)
    assert bench.loads.count(1) == loaded + 1


def test_a_failed_load_is_told_to_who_needs_it_and_tried_again(bench: Bench) -> None:
    bench.failing.add(2)
    bench.use(0, 1)
    for _ in range(3):
        with pytest.raises(TransferError, match="on purpose"):
            bench.ring.acquire(2)
    bench.use(3, 4)
    bench.failing.clear()
    bench.use(2, 3, *range(6))


def test_after_an_interrupt_everything_can_be_used(bench: Bench) -> None:
    bench.ring.acquire(0)
    bench.ring.acquire(1)  # and never released
    bench.ring.recover()
    bench.use(*range(6), *range(6))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=50), st.integers(1, 5), st.booleans())
def test_any_sequence_gets_the_right_blocks(sequence: list[int], slots: int, ahead: bool) -> None:
    bench = Bench(slots=slots)
    if ahead:
        bench.ring.prefetch()
    bench.use(*sequence)
    assert bench.ring.misses <= len(sequence)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_nesting_within_the_slots_keeps_what_is_in_use(data: st.DataObject) -> None:
    bench = Bench(slots=3)
    held: list[tuple[int, Buffer]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        if held and data.draw(st.booleans()):
            block, _ = held.pop()
            bench.ring.release(block)
        else:
            block = data.draw(st.integers(0, 5))
            if len({b for b, _ in held} | {block}) <= 3:
                held.append((block, bench.ring.acquire(block)))
        for block, buffer in held:
            assert buffer.tensor.tolist() == [block] * BYTES


def mistakes(predictor: OrderPredictor, sequence: Sequence[int]) -> int:
    wrong = 0
    for block in sequence:
        wrong += next(predictor.upcoming(1), None) != block
        predictor.observe(block)
    return wrong


def test_before_anything_came_the_definition_is_the_order() -> None:
    predictor = OrderPredictor([2, 5, 7])
    assert list(predictor.upcoming(7)) == [2, 5, 7, 2, 5, 7, 2]
    assert mistakes(predictor, [2, 5, 7, 2, 5, 7]) == 0


def test_nothing_is_expected_of_no_blocks() -> None:
    assert list(OrderPredictor([]).upcoming(3)) == []


@pytest.mark.parametrize(
    "step",
    [
        [3, 1, 0, 2],  # definition order is wrong
        [0, 1, 1, 2, 3],  # called twice in a row
        [0, 1, 2, 1, 3],  # called again later
        [0, 2],  # some never come
        [1],
        [0, 1, 0, 2, 0, 3],  # one between all others
    ],
)
def test_a_step_is_learned_in_one_pass(step: list[int]) -> None:
    predictor = OrderPredictor(range(4))
    mistakes(predictor, step)
    mistakes(predictor, step[:2])  # from the end to the beginning again
    mistakes(predictor, step[2:])
    assert mistakes(predictor, step * 5) == 0


def test_an_encoder_that_runs_once_and_a_decoder_that_loops() -> None:
    predictor = OrderPredictor(range(6))
    run = [0, 1, 2, *[3, 4, 5] * 8]
    mistakes(predictor, run)
    assert mistakes(predictor, run) <= 2  # the turn from the loop to the encoder cannot be foreseen


def test_after_a_change_the_new_order_is_learned() -> None:
    predictor = OrderPredictor(range(5))
    mistakes(predictor, [0, 1, 2, 3, 4] * 3)
    assert mistakes(predictor, [4, 2, 0, 1, 3] * 2) <= 11
    assert mistakes(predictor, [4, 2, 0, 1, 3] * 3) == 0


@given(st.permutations(range(8)), st.integers(1, 20))
def test_any_order_of_all_blocks_is_foreseen_after_one_step(order: list[int], ahead: int) -> None:
    predictor = OrderPredictor(range(8))
    mistakes(predictor, [*order, *order[:2]])
    mistakes(predictor, order[2:])
    assert list(predictor.upcoming(ahead)) == [order[i % 8] for i in range(ahead)]


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 30))
def test_whatever_came_there_are_expectations_of_known_blocks(came: list[int], ahead: int) -> None:
    predictor = OrderPredictor(range(6))
    mistakes(predictor, came)
    expected = list(predictor.upcoming(ahead))
    assert len(expected) == ahead and set(expected) <= set(range(6))
