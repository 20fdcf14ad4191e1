"""The program's answer against every answer there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core.hardware import DISK, VRAM
from brim.planner.greedy import greedy
from brim.planner.problem import BlockClass, Column, Pool, Problem, busiest
from brim.planner.search import solve

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


def test_without_time_the_greedy_start_is_the_answer_and_says_that_nothing_is_known() -> None:
    found = solve(two_ways(701 * MIB, 20 * MIB), time_limit_s=0.0)
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
