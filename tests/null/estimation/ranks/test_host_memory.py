"""What shards take in RAM: storages one after the other, and what page-locked memory is rounded to."""

import pytest

from brim.core import Category, Storage
from brim.estimation.ranks.estimate import KEPT, locked_bytes, ram_peak


def storage(number, bytes, category, born, died=None):
    return Storage(id=number, bytes=bytes, category=category, module="", born=born, died=died, in_ram=True)


@pytest.mark.parametrize(("bytes", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_page_locked_memory_comes_in_powers_of_two(bytes, taken):
    assert locked_bytes(bytes) == taken


def test_the_peak_is_what_is_there_at_once():
    lives = [
        storage(0, 3000, Category.PARAMETER, 0), storage(1, 3000, Category.GRADIENT, 2, 5),
        storage(2, 700, Category.TEMPORARY, 3, 4), storage(3, 6000, Category.OPTIMIZER_STATE, 6),
    ]  # fmt: skip
    assert ram_peak(lives).allocated == 9000
    beside = ram_peak(lives[:3])
    assert beside.breakdown == {"parameters": 4096, "gradients": 4096, "temporary": 700}
    assert beside.reserved == sum(beside.breakdown.values())


def test_each_shard_is_rounded_by_itself():
    lives = [storage(number, 3000, Category.PARAMETER, number) for number in range(3)]
    assert ram_peak(lives).reserved == 3 * 4096


def test_page_locked_memory_that_was_freed_is_kept_for_what_is_rounded_to_as_much():
    lives = [
        storage(0, 3000, Category.PARAMETER, 0), storage(1, 3000, Category.GRADIENT, 1, 2),
        storage(2, 2500, Category.GRADIENT, 3, 4),  # in the memory of the one before
        storage(3, 5000, Category.GRADIENT, 5, 6), storage(4, 6000, Category.OPTIMIZER_STATE, 7),
    ]  # fmt: skip
    locked = ram_peak(lives)
    assert (locked.allocated, locked.reserved) == (9000, 4096 + 4096 + 8192 + 6000)
    assert locked.breakdown == {"parameters": 4096, KEPT: 4096 + 8192, "optimizer_state": 6000}


def test_nothing_in_ram_takes_nothing():
    assert ram_peak(()).reserved == 0
