"""The caching allocator's rules, one at a time, as PyTorch's source states them."""

from __future__ import annotations

import pytest

from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import AllocatorConfig
from brim.allocator.out_of_memory import OutOfMemory, torch_size
from brim.errors import UnsupportedError, UsageError
from brim.units import GIB, KIB, MIB
from support.streams_and_captures import StreamsAndCaptures


def allocator(text: str = "", capacity_bytes: int | None = None) -> CachingAllocator:
    return CachingAllocator(AllocatorConfig.parse(text), capacity_bytes)


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes", "segment_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not split off
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB),
    ],
)
def test_requests_are_rounded_and_segments_chosen_by_size(request_bytes, block_bytes, segment_bytes):
    made = allocator()
    block = made.malloc(request_bytes)
    assert (block.size, made.stats.reserved_bytes) == (block_bytes, segment_bytes)
    assert made.stats.allocated_bytes == block_bytes


def test_the_smallest_sufficient_block_at_the_lowest_address_is_taken():
    made = allocator()
    blocks = [made.malloc(size * MIB) for size in (40, 30, 30, 50)]
    for block in blocks:
        made.free(block)
    lowest = min(blocks[1].address, blocks[2].address)
    assert made.malloc(29 * MIB).address == lowest
    assert made.stats.reserved_bytes == 150 * MIB


def test_a_freed_block_merges_with_both_neighbours():
    made = allocator()
    first, second, third = (made.malloc(400 * KIB) for _ in range(3))
    made.free(first)
    made.free(third)
    made.free(second)
    assert made.malloc(MIB).address == first.address or made.stats.reserved_bytes == 2 * MIB


def test_streams_do_not_share_free_blocks():
    made = allocator()
    made.free(made.malloc(20 * MIB, stream=1))
    made.malloc(20 * MIB, stream=2)
    assert made.stats.reserved_bytes == 40 * MIB


def test_empty_cache_gives_back_whole_segments_only():
    made = allocator()
    whole, split = made.malloc(30 * MIB), made.malloc(2 * MIB)
    made.free(whole)
    made.empty_cache()
    assert made.stats.reserved_bytes == 20 * MIB
    made.free(split)
    made.empty_cache()
    assert made.stats.reserved_bytes == 0
    assert made.stats.reserved_peak_bytes == 50 * MIB


def test_a_full_device_gives_back_the_cache_and_tries_again():
    made = allocator(capacity_bytes=100 * MIB)
    made.free(made.malloc(60 * MIB))
    made.malloc(80 * MIB)
    assert made.stats.alloc_retries == 1
    assert made.stats.reserved_bytes == 80 * MIB


def test_out_of_memory_says_what_pytorch_says():
    made = allocator(capacity_bytes=100 * MIB)
    made.malloc(60 * MIB)
    made.malloc(3 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        made.malloc(30 * MIB)
    error = caught.value
    assert (error.tried_bytes, error.total_bytes, error.free_bytes) == (30 * MIB, 100 * MIB, 20 * MIB)
    assert (error.allocated_bytes, error.unallocated_bytes) == (63 * MIB, 17 * MIB)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 30.00 MiB.\n"
        "GPU 0 has a total capacity of 100.00 MiB of which 20.00 MiB is free. Of the allocated memory 63.00 MiB is "
        "allocated by PyTorch, and 17.00 MiB is reserved by PyTorch but unallocated."
    )
    assert made.malloc(2 * MIB).size == 2 * MIB  # the allocator still works


def test_the_size_in_the_message_is_the_segment_not_the_request():
    made = allocator(capacity_bytes=MIB)
    with pytest.raises(OutOfMemory) as caught:
        made.malloc(100)
    assert (caught.value.tried_bytes, caught.value.request_bytes) == (2 * MIB, 100)


def test_a_memory_fraction_limits_what_is_reserved():
    made = allocator("per_process_memory_fraction:0.5", capacity_bytes=100 * MIB)
    made.malloc(40 * MIB)
    with pytest.raises(OutOfMemory, match=r"50\.00 MiB allowed"):
        made.malloc(20 * MIB)


