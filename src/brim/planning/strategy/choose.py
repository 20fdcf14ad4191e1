"""Choose a training strategy, for ``brim plan``, ``brim train``, ``brim.fit`` and ``brim run``.

No plan is faster than keeping everything in memory. Where that does not fit, ``TrainingSearch`` runs; else the first
fallback level that fits is used, and below the last level weights are streamed in the finest blocks. All strategies
are proved by the same traces and timed by the same schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter

from torch import nn

from brim.core import Plan
from brim.errors import BudgetError, UnsupportedError
from brim.planning import proof
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.proof import Bytes, fits, plan_or_smallest_budget, prove_within
from brim.planning.solver.step_profile import FULL, FULL_OFFLOAD, KEEP, OFFLOAD, Assignment, Limits
from brim.planning.strategy.case import TrainingCase, TrainingStrategy
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.ladder import Orders, Subject, climb_down, is_small, ladder, no_smaller, too_small
from brim.planning.strategy.prediction import TrainingStep
from brim.planning.strategy.search import TrainingSearch
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.streaming.weight_streaming import NAME as STREAMING

_WORTH_IT = 0.02  # a level is preferred to a plan that is faster by less than this share
_MARGIN_BYTES = 1 << 20


def search_training(search: TrainingSearch, *, top: int = 1, start: int = 0) -> list[TrainingStrategy]:
    """Return up to ``top`` of the fastest proved strategies, the best first.

    With ``start`` > 0, the number of fallback levels that failed, it is the first later level that fits. Raises
    BudgetError, with the smallest sufficient bytes where they are known, when nothing fits.
    """
    case, best = search.case, None
    if start <= 0:
        best = _unplanned(search, _rungs(case, in_place=False))
        if best is not None and (top == 1 or not _is_searchable(case)):
            return [best]
    # In-place activations are no help where not even the weights fit.
    room = search.limits.budget_bytes[search.hardware.compute] >= case.step.partition.bytes
    rungs = _rungs(case, in_place=room and case.step.inputs is not None and case.in_place())
    if start <= 0:
        if best is None and rungs[0] != rungs[min(1, len(rungs) - 1)] == replace(rungs[0], in_place=True):
            best = _unplanned(search, rungs, 1)
        looks = _searches(case) if best is None else top > 1
        strategies = _planned(search, rungs, top) if looks and _is_searchable(case) else []
        if best is not None:
            return [best, *(strategy for strategy in strategies if strategy.choice != best.choice)][:top]
        if strategies:
            return strategies
    return [_by_levels(search, rungs, max(0, start))]


def follow(search: TrainingSearch, plan: Plan, partition: Partition) -> TrainingStrategy:
    """Prove the choice of ``plan`` on ``partition`` for the present budget, and keep the seconds that it promised.
    Raises BudgetError where it does not fit."""
    strategy = search.proved(Choice.of(plan), partition)
    if not _fits(search, strategy):
        raise too_small(strategy.prediction.peak_bytes, search.limits.budget_bytes)
    told = plan.promise
    promised = replace(strategy.prediction, step_s=told.step_s, bound_s=told.bound_s, limited_by=told.limited_by)
    return replace(strategy, prediction=promised, planned=True)


def within(orders: Orders, limits: Limits) -> Limits:
    """Narrow ``limits`` to the choices that the user's ``orders`` leave."""
    fixed, activations, streams = dict(limits.fixed), limits.activations, limits.streams
    for name, order in vars(orders).items():
        match name:
            case _ if order is None or name == "precision":  # that is the case's own
                continue
            case "micro_batch":
                fixed[name] = order
            case "offload_optimizer":
                fixed |= {"states": order, **({"gradients": KEEP} if order == KEEP else {})}
            case "checkpointing":
                activations = (KEEP, OFFLOAD) if order == "none" else (order, *([FULL_OFFLOAD] * (order == FULL)))
            case "offload_activations":  # only fallback levels can be held to a number of blocks above 0
                activations = tuple(
                    choice for choice in activations if order or choice not in (OFFLOAD, FULL_OFFLOAD)
                )
            case "stream_weights":
                streams = streams and order
            case _:
                raise NotImplementedError(f"No search can be held to {name}.")
    return replace(limits, fixed=fixed, activations=activations, streams=streams)


