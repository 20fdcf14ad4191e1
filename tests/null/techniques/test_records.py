"""Records that pass through a buffer: what was left is what is entered, in any order and room; predicted alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.pool import PAGE_BYTES
from brim.memory.tiers import Memory, fake_memory
from brim.techniques.records import Records
from support.offloaded import machine

PLACES = [("cpu", DISK), ("emulated", RAM), ("emulated", DISK)]
SIZES = {0: 3 * PAGE_BYTES, 1: 100, 2: PAGE_BYTES, 3: 8 * PAGE_BYTES, 4: 2 * PAGE_BYTES - 7, 5: PAGE_BYTES}


@pytest.fixture
def memory(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = machine(getattr(request, "param", "cpu"), Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path)
    yield made
    made.close()


def visit(records: Records, seed: int, values: dict[int, int] | None) -> None:
    """Enter and leave at random, with hints that are right, wrong or none; ``values``: None for a prediction."""
    draw = random.Random(seed)
    seen: set[int] = set()
    for turn in range(120):
        record = draw.choice(list(SIZES))
        hints = draw.sample(sorted(seen), k=min(len(seen), draw.randrange(4)))
        records.expect(hints)
        there = records.enter(record, empty=record not in seen)
        records.expect(hints)
        if values is not None and record in seen:
            assert (there == values[record]).all()
        change = record not in seen or draw.random() < 0.6
        if change:
            there.fill_(turn)
            if values is not None:
                values[record] = turn
        records.leave(record, changed=change)
        seen.add(record)


@pytest.mark.parametrize("pages", [0, 10, 12, 40])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("memory", "tier"), [("cpu", DISK), ("emulated", RAM), ("emulated", DISK)], indirect=["memory"]
)
def test_what_is_left_is_what_is_entered(memory: Memory, tier: str, pages: int, seed: int) -> None:
    records = Records(
        memory, SIZES, tier=tier, buffer_bytes=pages * PAGE_BYTES, label="r", on_gpu=memory.host is not None
    )
    assert memory.compute.held_bytes == max(8, pages) * PAGE_BYTES
    values: dict[int, int] = {}
    visit(records, seed, values)
    for record, value in values.items():
        assert (records.get(record, 16, 20) == value).all()
        records.put(record, 50, torch.full((10,), 7, dtype=torch.uint8))
    for record, value in values.items():
        there = records.enter(record)
        assert (there[50:60] == 7).all() and (there[:50] == value).all() and (there[60:] == value).all()
        records.leave(record, changed=False)
    records.settle()
    records.free()
    records.free()
    assert memory.ram.held_bytes == memory.compute.held_bytes == 0


@pytest.mark.parametrize("pages", [0, 12])
@pytest.mark.parametrize(
    ("memory", "tier"), [("cpu", DISK), ("emulated", RAM), ("emulated", DISK)], indirect=["memory"]
)
def test_a_prediction_moves_the_same_bytes(memory: Memory, tier: str, pages: int) -> None:
    timeline, on_gpu = Timeline("p", measured=False), memory.host is not None
    compute = VRAM if on_gpu else RAM
    foreseen = fake_memory(timeline, compute_tier=compute, compute_bytes=1 << 30, ram_bytes=1 << 30)
    made = []
    for one, values in ((memory, {}), (foreseen, None)):
        records = Records(one, SIZES, tier=tier, buffer_bytes=pages * PAGE_BYTES, label="r", on_gpu=on_gpu)
        visit(records, 1, values)
        records.settle()
        made.append((dict(one.recorder.copied_bytes), records.read_bytes, records.written_bytes))
        records.free()
    assert made[0] == made[1]


def test_a_brief_buffer_is_there_while_records_come(memory: Memory) -> None:
    records = Records(memory, SIZES, tier=DISK, buffer_bytes=0, label="r", brief=True)
    values: dict[int, int] = {}
    for seed in range(3):
        assert memory.ram.held_bytes == 0
        values.clear()  # a visit begins with empty records
        visit(records, seed, values)
        assert memory.ram.held_bytes == 8 * PAGE_BYTES
        records.free_buffer()
        for record, value in values.items():
            assert (records.get(record, 0, 50) == value).all()
    records.free()
    assert memory.ram.held_bytes == 0


def test_blocks_that_fit_side_by_side_are_read_ahead(memory: Memory) -> None:
    sizes = dict.fromkeys(range(6), PAGE_BYTES)
    records = Records(memory, sizes, tier=DISK, buffer_bytes=3 * PAGE_BYTES, label="r")
    for record in sizes:
        records.enter(record, empty=True).fill_(record)
        records.leave(record)
    before = records.read_bytes
    records.expect([0, 1, 3, 2])
    assert records.read_bytes - before == 2 * PAGE_BYTES  # there is room for one more, and that is 3, which is there
    records.expect([0, 1, 2])
    assert records.read_bytes - before == 3 * PAGE_BYTES
    for record in (0, 1, 2):
        assert (records.enter(record) == record).all()
        records.leave(record, changed=False)
    assert records.read_bytes - before == 3 * PAGE_BYTES
    records.forget(2)
    records.enter(2)
    assert records.read_bytes - before == 4 * PAGE_BYTES
    records.leave(2, changed=False)
    records.free()