def test_max_split_size_keeps_large_blocks_whole():
    made = allocator("max_split_size_mb:50")
    made.free(made.malloc(100 * MIB))
    made.malloc(10 * MIB)  # smaller than the limit: may not take a block above it
    assert made.stats.reserved_bytes == 110 * MIB
    kept = made.malloc(90 * MIB)  # at or above: takes it if less than 20 MiB are wasted, and does not split it
    assert (kept.size, made.stats.reserved_bytes) == (100 * MIB, 110 * MIB)
    made.free(kept)
    made.malloc(70 * MIB)
    assert made.stats.reserved_bytes == 180 * MIB


def test_max_split_size_releases_only_as_much_as_is_needed():
    made = allocator("max_split_size_mb:50", capacity_bytes=200 * MIB)
    blocks = [made.malloc(size * MIB) for size in (60, 80, 30)]
    for block in blocks:
        made.free(block)
    made.malloc(110 * MIB)
    assert made.stats.alloc_retries == 0
    assert made.stats.reserved_bytes == (110 + 30) * MIB


@pytest.mark.parametrize(
    ("text", "request_bytes", "block_bytes"),
    [
        ("roundup_power2_divisions:4", 1200, 1536),  # below 512 * divisions: as usual
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB),
        ("roundup_power2_divisions:8", 65 * MIB, 72 * MIB),
        ("roundup_power2_divisions:[64:8,128:4,256:2,>:1]", 33 * MIB, 36 * MIB),
        ("roundup_power2_divisions:[64:8,128:4,256:2,>:1]", 129 * MIB, 160 * MIB),
        ("roundup_power2_divisions:[64:8,128:4,256:2,>:1]", 257 * MIB, 384 * MIB),
        ("roundup_power2_divisions:[64:8,128:4,256:2,>:1]", 513 * MIB, 513 * MIB),
    ],
)
def test_rounding_up_to_divisions_of_powers_of_two(text, request_bytes, block_bytes):
    assert AllocatorConfig.parse(text).round_size(request_bytes) == block_bytes


def test_garbage_is_collected_from_the_blocks_that_were_passed_over_most():
    made = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.99", capacity_bytes=200 * MIB)
    old = made.malloc(40 * MIB)
    made.free(old)
    for _ in range(5):
        made.free(made.malloc(60 * MIB))  # reused: young
    made.malloc(62 * MIB)  # 100 MiB are above the threshold
    assert made.stats.reserved_bytes == (60 + 62) * MIB
    assert made.stats.alloc_retries == 0


def test_large_segment_size_serves_requests_below_ten_megabytes():
    made = allocator("large_segment_size_mb:32")
    made.malloc(2 * MIB)
    assert made.stats.reserved_bytes == 32 * MIB


def test_a_block_used_on_another_stream_waits_for_it():
    made = StreamsAndCaptures()
    block = made.malloc(30 * MIB)
    made.record_stream(block, 7)
    made.free(block)
    assert (made.stats.allocated_bytes, made.active_bytes) == (0, 30 * MIB)
    assert made.malloc(30 * MIB).address != block.address
    made.complete_events(7)
    assert made.malloc(30 * MIB).address == block.address
    assert made.active_bytes == 60 * MIB


def test_emptying_the_cache_waits_for_other_streams():
    made = StreamsAndCaptures()
    block = made.malloc(30 * MIB)
    made.record_stream(block, 7)
    made.free(block)
    made.empty_cache()
    assert (made.stats.reserved_bytes, made.active_bytes) == (0, 0)


def test_use_on_the_own_stream_needs_no_waiting():
    made = StreamsAndCaptures()
    block = made.malloc(30 * MIB, stream=3)
    made.record_stream(block, 3)
    made.free(block)
    assert made.active_bytes == 0


def test_a_capture_keeps_its_memory_to_itself_until_it_is_released():
    made = StreamsAndCaptures()
    made.free(made.malloc(30 * MIB))
    made.begin_allocate_to_pool((0, 1))
    captured = made.malloc(30 * MIB)
    made.free(captured)
    assert made.malloc(30 * MIB).address == captured.address  # reused within the capture
    made.end_allocate_to_pool((0, 1))
    assert made.stats.reserved_bytes == 60 * MIB
    made.free(made.live[captured.address])
    made.empty_cache()
    assert made.stats.reserved_bytes == 30 * MIB
    made.release_pool((0, 1))
    made.empty_cache()
    assert made.stats.reserved_bytes == 0


def test_a_capture_takes_only_its_streams():
    made = StreamsAndCaptures()
    made.begin_allocate_to_pool((0, 1), streams=[5])
    made.malloc(30 * MIB, stream=0)
    made.malloc(30 * MIB, stream=5)
    made.end_allocate_to_pool((0, 1))
    assert len(made.private_pools) == 1