def loop_case(
    step: TrainingStep,
    *,
    budget_bytes: Mapping[str, int],
    orders: Orders,
    in_place: Callable[[], bool],
    precision: str = "fp32",
    states_leave: bool,
    aside: Callable[[Choice], int] = lambda choice: 0,
    finer: bool = False,
    exact: bool = False,
) -> TrainingCase:
    """Return the case of a training loop of the user's: its calls are not changed, and gradients of several steps
    may exist while states pass through their buffer."""
    limits = Limits(
        budget_bytes=dict(budget_bytes),
        single_pass=False,
        chunkable=False,
        gradients_leave=states_leave and precision != "fp16-mixed",
        states_leave=states_leave,
        streams=False,
    )
    return TrainingCase(
        step=step,
        precision=precision,
        limits=within(orders, limits),
        tokens=0,
        orders=orders,
        in_place=in_place,
        aside=aside,
        finer=finer,
        exact=exact,
        brief=False,
    )


def _is_searchable(case: TrainingCase) -> bool:
    """Return True where a search can obey the orders, and a step can be traced."""
    # A search cannot be held to a number of offloaded blocks.
    return case.step.inputs is not None and not case.orders.offload_activations


def _searches(case: TrainingCase) -> bool:
    """Return True where a search precedes the levels: a small step is over before a search is."""
    return _is_searchable(case) and not is_small(case.step.model)


def _rungs(case: TrainingCase, *, in_place: bool) -> list[Choice]:
    step, limits = case.step, case.limits
    subject = Subject(
        compute=step.hardware.compute,
        batch=step.batch,
        blocks=[] if step.inputs is None else checkpointing.blocks(step.model),
        in_place=in_place,
        chunkable=limits.chunkable and _chunkable(step.model),
        single_pass=limits.single_pass,
        gradients_leave=limits.gradients_leave,
        states_leave=limits.states_leave,
    )
    rungs = ladder(subject, replace(case.orders, precision=case.precision))
    return [rung for rung in rungs if case.brief or not rung.brief_buffer]


def _unplanned(search: TrainingSearch, rungs: list[Choice], rung: int = 0) -> TrainingStrategy | None:
    """Prove a level without the planner; None where it does not fit."""

    def attempt(rung: int) -> TrainingStrategy | None:
        if not fits(_floor_bytes(search, rungs[rung]), search.limits.budget_bytes):
            return None
        strategy = replace(search.proved(rungs[rung]), rung=rung)
        return strategy if _fits(search, strategy) else None

    return next(iter(proof.search([rung], attempt)), None)


def _planned(search: TrainingSearch, rungs: list[Choice], top: int) -> list[TrainingStrategy]:
    """Return the strategies that the search proves, preceded by a level that is as fast as the first of them."""
    try:
        strategies = search.run(top)
    except UnsupportedError:  # the optimizer's states cannot be offloaded
        return []
    if strategies and search.case.proves_all:
        best = search.exactly(strategies[0])
        if not fits(best.prediction.peak_bytes, search.limits.budget_bytes):
            return []
        strategies = [best, *strategies[1:]]
    if not strategies:
        return []
    strategies = [replace(strategy, rung=_place(search, rungs, strategy), planned=True) for strategy in strategies]
    if any(rung.in_place for rung in rungs):  # the search has no in-place activations
        level = _level(search, rungs, 0)
        if level is not None and strategies[0].step_s > level.step_s * (1 - _WORTH_IT):
            return [level, *strategies][:top]
    return strategies


def _place(search: TrainingSearch, rungs: list[Choice], strategy: TrainingStrategy) -> int:
    """Return the first level whose estimate needs no more of the compute tier than ``strategy``; else the last."""
    compute = search.hardware.compute

    def compute_bytes(assignment: Assignment | None) -> int:
        return 0 if assignment is None else search.estimated_peaks(assignment).get(compute, 0)

    most = compute_bytes(strategy.assignment)
    assignments = ((rung, search.assignment(choice)) for rung, choice in enumerate(rungs))
    return next(
        (rung for rung, each in assignments if each is not None and compute_bytes(each) <= most), len(rungs) - 1
    )


def _level(search: TrainingSearch, rungs: list[Choice], start: int) -> TrainingStrategy | None:
    """Return the first level from ``start`` on that fits."""
    nearest = _nearest(search, rungs, start)
    return nearest if nearest.rung >= start and _fits(search, nearest) else None


