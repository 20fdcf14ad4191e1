"""The program's answer against every answer there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.hardware import DISK, VRAM
from brim.planning.solver.problem import Beside, BlockClass, Column, Pool, Problem, busiest
from brim.planning.solver.search import greedy, solve

MIB = 1 << 20


def column(name: str, seconds: float, link: float, vram: int, slot: int = 0) -> Column:
    return Column(
        name=name,
        bytes={VRAM: vram * MIB},
        seconds={"compute": seconds, "link": link},
        slot_bytes={"ring": slot * MIB} if slot else {},
    )


def every_choice(problem: Problem) -> Iterator[dict[str, dict[str, int]]]:
    ways = []
    for found in problem.classes:
        names = [c.name for c in found.columns]
        splits = itertools.combinations_with_replacement(names, found.count)
        ways.append([{name: list(split).count(name) for name in set(split)} for split in splits])
    for chosen in itertools.product(*ways):
        yield {found.name: counts for found, counts in zip(problem.classes, chosen, strict=True)}


def held_bytes(problem: Problem, counts: dict[str, dict[str, int]], tier: str) -> int:
    used = [(c, counts[f.name].get(c.name, 0)) for f in problem.classes for c in f.columns]
    total = problem.fixed_bytes.get(tier, 0) + sum(c.bytes.get(tier, 0) * n for c, n in used)
    for pool in problem.pools:
        if tier in pool.tiers:
            total += pool.slots * max((c.slot_bytes.get(pool.name, 0) for c, n in used if n), default=0)
    return total


def fits(problem: Problem, counts: dict[str, dict[str, int]]) -> bool:
    return all(held_bytes(problem, counts, tier) <= budget for tier, budget in problem.budget_bytes.items())


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    classes = []
    for index in range(draw(st.integers(1, 2))):
        size = draw(st.integers(1, 200))
        columns = [
            column("resident", 1.0, 0.0, size),
            column("streamed", 1.0, draw(st.floats(0.1, 5.0)), 0, size),
            column("slow", draw(st.floats(1.0, 9.0)), 0.0, size // 2),
        ]
        classes.append(BlockClass(name=f"c{index}", count=draw(st.integers(1, 4)), columns=columns))
    return Problem(
        classes=classes,
        budget_bytes={VRAM: draw(st.integers(1, 900)) * MIB + MIB // 2},
        fixed_bytes={VRAM: draw(st.integers(0, 50)) * MIB},
        fixed_s={"compute": draw(st.floats(0, 2.0))},
        pools=[Pool(name="ring", tiers=[VRAM], slots=2)],
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_it_is_the_fastest_that_fits(problem: Problem) -> None:
    fitting = [counts for counts in every_choice(problem) if fits(problem, counts)]
    found = solve(problem)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert fits(problem, dict(found.counts))  # type: ignore[arg-type]
    least = min(busiest(problem, counts)[1] for counts in fitting)
    assert found.busiest_s == pytest.approx(least, rel=2e-3)
    assert found.gap <= 0.01
    assert found.bound_s <= least * (1 + 1e-6)


@st.composite
def slowed(draw: st.DrawFn) -> Problem:
    """With a part of compute and a link that slow each other."""
    beside = Beside(
        chain="compute",
        columns={"slow"},
        other="link",
        part_share=draw(st.floats(0.3, 1.0)),
        other_share=draw(st.floats(0.3, 1.0)),
        pool="ring",
        s_per_byte=draw(st.floats(0.0, 0.02)) / MIB,
        slot_s=draw(st.sampled_from([0.0, 0.1])),
    )
    return replace(draw(problems()), beside=beside)


def least_s(problem: Problem, counts: dict[str, dict[str, int]]) -> float:
    """As the definition has it: the best of many times in which both are busy."""
    beside = problem.beside
    assert beside is not None
    used = [(f, c, counts[f.name].get(c.name, 0)) for f in problem.classes for c in f.columns]
    chain = problem.fixed_s["compute"] + sum(c.seconds["compute"] * n for _, c, n in used)
    link = sum(c.seconds["link"] * n for _, c, n in used)
    part = sum(c.seconds["compute"] * n for _, c, n in used if c.name == "slow")
    slot = max((c.slot_bytes.get("ring", 0) for _, c, n in used if n), default=0)
    filled = 2 * (beside.slot_s + beside.s_per_byte * slot)
    most = sum(
        min(c.seconds["compute"] * n / beside.part_share, f.count * filled / beside.other_share)
        for f, c, n in used
        if c.name == "slow"
    )
    most = min(most, link / beside.other_share)
    found = []
    for step in range(2001):
        both = most * step / 2000
        alone = part - beside.part_share * both + link - beside.other_share * both
        slower = chain + (1 - beside.part_share) * both, link + (1 - beside.other_share) * both
        found.append(max(*slower, alone + both))
    return min(found)


@settings(max_examples=60, deadline=None)
@given(slowed())
def test_what_slows_each_other_is_counted_for_as_long_as_both_are_busy(problem: Problem) -> None:
    fitting = [counts for counts in every_choice(problem) if fits(problem, counts)]
    found = solve(problem, traffic=0.0)
    assert (found is None) == (not fitting)
    if found is None:
        return
    least = {id(counts): least_s(problem, counts) for counts in fitting}
    for counts in fitting:
        assert busiest(problem, counts)[1] == pytest.approx(least[id(counts)], rel=5e-3)
    assert found.bound_s <= min(least.values()) * (1 + 1e-6)
    assert found.bound_s >= min(least.values()) * (1 - 1e-2)
    assert found.gap <= 1e-3


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_greedy_start_fits_and_is_never_made_worse(problem: Problem) -> None:
    start = greedy(problem)
    if start is None:
        return
    assert fits(problem, {name: dict(counts) for name, counts in start.items()})
    found = solve(problem)
    assert found is not None
    assert found.busiest_s <= busiest(problem, start)[1] * (1 + 2e-3)


def two_ways(budget: int, disk: int) -> Problem:
    resident = Column(name="resident", bytes={VRAM: 100 * MIB}, seconds={"compute": 1.0})
    streamed = Column(name="streamed", bytes={DISK: MIB}, seconds={"compute": 1.0, "link": 3.0})
    return Problem(
        classes=[BlockClass(name="layer", count=10, columns=[resident, streamed])],
        budget_bytes={VRAM: budget, DISK: disk},
    )


def test_without_nodes_the_greedy_start_is_the_answer_and_says_that_nothing_is_known() -> None:
    found = solve(two_ways(701 * MIB, 20 * MIB), most_nodes=0)
    assert found is not None
    assert found.counts == {"layer": {"resident": 7, "streamed": 3}}
    assert 0 <= found.gap <= 1


def test_a_tier_of_which_there_is_nothing_is_left_alone() -> None:
    found = solve(two_ways(1001 * MIB, 0))
    assert found is not None
    assert found.counts == {"layer": {"resident": 10}}
    assert solve(two_ways(999 * MIB, 0)) is None


def test_the_busiest_lane_has_a_name() -> None:
    problem = Problem(
        classes=[BlockClass(name="layer", count=2, columns=[column("streamed", 1.0, 3.0, 0, 1)])],
        budget_bytes={},
        fixed_s={"compute": 1.0},
    )
    assert busiest(problem, {"layer": {"streamed": 2}}) == ("link", 6.0)
