"""Search and prove plans: try candidates in turn, predict the bytes that each takes, correct by the excess.

Every choice among candidates is the loop of ``search``, every proof with corrections that of ``prove``.
``prove_within`` lowers the budget of the next proposal by the bytes that the last one takes beyond the real budget.
``sufficient`` raises a budget to the bytes that a refusal names, and ``plan_or_smallest_budget`` names such a budget.
``planning.strategy`` and ``planning.meshes`` correct their own estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from brim.core import Plan
from brim.errors import BudgetError, UsageError
from brim.memory.pool import round_up
from brim.units import format_bytes

Bytes = Mapping[str, int]
S = TypeVar("S")
P = TypeVar("P")
_MOST = 8  # proofs of a search by default: each takes up to some seconds
ENDLESS_BYTES = 1 << 60  # a budget that nothing exceeds


def search(
    candidates: Iterable[S],
    attempt: Callable[[S], P | None],
    *,
    results: list[P] | None = None,
    add: Callable[[list[P], P], None] = list.append,
    most: int | None = None,
) -> list[P]:
    """Attempt ``candidates`` in turn, the most promising first, and return the results, at most ``most``.

    ``attempt`` returns None, or raises BudgetError, for a candidate that does not fit. ``candidates`` may read the
    ``results`` so far to end early. ``add`` puts a result among them. Raises the BudgetError with the fewest bytes
    where there are no results.
    """
    results = [] if results is None else results
    refusals: list[BudgetError] = []
    for candidate in candidates:
        try:
            result = attempt(candidate)
        except BudgetError as error:
            refusals.append(error)
            continue
        if result is not None:
            add(results, result)
            if most is not None and len(results) >= most:
                break
    if not results and refusals:
        raise min(refusals, key=lambda error: sum(error.smallest_bytes.values()))
    return results


def prove(
    proposal: S | None,
    proof: Callable[[S], P],
    correct: Callable[[list[P]], S | None] = lambda _: None,
    *,
    most: int | None = _MOST,
) -> list[P]:
    """Prove ``proposal``, then those that ``correct`` makes from the proofs so far, until it returns None.

    Returns all proofs in order, at most ``most`` (None: no limit).
    """
    proofs: list[P] = []
    while proposal is not None and (most is None or len(proofs) < most):
        proofs.append(proof(proposal))
        proposal = correct(proofs)
    return proofs


def prove_within(
    budget_bytes: Bytes,
    attempt: Callable[[Bytes], S],
    takes: Callable[[S], Bytes],
    refuse: Callable[[Bytes], BudgetError],
    *,
    grain_bytes: int = 1,
    margin_bytes: int = 0,
) -> tuple[S, Bytes]:
    """Return the first plan that ``takes`` no more than ``budget_bytes``, and the bytes that it takes.

    ``attempt`` plans within a budget and raises BudgetError where nothing fits. The budget of its next call is
    smaller by the excess of the last plan, in multiples of ``grain_bytes``, plus ``margin_bytes``. At the end
    ``refuse`` makes the BudgetError from the bytes of the last plan.
    """

    def proof(tight: Bytes) -> tuple[Bytes, S, Bytes]:
        try:
            plan = attempt(tight)
        except BudgetError as error:  # its bytes are those within the lowered budget
            for tier in error.smallest_bytes.keys() & tight.keys():
                error.smallest_bytes[tier] += budget_bytes[tier] - tight[tier]
            raise
        return tight, plan, takes(plan)

    def correct(proofs: list[tuple[Bytes, S, Bytes]]) -> Bytes | None:
        tight, _, taken = proofs[-1]
        over = over_bytes(taken, budget_bytes)
        less = {tier: max(0, tight[tier] - round_up(n, grain_bytes) - margin_bytes) for tier, n in over.items()}
        return {**tight, **less} if over else None

    _, plan, taken = prove(budget_bytes, proof, correct)[-1]
    if over_bytes(taken, budget_bytes):
        raise refuse(taken)
    return plan, taken


def sufficient(
    search: Callable[[Bytes], S],
    budget_bytes: Bytes,
    needs: Bytes,
    *,
    raised: Callable[[Bytes, BudgetError], Bytes | None] | None = None,
    most: int = _MOST,
) -> S:
    """Return the result of ``search`` in the budget with ``needs`` for some tiers, raised until it succeeds.

    ``raised`` makes the next needs from the last ones and their refusal (default: the larger of both); None ends the
    search. Raises the last refusal.
    """

    def proof(needs: Bytes) -> tuple[Bytes, S | BudgetError]:
        try:
            return needs, search({**budget_bytes, **needs})
        except BudgetError as error:
            return needs, error

    def correct(proofs: list[tuple[Bytes, S | BudgetError]]) -> Bytes | None:
        needs, result = proofs[-1]
        return (raised or _larger)(needs, result) if isinstance(result, BudgetError) else None

    _, result = prove(needs, proof, correct, most=most)[-1]
    if isinstance(result, BudgetError):
        raise result
    return result


def _larger(needs: Bytes, refusal: BudgetError) -> Bytes | None:
    larger = {tier: max(needs.get(tier, 0), count) for tier, count in refusal.smallest_bytes.items()}
    return None if larger.items() <= needs.items() else {**needs, **larger}


def plan_or_smallest_budget(
    search: Callable[[Bytes], S],
    peak_bytes: Callable[[S], Bytes],
    budget_bytes: Bytes,
    refuse: Callable[[Bytes], BudgetError],
) -> S:
    """Return the result of ``search`` within ``budget_bytes``, or raise the error that ``refuse`` makes.

    ``refuse`` gets the peaks of a plan in the smallest budget that suffices, of the tiers that are short: a larger
    budget has other plans than the refused one. Such a plan may fit ``budget_bytes``, and is returned then.
    """
    try:
        return search(budget_bytes)
    except BudgetError as error:
        if not error.smallest_bytes:
            raise
        result = sufficient(search, budget_bytes, error.smallest_bytes)
        peaks = peak_bytes(result)
        short = {tier: peaks[tier] for tier in over_bytes(peaks, budget_bytes)}
        if short:
            raise refuse(short) from error
        return result


def largest_fitting(most: int, step: int, attempt: Callable[[int], S]) -> S:
    """Return the result of ``attempt`` for the largest number up to ``most`` that fits, by bisection to ``step``.

    Raises the BudgetError of the smallest number where none fits.
    """
    try:
        return attempt(most)
    except BudgetError:
        if most == 1:
            raise
    fitting = min(step, most - 1)
    best, refused = attempt(fitting), most
    while refused - fitting > step:
        middle = (fitting + refused) // 2
        try:
            fitting, best = middle, attempt(middle)
        except BudgetError:
            refused = middle
    return best


def over_bytes(peak_bytes: Bytes, budget_bytes: Bytes) -> dict[str, int]:
    """Return the bytes beyond the budget, of the tiers that have one and exceed it."""
    return {t: n - budget_bytes[t] for t, n in peak_bytes.items() if n > budget_bytes.get(t, n)}


def fits(peak_bytes: Bytes, budget_bytes: Bytes) -> bool:
    return not over_bytes(peak_bytes, budget_bytes)


def raise_promise(plan: Plan, peak_bytes: Bytes, budget_bytes: Bytes) -> Plan:
    """Raise the plan's promise to ``peak_bytes``, under ``budget_bytes``."""
    promised = plan.promise.peak_bytes
    peaks = {**promised, **{tier: max(count, promised.get(tier, 0)) for tier, count in peak_bytes.items()}}
    return replace(plan, promise=replace(plan.promise, peak_bytes=peaks), budget_bytes=dict(budget_bytes))


