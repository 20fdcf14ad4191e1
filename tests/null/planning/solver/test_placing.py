"""Placements from the linear program fit, and none that fits is faster than the bound says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.planning.solver import BlockCost, Job
from brim.planning.solver.passes import pass_s
from brim.planning.solver.placing import least_s, placements
from brim.planning.solver.streaming import CHOICES, plan_of
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT
from brim.techniques.streaming.weight_streaming import NAME, RING_SLOTS
from support.planned import plan_streaming

LINK, HOST = 25e9, 40e9
GIB, MIB = 1 << 30, 1 << 20
GPU = Hardware(
    name="a GPU",
    compute=VRAM,
    tiers=(
        Tier(name=VRAM, capacity_bytes=24 * GIB, bytes_per_s=900e9),
        Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=HOST),
    ),
    links=(
        Link(source=RAM, target=VRAM, bytes_per_s=LINK),
        Link(source=DISK, target=RAM, bytes_per_s=3e9),
    ),
)
SPLIT = (RESIDENT, FROM_RAM, FROM_DISK)


def job(count: int, size: int, *, cpu: bool = True, **more: int) -> Job:
    blocks = [
        BlockCost(
            name=f"b{i}", bytes=size, compute_s=size / 900e9, cpu_s=size / HOST * cpu, overhead_s=60e-6 * (size > 1)
        )
        for i in range(count)
    ]
    return Job(model="Model", task="generate", blocks=blocks, **{"fixed_bytes": 0, "step_bytes": 0, **more})  # type: ignore[arg-type]


def test_processor_and_link_share_what_does_not_fit_so_that_both_end_together() -> None:
    work = job(80, GIB // 2)
    plan = plan_streaming(work, GPU, {VRAM: 20 * GIB, RAM: 64 * GIB})
    alone = plan_streaming(work, GPU, {VRAM: 20 * GIB, RAM: 64 * GIB}, allowed=SPLIT)
    chosen = list(plan.choices(NAME).values())
    assert chosen.count(COMPUTE_RAM) and chosen.count(FROM_RAM)
    streamed_s, computed_s = (chosen.count(c) * GIB / 2 / r for c, r in ((FROM_RAM, LINK), (COMPUTE_RAM, HOST)))
    # The bus of RAM serves both: what does not fit takes as long as it takes to be read once.
    overflow_s = (chosen.count(FROM_RAM) + chosen.count(COMPUTE_RAM)) * GIB / 2 / (HOST / 0.8)
    assert plan.promise.step_s == pytest.approx(overflow_s, rel=0.12)
    assert max(streamed_s, computed_s) <= plan.promise.step_s
    assert plan.promise.step_s < 0.8 * alone.promise.step_s


def test_blocks_of_both_kinds_are_spread_evenly() -> None:
    plan = plan_streaming(job(60, GIB // 2), GPU, {VRAM: 10 * GIB, RAM: 64 * GIB})
    chosen = list(plan.choices(NAME).values())
    halves = [chosen[:30].count(COMPUTE_RAM), chosen[30:].count(COMPUTE_RAM)]
    assert abs(halves[0] - halves[1]) <= 1


def test_without_room_for_a_ring_the_processor_computes_all() -> None:
    plan = plan_streaming(job(8, GIB), GPU, {VRAM: GIB, RAM: 64 * GIB})
    assert set(plan.choices(NAME).values()) <= {COMPUTE_RAM, RESIDENT}
    assert plan.settings[RING_SLOTS] == 0
    with pytest.raises(BudgetError):
        plan_streaming(job(8, GIB), GPU, {VRAM: GIB, RAM: 64 * GIB}, allowed=SPLIT)


def test_what_the_processor_holds_beside_weights_counts() -> None:
    work = job(8, GIB)
    held = replace(work, cpu_step_bytes=GIB, blocks=[replace(b, cpu_bytes=GIB // 4) for b in work.blocks])
    plan = plan_streaming(held, GPU, {VRAM: GIB, RAM: 11 * GIB + MIB})
    count = list(plan.choices(NAME).values()).count(COMPUTE_RAM)
    assert plan.promise.peak_bytes[RAM] == count * GIB * 5 // 4 + GIB <= 11 * GIB + MIB


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=5))
    blocks = [
        BlockCost(name=f"b{i}", bytes=size * GIB, compute_s=size / 900, cpu_s=draw(st.sampled_from([size / 40, 0.0])))
        for i, size in enumerate(sizes)
    ]
    fixed = draw(st.integers(0, 2)) * GIB
    return Job(model="Model", task="generate", blocks=blocks, fixed_bytes=fixed, step_bytes=GIB // 4)


def possible(work: Job, choices: Mapping[str, str]) -> bool:
    """Whether the processor computes only what it can."""
    return all(block.cpu_s for block in work.blocks if choices[block.name] == COMPUTE_RAM)


@pytest.mark.parametrize("vram", [3, 4])
def test_the_processor_computes_only_what_it_can(vram: int) -> None:
    """Blocks of several sizes, a third of which it cannot compute: choices are changed one at a time."""
    work = job(18, GIB // 4)
    blocks = [
        replace(b, bytes=b.bytes * size, compute_s=b.compute_s * size, cpu_s=b.cpu_s * size * (i % 3 > 0))
        for i, (b, size) in enumerate(zip(work.blocks, cycle([1, 2, 3, 5]), strict=False))
    ]
    work = replace(work, blocks=blocks)
    plan = plan_streaming(work, GPU, {VRAM: vram * GIB, RAM: 64 * GIB})
    assert COMPUTE_RAM in plan.choices(NAME).values()
    assert possible(work, plan.choices(NAME))


budgets = st.tuples(st.integers(1, 14), st.integers(1, 14))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(jobs(), budgets)
def test_no_placement_that_fits_is_below_the_bound(work: Job, amounts: tuple[int, int]) -> None:
    budget = {VRAM: amounts[0] * GIB + MIB, RAM: amounts[1] * GIB + MIB}

    def fits(choices: Mapping[str, str], slots: int) -> bool:
        peak_bytes = plan_of(work, GPU, budget, choices, slots).promise.peak_bytes
        return possible(work, choices) and all(peak_bytes[tier] <= count for tier, count in budget.items())

    found = list(placements(work, GPU, budget, CHOICES, fits=fits))
    assert all(possible(work, one.choices) for one in found)
    reached = []
    for chosen in product(CHOICES, repeat=len(work.blocks)):
        choices = {block.name: choice for block, choice in zip(work.blocks, chosen, strict=True)}
        if not possible(work, choices):
            continue
        moving = [b for b in work.blocks if choices[b.name] in (FROM_RAM, FROM_DISK)]
        for slots in (2, 3, 4) if moving else (0,):
            plan = plan_of(work, GPU, budget, choices, slots)
            if all(plan.promise.peak_bytes[tier] <= count for tier, count in budget.items()):
                reached.append(plan.promise.step_s)  # what the bus of RAM takes from two readers included
    # A few KiB of each tier are left free, and no budget here is within that of a placement's bytes.
    assert bool(found) == bool(reached)
    if reached:
        assert min(one.bound_s for one in found) <= min(reached) * (1 + 1e-6) or min(reached) == 0
        assert least_s(work, GPU, budget, CHOICES) <= min(reached) * (1 + 1e-6)
        assert all(one.gap <= 0.01 for one in found)


@settings(max_examples=40, deadline=None)
@given(jobs(), budgets, st.integers(0, 4))
def test_plans_fit_more_memory_is_never_slower_and_no_simple_way_is_faster(
    work: Job, amounts: tuple[int, int], more: int
) -> None:
    budget = {VRAM: amounts[0] * GIB, RAM: amounts[1] * GIB}
    try:
        plan = plan_streaming(work, GPU, budget)
    except BudgetError:
        return
    assert all(plan.promise.peak_bytes[tier] <= count for tier, count in budget.items())
    assert possible(work, plan.choices(NAME))
    larger = plan_streaming(work, GPU, {tier: count + more * GIB for tier, count in budget.items()})
    assert larger.promise.step_s <= plan.promise.step_s * (1 + 1e-9)
    for allowed in ((RESIDENT,), (FROM_RAM, FROM_DISK), SPLIT, (COMPUTE_RAM,)):
        if allowed == (COMPUTE_RAM,) and not all(block.cpu_s for block in work.blocks):
            continue
        try:
            simple = plan_streaming(work, GPU, budget, allowed=allowed)
        except BudgetError:
            continue
        assert plan.promise.step_s <= simple.promise.step_s * (1 + 1e-9)


def like_a_model(layers: int, *, head: int = 0) -> Job:
    """Layers of a small block and three larger ones, and at the end one as large as a vocabulary."""
    sizes = [size * MIB for _ in range(layers) for size in (80, 112, 112, 112)] + [head * MIB] * bool(head)
    blocks = [
        BlockCost(name=f"b{i}", bytes=n, compute_s=n / 360e9, cpu_s=n / HOST + 40e-6, overhead_s=60e-6)
        for i, n in enumerate(sizes)
    ]
    return Job(model="Model", task="generate", blocks=blocks, fixed_bytes=0, step_bytes=0)


@pytest.mark.thorough
@pytest.mark.parametrize(("layers", "head", "vram"), [(32, 1002, 11), (32, 0, 8), (16, 500, 3)])
def test_a_plan_is_as_fast_as_its_bound_but_for_a_hundredth(layers: int, head: int, vram: int) -> None:
    """Of what the processor and the link read of one RAM, and a ring that a large block keeps full."""
    work, budget = like_a_model(layers, head=head), {VRAM: vram * GIB, RAM: 64 * GIB}
    plan = plan_streaming(work, GPU, budget)
    assert {FROM_RAM, COMPUTE_RAM} <= set(plan.choices(NAME).values())
    assert least_s(work, GPU, budget, CHOICES) <= plan.promise.step_s <= 1.01 * least_s(work, GPU, budget, CHOICES)


def test_the_simulated_seconds_are_those_of_the_plan() -> None:
    work = job(24, GIB // 2)
    plan = plan_streaming(work, GPU, {VRAM: 6 * GIB, RAM: 64 * GIB})
    found_s, _ = pass_s(work, GPU, plan.choices(NAME), plan.settings[RING_SLOTS])
    assert plan.promise.step_s == pytest.approx(max(found_s, plan.promise.bound_s))