def test_a_free_during_a_capture_waits_until_it_ends():
    made = StreamsAndCaptures()
    block, used_inside = made.malloc(30 * MIB), made.malloc(40 * MIB)
    made.record_stream(block, 7)
    made.begin_allocate_to_pool((0, 1))
    made.record_stream(used_inside, 8)
    made.free(block)
    made.free(used_inside)
    made.complete_events()
    made.malloc(MIB)
    assert made.active_bytes == 71 * MIB
    made.end_allocate_to_pool((0, 1))
    made.malloc(MIB)  # what was used inside the capture only is free now; the other starts to wait
    assert made.active_bytes == 32 * MIB
    made.complete_events(7)
    made.malloc(MIB)
    assert made.active_bytes == 3 * MIB


def test_private_pools_count_as_allocated_in_the_message():
    made = allocator(capacity_bytes=100 * MIB)
    made.free(made.malloc(40 * MIB, pool=(0, 1)))
    with pytest.raises(OutOfMemory, match=r"with 40\.00 MiB allocated in private pools") as caught:
        made.malloc(80 * MIB)
    assert (caught.value.allocated_bytes, caught.value.unallocated_bytes) == (40 * MIB, 0)


def test_expandable_segments_grow_by_pages_and_leave_no_holes():
    made = allocator("expandable_segments:True")
    first = made.malloc(30 * MIB)
    assert made.stats.reserved_bytes == 40 * MIB
    second = made.malloc(25 * MIB)
    assert second.address == first.address + 30 * MIB
    assert made.stats.reserved_bytes == 60 * MIB
    assert made.malloc(100).size == 512
    assert made.stats.reserved_bytes == 62 * MIB


def test_expandable_segments_give_back_free_pages_and_fill_the_lowest_hole_first():
    made = allocator("expandable_segments:True")
    first, second = made.malloc(100 * MIB), made.malloc(20 * MIB)
    made.free(first)
    made.empty_cache()
    assert made.stats.reserved_bytes == 20 * MIB
    assert made.malloc(60 * MIB).address == first.address
    assert made.malloc(200 * MIB).address == second.address + 20 * MIB
    assert made.stats.reserved_bytes == (20 + 60 + 200) * MIB


def test_expandable_pages_inside_a_partly_used_range_are_given_back():
    made = allocator("expandable_segments:True")
    first, second, third = made.malloc(30 * MIB), made.malloc(60 * MIB), made.malloc(10 * MIB)
    made.free(second)
    made.empty_cache()
    assert made.stats.reserved_bytes == 60 * MIB  # pages of 20 MiB: 40 to 80 MiB are gone
    assert made.malloc(60 * MIB).address == second.address
    assert first.address < second.address < third.address


def test_a_full_device_fails_an_expandable_segment_and_names_the_rest():
    made = allocator("expandable_segments:True", capacity_bytes=100 * MIB)
    made.malloc(70 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        made.malloc(50 * MIB)
    assert caught.value.tried_bytes == 50 * MIB
    assert caught.value.unallocated_bytes == 10 * MIB


def test_an_expandable_reserve_limits_a_single_request():
    made = allocator("expandable_segments:True,expandable_segments_reserve:0.5", capacity_bytes=GIB)
    made.malloc(500 * MIB)
    with pytest.raises(OutOfMemory):
        made.malloc(600 * MIB)


@pytest.mark.parametrize("count", [0, -1])
def test_impossible_requests_are_refused(count):
    with pytest.raises(UsageError):
        allocator().malloc(count)


def test_a_block_is_freed_once():
    made = allocator()
    block = made.malloc(5)
    made.free(block)
    with pytest.raises(UsageError, match="not in use"):
        made.free(block)


def test_other_backends_are_not_simulated():
    with pytest.raises(UnsupportedError, match="cudaMallocAsync"):
        allocator("backend:cudaMallocAsync")


def test_a_fraction_needs_the_size_of_the_device():
    with pytest.raises(UsageError, match="size of the device is unknown"):
        allocator("per_process_memory_fraction:0.5")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (2 * MIB, "2.00 MiB"), (23 * GIB, "23.00 GiB")],
)
def test_sizes_are_written_as_pytorch_writes_them(count, text):
    assert torch_size(count) == text