def _nearest(search: TrainingSearch, rungs: list[Choice], start: int) -> TrainingStrategy:
    """Return the first level from ``start`` on that fits, or the one that comes nearest."""
    case = search.case
    rung, choice, _ = climb_down(
        rungs,
        search.predicted,
        search.limits.budget_bytes,
        compute=search.hardware.compute,
        batch=case.step.batch,
        order=case.orders,
        start=start,
        floor=lambda choice: _floor_bytes(search, choice),
        one_by_one=is_small(case.step.model),
    )
    return replace(search.proved(choice), rung=rung)


def _by_levels(search: TrainingSearch, rungs: list[Choice], start: int) -> TrainingStrategy:
    """Return the first fallback level from ``start`` on that fits, or weight streaming below the last of them."""
    case, budget = search.case, search.limits.budget_bytes
    if start > len(rungs):  # weight streaming, below the last of them, was in force
        raise no_smaller()
    nearest = _nearest(search, rungs, start)
    if nearest.rung >= start and _fits(search, nearest):
        return nearest
    if not start and not case.finer and _searches(case):
        return _least(search, rungs)
    if case.finer:
        return stream_weights(search, nearest, len(rungs))
    if not start and _is_searchable(case):
        return search.least()
    raise no_smaller() if _fits(search, nearest) else too_small(nearest.prediction.peak_bytes, budget)


def _least(search: TrainingSearch, rungs: list[Choice]) -> TrainingStrategy:
    """Return the smallest strategy of the search, or the last level. Raises BudgetError where neither fits."""
    try:
        return search.least()
    except BudgetError:
        last = None
        if fits(_floor_bytes(search, rungs[-1]), search.limits.budget_bytes):
            last = _level(search, rungs, len(rungs) - 1)
        if last is None:
            raise
        return last


def stream_weights(search: TrainingSearch, base: TrainingStrategy, rung: int = -1) -> TrainingStrategy:
    """Add weight streaming to ``base``, and tighten it until it is proved to fit. Raises BudgetError."""
    case, hardware, budget = search.case, search.hardware, search.limits.budget_bytes
    step, compute, choice = case.step, hardware.compute, base.choice
    spent = step.spent_bytes()
    activation_bytes = base.prediction.peak_bytes[compute] - spent.get(compute, 0) - step.partition.bytes
    need = Need(
        step_bytes=max(0, activation_bytes),
        tokens=max(1, 3 * choice.micro_batch * case.tokens),  # backward multiplies twice
        stay=case.stay,
        spent_bytes=spent,
    )

    def attempt(tight: Bytes) -> TrainingStrategy:
        partition, plan = make_plan(step.model, hardware, tight, need, step.weights, task="train")
        streamed = replace(choice, streaming=plan.choices(STREAMING), streaming_settings=plan.settings)
        return search.proved(streamed, partition)

    takes: Callable[[TrainingStrategy], Bytes] = attrgetter("prediction.peak_bytes")
    refuse = partial(too_small, budget_bytes=budget)

    def search_in(budget_bytes: Bytes) -> TrainingStrategy:
        margin = min(_MARGIN_BYTES, budget_bytes[compute] // 64)
        return prove_within(budget_bytes, attempt, takes, refuse, margin_bytes=margin)[0]

    return replace(plan_or_smallest_budget(search_in, takes, budget, refuse), rung=rung)


def _fits(search: TrainingSearch, strategy: TrainingStrategy) -> bool:
    return fits(strategy.prediction.peak_bytes, search.limits.budget_bytes)


def _floor_bytes(search: TrainingSearch, choice: Choice) -> Mapping[str, int]:
    """Return the bytes of weights, gradients and states that always stay in the compute tier."""
    case = search.case
    trained = [p for p in case.step.model.parameters() if p.requires_grad]
    floor_bytes = case.step.partition.bytes
    if not choice.in_backward and choice.gradients == KEEP:
        floor_bytes += sum(map(tensor_bytes, trained))
    if choice.states == KEEP and case.state_bytes is not None:
        floor_bytes += case.state_bytes(trained)
    return {search.hardware.compute: floor_bytes}


def _chunkable(model: nn.Module) -> bool:
    try:
        chunked_loss.find_head(model)
    except UnsupportedError:
        return False
    return True
