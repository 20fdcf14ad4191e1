"""A pass over blocks in several tiers takes what its lanes take, one beside the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.planning.solver import passes
from brim.planning.solver.passes import BlockCost, Job, pass_s
from brim.planning.solver.schedule import COMPUTE, lane_of
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT

GPU = Hardware(
    name="a GPU",
    compute=VRAM,
    tiers=(
        Tier(name=VRAM, capacity_bytes=1 << 40, bytes_per_s=1e6),
        Tier(name=RAM, capacity_bytes=1 << 40, bytes_per_s=1e5),
    ),
    links=(
        Link(source=RAM, target=VRAM, bytes_per_s=1000.0),
        Link(source=DISK, target=RAM, bytes_per_s=100.0),
    ),
)
CPU = Hardware(
    name="a processor",
    compute=RAM,
    tiers=(Tier(name=RAM, capacity_bytes=1 << 40, bytes_per_s=1e5),),
    links=(Link(source=DISK, target=RAM, bytes_per_s=100.0),),
)


def job(count: int, *, compute_s: float = 0.0, cpu_s: float = 0.0, fixed_s: float = 0.0) -> Job:
    blocks = [BlockCost(name=f"b{i}", bytes=100, compute_s=compute_s, cpu_s=cpu_s) for i in range(count)]
    return Job(model="Model", task="generate", blocks=blocks, fixed_bytes=0, step_bytes=0, fixed_compute_s=fixed_s)


def all_of(work: Job, choice: str) -> dict[str, str]:
    return {block.name: choice for block in work.blocks}


def test_residents_take_what_they_compute() -> None:
    work = job(5, compute_s=0.2, fixed_s=0.5)
    assert pass_s(work, GPU, all_of(work, RESIDENT), 0)[0] == pytest.approx(1.5)


def test_loads_hide_behind_compute_and_compute_behind_loads() -> None:
    slow, quick = job(8, compute_s=0.3), job(8, compute_s=0.01)
    assert pass_s(slow, GPU, all_of(slow, FROM_RAM), 2)[0] == pytest.approx(8 * 0.3)
    assert pass_s(quick, GPU, all_of(quick, FROM_RAM), 2)[0] == pytest.approx(8 * 0.1)


def test_what_comes_from_disk_takes_the_slower_of_two_ways() -> None:
    work = job(6, compute_s=0.05)
    found_s, schedule = pass_s(work, GPU, all_of(work, FROM_DISK), 2)
    assert found_s == pytest.approx(6 * 1.0)
    assert schedule.busy_s()[lane_of(RAM, VRAM)] == pytest.approx(4 * 6 * 0.1)


def test_the_processor_computes_while_the_link_brings_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(8, cpu_s=0.1)
    mixed = {f"b{i}": COMPUTE_RAM if i % 2 else FROM_RAM for i in range(8)}
    alone_s = pass_s(work, GPU, all_of(work, COMPUTE_RAM), 0)[0]
    assert alone_s == pytest.approx(8 * 0.1)
    # Both read the same RAM: beside each other each is a little slower.
    assert 0.4 < pass_s(work, GPU, mixed, 2)[0] < 0.42
    monkeypatch.setattr(passes, "contention", lambda _: {})
    assert pass_s(work, GPU, mixed, 2)[0] == pytest.approx(4 * 0.1)


def test_reads_slow_products_where_processor_and_drive_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(8, compute_s=2.0)
    choices = {f"b{i}": FROM_DISK if i % 2 else RESIDENT for i in range(8)}
    found_s, schedule = pass_s(work, CPU, choices, 2)
    assert 16.0 < found_s < 16.0 / 0.9
    assert schedule.busy_s()[COMPUTE] > 3 * 16.0
    monkeypatch.setattr(passes, "contention", lambda _: {})
    assert pass_s(work, CPU, choices, 2)[0] == pytest.approx(16.0)


def test_an_expert_that_is_seldom_asked_for_is_seldom_moved() -> None:
    blocks = [BlockCost(name=f"b{i}", bytes=100, likely=0.25) for i in range(8)]
    work = Job(model="Model", task="generate", blocks=blocks, fixed_bytes=0, step_bytes=0)
    assert pass_s(work, GPU, all_of(work, FROM_RAM), 2)[0] == pytest.approx(8 * 0.1 * 0.25)


def test_a_ring_with_room_for_all_that_shares_it_loads_nothing() -> None:
    work = job(6, compute_s=0.05)
    choices = {f"b{i}": FROM_DISK if i in (1, 3, 5) else RESIDENT for i in range(6)}
    assert pass_s(work, CPU, choices, 2)[0] > 2.9
    assert pass_s(work, CPU, choices, 3)[0] == pytest.approx(6 * 0.05)


choices = st.lists(st.sampled_from([RESIDENT, FROM_RAM, FROM_DISK, COMPUTE_RAM]), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(choices, st.floats(0, 0.5), st.floats(0.01, 0.5), st.sampled_from([2, 3, 4]))
def test_no_pass_is_shorter_than_its_busiest_lane(
    chosen: list[str], compute_s: float, cpu_s: float, slots: int
) -> None:
    work = job(len(chosen), compute_s=compute_s, cpu_s=cpu_s)
    names = {f"b{i}": choice for i, choice in enumerate(chosen)}
    found_s, _ = pass_s(work, GPU, names, slots)
    chain = sum(cpu_s if choice == COMPUTE_RAM else compute_s for choice in chosen)
    streamed = sum(choice in (FROM_RAM, FROM_DISK) for choice in chosen)
    link = 0.1 * streamed * (streamed > slots)  # what the ring has room for comes once
    disk = 1.0 * chosen.count(FROM_DISK) * (streamed > slots)
    assert found_s >= max(chain, link, disk) * 0.99 - 1e-9  # what one pass leaves to the next differs a little
    assert found_s <= (chain + link + disk) / 0.5 + 1e-9


@pytest.mark.parametrize("count", [2, 12])
def test_each_request_to_a_link_takes_its_latency_too(count: int) -> None:
    """Many small blocks come later than a few large ones of as many bytes."""
    late = replace(CPU, links=tuple(replace(link, latency_s=0.25) for link in CPU.links))
    work = job(count)
    plain_s, late_s = (pass_s(work, machine, all_of(work, FROM_DISK), 1)[0] for machine in (CPU, late))
    assert plain_s == pytest.approx(count * 1.0)
    assert late_s - plain_s == pytest.approx(count * 0.25)