def check_promise(plan: Plan, takes: Bytes, spent_bytes: Bytes) -> None:
    """Raise UsageError for a given plan that promises less of a tier than its own decisions take.

    ``spent_bytes`` of ``takes`` are the program's own and do not count: the planning program may have had fewer.
    """
    least = {tier: count - spent_bytes.get(tier, 0) for tier, count in takes.items()}
    promised = plan.promise.peak_bytes
    broken = {tier: count for tier, count in least.items() if count > promised.get(tier, 0)}
    if broken:
        raise UsageError(
            f"Cannot use the plan for {plan.model}.",
            f"It promises {in_words({tier: promised.get(tier, 0) for tier in broken})}; "
            f"its decisions take {in_words(broken)} or more.",
            "Make a new one: brim plan MODEL ... --output FILE.",
        )


def in_words(amounts: Bytes) -> str:
    return ", ".join(f"{format_bytes(count)} of {tier.upper()}" for tier, count in amounts.items())


def refusal(name: str, budget_bytes: Bytes) -> Callable[[Bytes], BudgetError]:
    """Return ``refuse`` of ``prove_within`` for a model: it names the bytes of the last plan."""

    def refuse(taken: Bytes) -> BudgetError:
        return BudgetError(
            f"Cannot run {name} in {in_words(budget_bytes)}.",
            f"{_MOST} plans were tried; the last takes {in_words(taken)}.",
            f"Give {in_words(taken)} or more.",
            smallest_bytes={tier: taken[tier] for tier in over_bytes(taken, budget_bytes)},
        )

    return refuse
