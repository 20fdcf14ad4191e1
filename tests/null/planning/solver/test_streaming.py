"""What the planner promises is feasible, minimal where it says so, and adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import Hardware, Link, Plan, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.planning.solver import BlockCost, Job, smallest_budget
from brim.techniques.streaming.weight_streaming import FROM_DISK, FROM_RAM, NAME, RESIDENT, RING_SLOTS, STAGING_SLOTS
from support.planned import plan_streaming

CPU = Hardware(
    name="a processor",
    compute=RAM,
    tiers=(Tier(name=RAM, capacity_bytes=1 << 40, bytes_per_s=10e9),),
    links=(Link(source=DISK, target=RAM, bytes_per_s=100.0),),
    flops_per_s={"float32": 1e9},
)
GPU = replace(
    CPU,
    compute=VRAM,
    tiers=(Tier(name=VRAM, capacity_bytes=1 << 40, bytes_per_s=100e9), *CPU.tiers),
    links=(*CPU.links, Link(source=RAM, target=VRAM, bytes_per_s=1000.0)),
)


def job(sizes: list[int], *, uses: list[int] | None = None, compute_s: float = 0.0, **more: int) -> Job:
    blocks = [
        BlockCost(name=f"b{i}", bytes=size, uses=1 if uses is None else uses[i], compute_s=compute_s)
        for i, size in enumerate(sizes)
    ]
    values = {"fixed_bytes": 0, "step_bytes": 0, **more}
    return Job(model="Model", task="forward", blocks=blocks, **values)  # type: ignore[arg-type]


def chosen(plan: Plan, choice: str) -> list[int]:
    return [i for i, found in enumerate(plan.choices(NAME).values()) if found == choice]


def held(work: Job, plan: Plan, hardware: Hardware) -> dict[str, int]:
    """Bytes per tier that a run under ``plan`` holds at most, counted anew."""
    choices = plan.choices(NAME)
    streamed = [b for b in work.blocks if choices[b.name] != RESIDENT and b.uses]
    resident = sum(b.bytes for b in work.blocks if choices[b.name] == RESIDENT)
    ring = plan.settings[RING_SLOTS] * max((b.bytes for b in streamed), default=0)
    compute = resident + ring + work.fixed_bytes + work.step_bytes + work.spent_bytes.get(hardware.compute, 0)
    if hardware.compute == RAM:
        return {RAM: compute + work.bounce_bytes}
    on_disk = [b.bytes for b in streamed if choices[b.name] == FROM_DISK]
    staging = plan.settings.get(STAGING_SLOTS, 0) * max(on_disk, default=0)
    in_ram = [b.bytes for b in work.blocks if choices[b.name] == FROM_RAM]
    resting = sum(in_ram) + (work.bounce_bytes if in_ram else 0)
    ram = staging + max(resting, work.passage_bytes) + work.spent_bytes.get(RAM, 0)
    return {VRAM: compute, RAM: ram}


def test_what_fits_stays() -> None:
    plan = plan_streaming(job([10] * 8), CPU, {RAM: 80})
    assert chosen(plan, RESIDENT) == list(range(8))
    assert plan.settings[RING_SLOTS] == 0
    assert plan.promise.peak_bytes == {RAM: 80}


def test_a_byte_less_makes_a_ring_of_two_and_streams_what_it_displaces() -> None:
    plan = plan_streaming(job([10] * 8), CPU, {RAM: 79})
    assert plan.settings[RING_SLOTS] == 2
    assert len(chosen(plan, RESIDENT)) == 5
    assert plan.promise.peak_bytes == {RAM: 70}


@pytest.mark.parametrize(("blocks", "budget", "residents"), [(12, 60, [1, 4, 7, 10]), (12, 80, [1, 3, 5, 7, 9, 11])])
def test_residents_are_spread_evenly(blocks: int, budget: int, residents: list[int]) -> None:
    plan = plan_streaming(job([10] * blocks), CPU, {RAM: budget})
    found = chosen(plan, RESIDENT)
    gaps = [b - a for a, b in zip(found, [*found[1:], found[0] + blocks], strict=True)]
    assert len(found) == len(residents)
    assert max(gaps) - min(gaps) <= 1


def test_a_block_too_large_for_the_ring_stays_when_that_is_better() -> None:
    plan = plan_streaming(job([100, 10, 10, 10, 10]), CPU, {RAM: 125})
    assert 0 in chosen(plan, RESIDENT)
    assert plan.promise.peak_bytes[RAM] <= 125


def test_rows_are_looked_up_where_the_table_rests() -> None:
    work = job([1000, 10, 10, 10], uses=[0, 1, 1, 1])
    plan = plan_streaming(work, CPU, {RAM: 20})
    assert chosen(plan, FROM_DISK) == [0, 1, 2, 3]
    assert plan.promise.peak_bytes == {RAM: 20}
    assert plan.promise.bound_s == pytest.approx(30 / 100.0)  # the table is not moved


def test_a_block_used_twice_counts_twice() -> None:
    plan = plan_streaming(job([10, 10, 10], uses=[2, 1, 1]), CPU, {RAM: 20})
    assert plan.promise.bound_s == pytest.approx(40 / 100.0)
    assert plan.promise.limited_by == "disk -> ram"


def test_the_slowest_lane_is_the_bound() -> None:
    work = job([100] * 6, compute_s=5.0)
    plan = plan_streaming(work, CPU, {RAM: 300})
    assert (plan.promise.bound_s, plan.promise.limited_by) == (pytest.approx(30.0), "compute")
    assert plan.promise.step_s >= plan.promise.bound_s
    fast = plan_streaming(job([100] * 6, compute_s=0.01), CPU, {RAM: 300})
    assert (fast.promise.bound_s, fast.promise.limited_by) == (pytest.approx(5.0), "disk -> ram")


def test_three_tiers() -> None:
    work = job([10] * 12)
    plan = plan_streaming(work, GPU, {VRAM: 60, RAM: 60})
    assert [len(chosen(plan, choice)) for choice in (RESIDENT, FROM_RAM, FROM_DISK)] == [4, 4, 4]
    assert plan.settings == {RING_SLOTS: 2, STAGING_SLOTS: 2}
    assert plan.promise.peak_bytes == {VRAM: 60, RAM: 60}
    assert plan.promise.limited_by == "disk -> ram"
    wide = plan_streaming(work, GPU, {VRAM: 60, RAM: 80})
    assert [len(chosen(wide, choice)) for choice in (RESIDENT, FROM_RAM, FROM_DISK)] == [4, 8, 0]
    assert STAGING_SLOTS not in wide.settings
    assert wide.promise.limited_by == "ram -> vram"


def test_residents_need_a_passage_through_ram() -> None:
    work = job([10] * 4, passage_bytes=10)
    with pytest.raises(BudgetError) as caught:
        plan_streaming(work, GPU, {VRAM: 40, RAM: 9})
    assert caught.value.smallest_bytes == {RAM: 10}
    assert plan_streaming(work, GPU, {VRAM: 40, RAM: 10}).promise.peak_bytes == {VRAM: 40, RAM: 10}


def test_a_refusal_says_what_was_asked_what_is_needed_and_what_to_do() -> None:
    work = replace(job([1 << 20] * 4, fixed_bytes=1 << 20, step_bytes=2 << 20), spent_bytes={RAM: 3 << 20})
    with pytest.raises(BudgetError) as caught:
        plan_streaming(work, CPU, {RAM: 1 << 20})
    assert caught.value.smallest_bytes == {RAM: 8 << 20}
    for part in ("Model", "1 MiB of RAM", "at least 8 MiB", "3 MiB for the program", "--ram 8MiB"):
        assert part in str(caught.value)


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)
amounts = st.integers(0, 40)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    blocks = draw(sizes)
    uses = draw(st.lists(st.integers(0, 2), min_size=len(blocks), max_size=len(blocks)))
    more = {name: draw(amounts) for name in ("fixed_bytes", "step_bytes", "bounce_bytes", "passage_bytes")}
    spent = {RAM: draw(amounts), VRAM: draw(amounts)}
    return replace(job(blocks, uses=uses, compute_s=draw(st.floats(0, 1)), **more), spent_bytes=spent)


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_the_smallest_budget_works_and_a_byte_less_does_not(work: Job) -> None:
    smallest = smallest_budget(work, RAM)
    plan = plan_streaming(work, CPU, {RAM: smallest})
    assert held(work, plan, CPU)[RAM] <= smallest
    if smallest:
        with pytest.raises(BudgetError) as caught:
            plan_streaming(work, CPU, {RAM: smallest - 1})
        assert caught.value.smallest_bytes == {RAM: smallest}


@settings(max_examples=200, deadline=None)
@given(jobs(), st.integers(0, 900), st.integers(0, 900))
def test_a_plan_keeps_its_promise_within_both_budgets(work: Job, vram: int, ram: int) -> None:
    try:
        plan = plan_streaming(work, GPU, {VRAM: vram, RAM: ram})
    except BudgetError as error:
        ((tier, smallest),) = error.smallest_bytes.items()
        assert smallest > {VRAM: vram, RAM: ram}[tier]
        enough = {VRAM: vram, RAM: ram, tier: smallest}
        if tier == VRAM:
            enough[RAM] = 1 << 30
        plan = plan_streaming(work, GPU, enough)
        with pytest.raises(BudgetError):
            plan_streaming(work, GPU, {**enough, tier: smallest - 1})
        vram, ram = enough[VRAM], enough[RAM]
    found = held(work, plan, GPU)
    assert found == dict(plan.promise.peak_bytes)
    assert found[VRAM] <= vram and found[RAM] <= ram
    assert plan.promise.step_s >= plan.promise.bound_s >= 0
    assert set(plan.choices(NAME)) == {b.name for b in work.blocks}


def test_a_model_that_fits_is_resident_whatever_the_rounding_of_its_seconds() -> None:
    for compute_s in (0.5685220639962859, 0.1, 1 / 3, 1e-7):
        work = Job(
            model="Model",
            task="forward",
            blocks=[BlockCost(name="b0", bytes=1, compute_s=compute_s)],
            fixed_bytes=0,
            step_bytes=0,
        )
        assert plan_streaming(work, CPU, {RAM: 2}).choices(NAME) == {"b0": RESIDENT}


@settings(max_examples=200, deadline=None)
@given(jobs(), st.integers(0, 900), st.integers(0, 100))
def test_more_memory_streams_no_more_unless_that_is_faster(work: Job, budget: int, more: int) -> None:
    budget += smallest_budget(work, RAM)

    def streamed(plan: Plan) -> int:
        choices = plan.choices(NAME)
        return sum(b.bytes * b.uses for b in work.blocks if choices[b.name] != RESIDENT)

    small, large = (plan_streaming(work, CPU, {RAM: amount}) for amount in (budget, budget + more))
    assert held(work, small, CPU) == dict(small.promise.peak_bytes)
    whole = sum(b.bytes for b in work.blocks if b.uses)
    if budget + more - smallest_budget(work, RAM) >= whole:
        assert streamed(large) == 0
    if len({b.bytes for b in work.blocks}) == 1:  # of unequal sizes, an even spread may not fill the room exactly
        quieter = streamed(large) <= streamed(small)
        assert quieter or large.promise.step_s < small.promise.step_s or any(b.uses == 2 for b in work.blocks)


def test_what_fits_is_no_guest_of_a_ring_that_would_keep_it() -> None:
    """Neither moves anything after the first step, and the ring leaves a table that is only looked up where it is."""
    blocks = [BlockCost(name="table", bytes=3, uses=0), BlockCost(name="layer", bytes=1)]
    job = Job(model="Model", task="forward", blocks=blocks, fixed_bytes=0, step_bytes=0)
    for budget in (4, 5, 9):
        assert plan_streaming(job, CPU, {RAM: budget}).choices(NAME)["layer"] == RESIDENT


SIMPLE = ({RESIDENT}, {FROM_RAM, FROM_DISK}, {RESIDENT, FROM_RAM, FROM_DISK})


@settings(max_examples=150, deadline=None)
@given(jobs(), st.integers(0, 300), st.integers(0, 300), st.floats(0.5, 40.0))
def test_no_simple_way_is_faster(work: Job, vram: int, ram: int, disk_bytes_per_s: float) -> None:
    links = tuple(replace(link, bytes_per_s=disk_bytes_per_s) if link.source == DISK else link for link in GPU.links)
    for hardware in (replace(GPU, links=links), replace(CPU, links=links[:1])):
        budget = {RAM: ram} if hardware.compute == RAM else {VRAM: vram, RAM: ram}
        try:
            best = plan_streaming(work, hardware, budget)
        except BudgetError:
            continue
        for allowed in SIMPLE:
            try:
                simple = plan_streaming(work, hardware, budget, allowed=allowed)
            except BudgetError:
                continue
            assert best.promise.step_s <= simple.promise.step_s * (1 + 1e-6), allowed


def test_a_bounce_buffer_beside_a_gpu_serves_what_rests_in_ram_alone() -> None:
    work = job([10] * 8, bounce_bytes=7, passage_bytes=10)
    budget = {VRAM: 40, RAM: 1000}
    assert plan_streaming(work, GPU, budget, allowed=[RESIDENT, FROM_RAM]).promise.peak_bytes[RAM] == 6 * 10 + 7
    assert plan_streaming(work, GPU, {VRAM: 80, RAM: 1000}).promise.peak_bytes[RAM] == 10
    least = plan_streaming(work, GPU, {VRAM: 40, RAM: 30})  # two slots, and what passes by
    assert chosen(least, FROM_DISK) and not chosen(least, FROM_RAM)
    assert least.promise.peak_bytes[RAM] == 30
    always = replace(work, fills_ram=True)
    assert plan_streaming(always, GPU, {VRAM: 80, RAM: 1000}).promise.peak_bytes[RAM] == 17
