"""The allocator beside a slow one that is too simple to be wrong, and what must hold after every request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import AllocatorConfig
from brim.allocator.device_memory import SimulatedDevice
from brim.allocator.out_of_memory import OutOfMemory
from brim.units import GIB, KIB, MIB

USED, FREE, UNMAPPED = "used", "free", "unmapped"


@dataclass
class Cell:
    address: int
    size: int
    state: str


@dataclass
class Segment:
    stream: int
    small: bool
    page: int  # 0: a plain segment
    cells: list[Cell] = field(default_factory=list)

    def tidy(self) -> None:
        """Join neighbouring cells of one kind that is not in use."""
        joined: list[Cell] = []
        for cell in self.cells:
            if joined and joined[-1].state == cell.state != USED:
                joined[-1].size += cell.size
            else:
                joined.append(cell)
        self.cells = joined


class SlowAllocator:
    """Every segment a list of cells; every question answered by looking at all of them."""

    def __init__(self, config: AllocatorConfig, capacity_bytes: int) -> None:
        self.config, self.device = config, SimulatedDevice(capacity_bytes)
        self.segments: list[Segment] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(cell.size for segment in self.segments for cell in segment.cells if cell.state != UNMAPPED)

    def malloc(self, nbytes: int, stream: int) -> int | None:
        """The address, or None when memory is exhausted."""
        size = self.config.round_size(nbytes)
        small = size <= MIB
        found = self.best_fit(size, stream, small)
        for attempt in (self.extend, self.after_release, self.after_empty_cache):
            found = found or attempt(size, stream, small)
        if found is None:
            return None
        segment, cell = found
        rest = cell.size - size
        expandable = self.config.expandable_segments
        limit = self.config.max_split_bytes or 1 << 62
        if (rest >= 512) if small or expandable else (size < limit and rest > MIB):
            segment.cells.insert(segment.cells.index(cell) + 1, Cell(cell.address + size, rest, FREE))
            cell.size = size
        cell.state = USED
        return cell.address

    def best_fit(self, size: int, stream: int, small: bool) -> tuple[Segment, Cell] | None:
        fitting = [
            (self.growth(segment, cell) if segment.page else cell.size, cell.size, cell.address, segment, cell)
            for segment in self.segments
            for cell in segment.cells
            if (segment.stream, segment.small, cell.state) == (stream, small, FREE) and cell.size >= size
        ]
        if not fitting:
            return None
        fitting.sort(key=lambda one: one[1:3])
        best = 0
        while best + 1 < len(fitting) and fitting[best + 1][0] < fitting[best][0]:
            best += 1  # a block that can grow counts as large as it can grow
        segment, cell = fitting[best][3:]
        limit = self.config.max_split_bytes or 1 << 62
        if size < limit <= cell.size or (size >= limit and cell.size >= size + 20 * MIB):
            return None
        return segment, cell

    def growth(self, segment: Segment, cell: Cell) -> int:
        after = segment.cells[segment.cells.index(cell) + 1 :][:1]
        return cell.size + sum(other.size for other in after if other.state == UNMAPPED)

    def extend(self, size: int, stream: int, small: bool) -> tuple[Segment, Cell] | None:
        if self.config.expandable_segments:
            return self.extend_mapping(size, stream, small)
        wanted = self.config.segment_bytes(size)
        address = self.device.allocate(wanted)
        if address is None:
            return None
        segment = Segment(stream, small, 0, [Cell(address, wanted, FREE)])
        self.segments.append(segment)
        return segment, segment.cells[0]

    def extend_mapping(self, size: int, stream: int, small: bool) -> tuple[Segment, Cell] | None:
        """Map, in the lowest run of cells not in use that has room, what is missing at its beginning."""
        mine = [s for s in self.segments if s.page and (s.stream, s.small) == (stream, small)]
        for segment in sorted(mine, key=lambda one: one.cells[0].address):
            if run := self.run_with_room(segment, size):
                return self.map_run(segment, run, size)
        total = self.device.total_bytes or 0
        page = 2 * MIB if small else 20 * MIB
        room = -(-(total + total // 8) // page) * page
        self.segments.append(Segment(stream, small, page, [Cell(self.device.reserve(room), room, UNMAPPED)]))
        run = self.run_with_room(self.segments[-1], size)
        return self.map_run(self.segments[-1], run, size) if run else None

    def run_with_room(self, segment: Segment, size: int) -> list[Cell]:
        for index, cell in enumerate(segment.cells):
            run = list(takewhile(lambda other: other.state != USED, segment.cells[index:]))
            kinds = {other.state for other in run[:2]}
            if UNMAPPED in kinds and sum(other.size for other in run) >= size and cell.state != USED:
                return run
        return []

    def map_run(self, segment: Segment, run: list[Cell], size: int) -> tuple[Segment, Cell] | None:
        start, missing = run[0].address, size
        for cell in run:
            if missing <= 0:
                break
            if cell.state == FREE:
                missing -= cell.size
                continue
            mapped = min(cell.size, -(-min(missing, cell.size) // segment.page) * segment.page)
            if not self.device.map(cell.address, mapped):
                segment.tidy()
                return None
            missing -= mapped
            if mapped < cell.size:
                rest = Cell(cell.address + mapped, cell.size - mapped, UNMAPPED)
                segment.cells.insert(segment.cells.index(cell) + 1, rest)
            cell.size, cell.state = mapped, FREE
        segment.tidy()
        return segment, next(cell for cell in segment.cells if cell.address == start)

    def after_release(self, size: int, stream: int, small: bool) -> tuple[Segment, Cell] | None:
        limit = self.config.max_split_bytes
        if limit is None:
            return None
        wanted = max(size, limit)
        cached = sorted(
            (s.cells[0].size, s.cells[0].address, s)
            for s in self.segments
            if not s.page and (s.stream, s.small, len(s.cells), s.cells[0].state) == (stream, small, 1, FREE)
        )
        enough = [one for one in cached if one[0] >= wanted][:1]
        chosen, released = enough, sum(one[0] for one in enough)
        for one in reversed([] if enough else cached):
            if released >= wanted or one[0] < limit:
                break
            chosen.append(one)
            released += one[0]
        for _, _, segment in chosen:
            self.drop(segment)
        return self.extend(size, stream, small) if released >= wanted else None

    def after_empty_cache(self, size: int, stream: int, small: bool) -> tuple[Segment, Cell] | None:
        self.empty_cache()
        return self.extend(size, stream, small)

    def drop(self, segment: Segment) -> None:
        self.device.release(segment.cells[0].address, segment.cells[0].size)
        self.segments.remove(segment)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            if not segment.page:
                if len(segment.cells) == 1 and segment.cells[0].state == FREE:
                    self.drop(segment)
                continue
            base, before = segment.cells[0].address, len(segment.cells)
            for cell in [cell for cell in segment.cells if cell.state == FREE]:
                begin = base + -(-(cell.address - base) // segment.page) * segment.page
                end = base + (cell.address + cell.size - base) // segment.page * segment.page
                if begin >= end:
                    continue
                self.device.unmap(begin, end - begin)
                parts = [
                    Cell(cell.address, begin - cell.address, FREE),
                    Cell(begin, end - begin, UNMAPPED),
                    Cell(end, cell.address + cell.size - end, FREE),
                ]
                at = segment.cells.index(cell)
                segment.cells[at : at + 1] = [part for part in parts if part.size]
            segment.tidy()
            if before > 1 and len(segment.cells) == 1 and segment.cells[0].state == UNMAPPED:
                self.segments.remove(segment)  # one that nothing was ever mapped in stays

    def free(self, address: int) -> None:
        for segment in self.segments:
            for cell in segment.cells:
                if cell.address == address and cell.state == USED:
                    cell.state = FREE
                    segment.tidy()
                    return
        raise AssertionError("no such block")


SETTINGS = (
    "",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
)
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 24 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB, 32 * MIB, 64 * MIB]),
    st.integers(MIB, 90 * MIB),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def assert_sound(made: CachingAllocator, capacity_bytes: int) -> None:
    """No overlap, neighbours linked and merged, books that balance, never above the capacity."""
    free = {block.address: block for pool in (made.small, made.large) for block in pool.blocks.values()}
    holes = {block.address: block for pool in (made.small, made.large) for block in pool.holes.values()}
    every = sorted([*made.live.values(), *free.values(), *holes.values()], key=lambda block: block.address)
    for before, after in pairwise(every):
        assert before.address + before.size <= after.address
    for block in every:
        after = block.next
        if after is not None:
            assert after.prev is block
            assert after.address == block.address + block.size
            mergeable = not block.allocated and not after.allocated and block.mapped == after.mapped
            assert not mergeable
    mapped = [block for block in every if block.mapped]
    assert made.stats.allocated_bytes == sum(block.size for block in made.live.values())
    assert made.stats.reserved_bytes == sum(block.size for block in mapped)
    assert made.stats.allocated_bytes <= made.stats.reserved_bytes <= capacity_bytes


@pytest.mark.parametrize("text", SETTINGS)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, capacity_bytes=st.sampled_from([100 * MIB, 300 * MIB, GIB]))
def test_it_does_what_the_slow_allocator_does(text, steps, capacity_bytes):
    config = AllocatorConfig.parse(text)
    fast, slow = CachingAllocator(config, capacity_bytes), SlowAllocator(config, capacity_bytes)
    blocks = []
    for action, number, stream in steps:
        if action == "malloc":
            expected = slow.malloc(number, stream)
            if expected is None:
                with pytest.raises(OutOfMemory):
                    fast.malloc(number, stream)
            else:
                blocks.append(fast.malloc(number, stream))
                assert blocks[-1].address == expected
        elif action == "free" and blocks:
            block = blocks.pop(number % len(blocks))
            slow.free(block.address)  # first: merging moves the block's address
            fast.free(block)
        elif action == "empty":
            fast.empty_cache()
            slow.empty_cache()
        assert fast.stats.reserved_bytes == slow.reserved_bytes
        assert_sound(fast, capacity_bytes)
