"""A leak is told from a warm-up, a bound and other lengths by the blocks that outlive their steps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from brim.core.leak import Allocation, Leak, find_leak, full_step, settled

MIB = 1 << 20


def block(born: int, died: int | None = None, *, mib: int = 4, line: str = "train.py:8") -> Allocation:
    return Allocation(bytes=mib * MIB, line=line, born=born, died=died)


def found(blocks: Iterable[Allocation], steps: int) -> Leak | None:
    listed = list(blocks)
    in_use = [
        sum(one.bytes for one in listed if one.born <= step and (one.died is None or one.died > step))
        for step in range(1, steps + 1)
    ]
    return find_leak(listed, in_use)


def test_what_each_step_leaves_is_a_leak_with_its_lines() -> None:
    blocks = [block(step) for step in range(1, 21)]
    blocks += [block(step, mib=1, line="train.py:9") for step in range(1, 21)]
    leak = found(blocks, 20)
    assert leak is not None
    assert leak.bytes_per_step == 5 * MIB
    assert [(row.line, row.bytes_per_step) for row in leak.lines] == [("train.py:8", 4 * MIB), ("train.py:9", MIB)]
    assert (leak.since_step, leak.steps, leak.full_step) == (9, 20, None)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_the_rate_of_what_some_steps_leave_is_that_of_all_steps(every: int) -> None:
    leak = found((block(step) for step in range(1, 61) if step % every == 0), 60)
    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(4 * MIB / every, rel=0.1)


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_few_steps_tell_no_leak(steps: int) -> None:
    assert found((block(step) for step in range(1, steps + 1)), steps) is None


@pytest.mark.parametrize(
    "blocks",
    [
        [block(1), block(2)],  # a warm-up
        [block(step, step + 1) for step in range(1, 51)],  # variables of a loop
        [block(step, step + 8) for step in range(1, 51)],  # the last eight
        [block(step) for step in range(1, 17)],  # up to a bound
        [block(step, 40) for step in range(1, 40)] + [block(step) for step in range(40, 51)],  # emptied
        [block(step) for step in (2, 3, 5, 8, 13, 21, 30)],  # ever more seldom
    ],
)
def test_growth_that_ends_is_no_leak(blocks: list[Allocation]) -> None:
    assert found(blocks, 50) is None


def test_blocks_of_other_sizes_that_come_and_go_do_not_hide_a_leak() -> None:
    lengths = [block(step, step + 1, mib=step * 7 % 50) for step in range(1, 31)]
    assert found(lengths, 30) is None
    leak = found([*lengths, *(block(step, mib=1) for step in range(1, 31))], 30)
    assert leak is not None
    assert leak.bytes_per_step == MIB


def test_the_step_in_which_the_card_is_full_follows_what_the_allocator_takes() -> None:
    leak = found((block(step) for step in range(1, 21)), 20)
    assert leak is not None
    reserved = [(100 + 5 * step) * MIB for step in range(1, 21)]  # a fifth of it lies unused
    assert full_step(leak, 1000 * MIB, 180 * MIB, reserved) == 181
    flat = [500 * MIB] * 20  # what an early peak has left is filled first
    assert full_step(leak, 1000 * MIB, 180 * MIB, flat) == 226


@pytest.mark.parametrize(
    ("in_use", "steps", "says"),
    [
        ([9], 1, False),
        ([9, 9], 1, True),
        ([9, 9], 2, False),
        ([9, 9, 9], 2, True),
        ([9, 10, 10, 10], 1, False),  # it may grow every other time
        ([9, 10, 10, 10, 10], 1, True),
        ([9, 10, 11, 12], 1, False),
        ([9, 12, 3, 8, 7, 5, 8], 1, None),
    ],
)
def test_memory_has_settled_where_steps_add_nothing(in_use: list[int], steps: int, says: bool | None) -> None:
    assert settled([mib * MIB for mib in in_use], steps=steps) is says
