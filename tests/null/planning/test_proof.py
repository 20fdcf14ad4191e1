"""The loop of all searches: proposals, proofs, corrections."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import brim
from brim.core import Plan, Promise
from brim.errors import BudgetError
from brim.planning.proof import (
    check_promise,
    fits,
    over_bytes,
    plan_or_smallest_budget,
    prove,
    prove_within,
    raise_promise,
    search,
    sufficient,
)

SOURCES = Path(brim.__file__).parent
PLANNERS = ("planning", "run/fit", "run/plan", "run/generate", "run/ranks", "run/script")
# The integer program and its simulated seconds prove nothing.
NO_PLANNERS = ("planning/proof.py", "planning/solver/", "planning/seconds/")


def too_small(least: int) -> BudgetError:
    return BudgetError("Cannot run it.", smallest_bytes={"vram": least})


def refuse(taken: Mapping[str, int]) -> BudgetError:
    return BudgetError("Cannot run it.", smallest_bytes=dict(taken))


def planner(least: int) -> Callable[[Mapping[str, int]], int]:
    """Plans that use their whole budget, of at least ``least`` bytes."""

    def plan(budget: Mapping[str, int]) -> int:
        if budget["vram"] < least:
            raise too_small(least)
        return budget["vram"]

    return plan


def test_a_search_attempts_candidates_in_turn_and_names_the_smallest_refusal() -> None:
    attempted: list[int] = []

    def attempt(n: int) -> int | None:
        attempted.append(n)
        if n > 3:
            raise too_small(n)
        return n * n if n % 2 else None

    assert search([9, 2, 3, 1], attempt, most=1) == [9] and attempted == [9, 2, 3]
    assert search([], attempt) == [] and search([2], attempt) == []
    with pytest.raises(BudgetError) as refused:
        search([9, 2, 5, 7], attempt)
    assert refused.value.smallest_bytes == {"vram": 5}


def test_candidates_end_a_search_by_its_results() -> None:
    results: list[int] = []
    candidates = (n for n in range(9) if len(results) < 2)
    assert search(candidates, lambda n: n or None, results=results, add=lambda all, n: all.insert(0, n)) == [2, 1]


def test_proofs_follow_one_another_until_no_correction_is_left() -> None:
    assert prove(1, lambda n: n * n, lambda proofs: None if len(proofs) == 3 else len(proofs) + 1) == [1, 4, 9]
    assert prove(1, lambda n: n, lambda proofs: 1, most=4) == [1, 1, 1, 1]
    assert prove(None, lambda n: n, lambda proofs: 1) == []


def test_a_plan_that_takes_more_than_its_budget_is_made_again_in_a_smaller_one() -> None:
    tried: list[int] = []

    def plan(budget: Mapping[str, int]) -> int:
        tried.append(budget["vram"])
        return planner(10)(budget)

    plan_bytes, taken = prove_within({"vram": 100}, plan, lambda n: {"vram": n + 7, "ram": 5}, refuse, grain_bytes=10)
    assert (plan_bytes, taken, tried) == (90, {"vram": 97, "ram": 5}, [100, 90])
    tried.clear()
    prove_within({"vram": 100}, plan, lambda n: {"vram": n + 7}, refuse, margin_bytes=3)
    assert tried == [100, 90]


def test_a_refusal_in_a_lowered_budget_names_bytes_of_the_real_one() -> None:
    with pytest.raises(BudgetError) as refused:
        prove_within({"vram": 100}, planner(95), lambda n: {"vram": n + 7}, refuse)
    assert refused.value.smallest_bytes == {"vram": 95 + 7}


def test_plans_that_never_fit_end_in_a_refusal() -> None:
    with pytest.raises(BudgetError) as refused:
        prove_within({"vram": 100}, planner(0), lambda n: {"vram": 200 + n}, refuse)
    assert refused.value.smallest_bytes["vram"] >= 200


def test_a_budget_is_raised_to_what_its_refusals_name() -> None:
    steps = iter([30, 60, 90])

    def search(budget: Mapping[str, int]) -> Mapping[str, int]:
        if budget["vram"] < 90:
            raise too_small(next(step for step in steps if step > budget["vram"]))
        return budget

    assert sufficient(search, {"vram": 10, "ram": 5}, {"vram": 20}) == {"vram": 90, "ram": 5}
    with pytest.raises(BudgetError):  # a refusal that names no more ends the search
        sufficient(planner(50), {}, {"vram": 50 - 1}, raised=lambda needs, refused: None)


@pytest.mark.parametrize(("above", "fitting"), [(0, True), (1, False)])
def test_the_smallest_budget_is_named_unless_its_plan_fits_after_all(above: int, fitting: bool) -> None:
    def search(budget: Mapping[str, int]) -> Mapping[str, int]:
        if budget["vram"] < 120:
            raise too_small(120)
        return {"vram": 100 + above}  # another plan than the refused one

    def answer() -> Mapping[str, int]:
        return plan_or_smallest_budget(search, lambda peaks: peaks, {"vram": 100}, refuse)

    if fitting:
        assert answer() == {"vram": 100}
    else:
        with pytest.raises(BudgetError) as refused:
            answer()
        assert refused.value.smallest_bytes == {"vram": 101}


def test_bytes_over_a_budget() -> None:
    assert over_bytes({"vram": 5, "ram": 7, "disk": 9}, {"vram": 5, "ram": 6}) == {"ram": 1}
    assert fits({"disk": 9}, {"vram": 5}) and not fits({"vram": 6}, {"vram": 5})


def test_a_promise_is_raised_and_never_lowered() -> None:
    promise = Promise(peak_bytes={"vram": 5}, step_s=1.0)
    plan = Plan(model="m", hardware="h", task="generate", budget_bytes={"vram": 4}, decisions=(), promise=promise)
    raised = raise_promise(plan, {"vram": 3, "ram": 2}, {"vram": 9})
    assert (raised.promise.peak_bytes, raised.budget_bytes) == ({"vram": 5, "ram": 2}, {"vram": 9})
    check_promise(raised, {"vram": 6}, {"vram": 1})


def loops() -> Iterator[tuple[str, str]]:
    """Loops of planners that try again: while refused, or a number of times. Loops over alternatives are none."""
    paths = (path.relative_to(SOURCES).as_posix() for room in PLANNERS for path in (SOURCES / room).rglob("*.py"))
    for name in paths:
        if name.startswith(NO_PLANNERS):
            continue
        for loop in ast.walk(ast.parse((SOURCES / name).read_text(encoding="utf-8"))):
            catches = any(
                isinstance(node, ast.ExceptHandler)
                and node.type is not None
                and "BudgetError" in ast.unparse(node.type)
                for node in ast.walk(loop)
            )
            if (isinstance(loop, ast.While) and catches) or (
                isinstance(loop, ast.For) and ast.unparse(loop.target) == "_"
            ):
                yield name, ast.unparse(loop).splitlines()[0]


def test_no_planner_has_a_loop_of_its_own_that_tries_again() -> None:
    assert sorted(loops()) == []
