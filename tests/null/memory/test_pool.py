"""One battery over every kind of pool: limits, ledger, events, lifetimes."""

import gc
import mmap
from itertools import pairwise

import psutil
import pytest
import torch

from brim.core import EventKind, Timeline
from brim.errors import BudgetError
from brim.memory.pool import PAGE_BYTES, HostSource, Pool, TorchSource, round_up
from brim.memory.recorder import Recorder

SOURCES = {"host": HostSource, "torch": lambda: TorchSource(torch.device("cpu"))}


@pytest.fixture(params=SOURCES)
def pool(request) -> Pool:
    return Pool("ram", 1 << 20, SOURCES[request.param](), Recorder(Timeline("test", measured=True)))


def test_bytes_can_be_written_and_are_counted(pool):
    buffer = pool.allocate(1000, "a")
    buffer.tensor.fill_(7)
    assert buffer.tensor.dtype == torch.uint8 and buffer.tensor.shape == (1000,)
    assert int(buffer.tensor.sum()) == 7000
    assert (pool.held_bytes, pool.peak_bytes) == (1000, 1000)
    buffer.free()
    assert (pool.held_bytes, pool.peak_bytes) == (0, 1000)


def test_the_limit_is_reached_but_never_passed(pool):
    first = pool.allocate(1 << 19, "first")
    second = pool.allocate(1 << 19, "second")
    with pytest.raises(BudgetError, match="third") as refused:
        pool.allocate(1, "third")
    assert refused.value.smallest_bytes == {"ram": (1 << 20) + 1}
    assert pool.held_bytes == 1 << 20
    second.free()
    pool.allocate(1 << 19, "fourth")
    first.free()
    assert pool.peak_bytes == 1 << 20


def test_memory_of_others_counts_against_the_limit(pool):
    counted = pool.account(1 << 20, "a module's own tensors")
    with pytest.raises(BudgetError):
        pool.allocate(1, "one byte more")
    counted.free()
    pool.allocate(1 << 20, "all of it")


def test_a_refused_allocation_leaves_no_event(pool):
    with pytest.raises(BudgetError):
        pool.allocate(1 << 21, "too much")
    assert len(pool.recorder.timeline) == 0


def test_freeing_twice_counts_once_and_use_after_free_is_a_bug(pool):
    buffer = pool.allocate(10, "a")
    other = pool.allocate(10, "b")
    buffer.free()
    buffer.free()
    assert pool.held_bytes == 10
    with pytest.raises(AssertionError, match="freed"):
        _ = buffer.tensor
    other.free()


def test_every_allocation_and_free_is_an_event(pool):
    a, b = pool.allocate(10, "a"), pool.allocate(20, "b")
    a.free()
    b.free()
    events = [(e.kind, e.bytes, e.storage, e.label) for e in pool.recorder.timeline]
    assert events == [
        (EventKind.ALLOC, 10, 0, "a"),
        (EventKind.ALLOC, 20, 1, "b"),
        (EventKind.FREE, 10, 0, "a"),
        (EventKind.FREE, 20, 1, "b"),
    ]
    assert pool.recorder.timeline.peak_bytes("ram") == pool.peak_bytes == 30


def test_an_empty_buffer_is_allowed(pool):
    buffer = pool.allocate(0, "nothing")
    assert buffer.tensor.numel() == 0
    buffer.free()


def test_host_buffers_are_page_aligned_and_go_back_to_the_system():
    pool = Pool("ram", 1 << 30, HostSource(), Recorder(Timeline("test", measured=True)))
    gc.collect()
    before = psutil.Process().memory_info().rss
    buffers = [pool.allocate((16 << 20) + 1, "a") for _ in range(8)]
    for buffer in buffers:
        assert buffer.tensor.data_ptr() % PAGE_BYTES == 0
        buffer.tensor.fill_(1)
    grown = psutil.Process().memory_info().rss - before
    assert grown > 120 << 20
    del buffer
    while buffers:
        buffers.pop().free()
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_a_row_is_there_as_a_whole_or_not_at_all(pool):
    with pytest.raises(BudgetError, match="slot 1, slot 2, slot 3"):
        pool.allocate_row(1 << 19, ["slot 1", "slot 2", "slot 3"])
    assert pool.held_bytes == pool.peak_bytes == 0
    first, second = pool.allocate_row(1 << 19, ["slot 1", "slot 2"])
    assert pool.held_bytes == 1 << 20 and (first.label, second.label) == ("slot 1", "slot 2")
    assert first.tensor.untyped_storage()._cdata != second.tensor.untyped_storage()._cdata
    first.tensor.fill_(1)
    second.tensor.fill_(2)
    first.free()
    assert pool.held_bytes == 1 << 19
    assert second.tensor.unique().tolist() == [2]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_large_buffers_begin_on_huge_pages_and_take_no_more_than_they_are():
    """A row of small ones lies side by side, so that huge pages do not end with each."""
    pool = Pool("ram", 1 << 30, HostSource(), Recorder(Timeline("test", measured=True)))
    gc.collect()
    before = psutil.Process().memory_info().rss
    whole = pool.allocate((33 << 20) + PAGE_BYTES, "a block")
    row = pool.allocate_row((3 << 20) - PAGE_BYTES, [f"slot {index}" for index in range(8)])
    for buffer in (whole, *row):
        buffer.tensor.fill_(1)
    grown = psutil.Process().memory_info().rss - before
    assert abs(grown - sum(buffer.bytes for buffer in (whole, *row))) < 1 << 20
    assert whole.tensor.data_ptr() % (2 << 20) == 0 == row[0].tensor.data_ptr() % (2 << 20)
    steps = {b.tensor.data_ptr() - a.tensor.data_ptr() for a, b in pairwise(row)}
    assert steps == {(3 << 20) - PAGE_BYTES}


def test_a_view_keeps_the_bytes_alive_after_the_buffer_is_freed():
    pool = Pool("ram", 1 << 20, HostSource(), Recorder(Timeline("test", measured=True)))
    buffer = pool.allocate(4096, "a")
    view = buffer.tensor[8:16].fill_(3)
    buffer.free()
    gc.collect()
    assert view.tolist() == [3] * 8


def test_a_long_run_keeps_its_totals_and_a_bounded_number_of_events():
    recorder = Recorder(Timeline("test", measured=True), keep=5)
    for _ in range(20):
        recorder.copied("disk", "ram", 10, recorder.now_s(), "block")
    assert len(recorder.timeline) == 5
    assert recorder.copied_bytes == {("disk", "ram"): 200}


@pytest.mark.parametrize(("count", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_round_up(count, multiple, expected):
    assert round_up(count, multiple) == expected


def test_what_is_handed_over_counts_until_its_storage_dies(pool):
    pool.limit_bytes = 1000
    buffer = pool.allocate(600, "kept elsewhere")
    inside = buffer.tensor[3:9]
    assert pool.owns(inside)
    tensor = buffer.hand_over()
    assert not pool.owns(inside)
    view = tensor[10:20].view(2, 5)
    del tensor, inside
    pool.settle()
    assert pool.held_bytes == 600
    with pytest.raises(BudgetError):
        pool.allocate(500, "more")
    del view
    pool.allocate(500, "more").free()
    assert (pool.held_bytes, pool.peak_bytes) == (0, 600)
