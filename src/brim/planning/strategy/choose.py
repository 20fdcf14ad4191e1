"""How a training is chosen, whoever asks: ``brim plan``, ``brim train``, ``brim.fit`` and ``brim run``.

What is all in memory is not made faster by any plan. Where that does not fit, the planner searches and the fallback
levels are what else there is; below the last of them weights are streamed in blocks as fine as they can be cut. All
of it is proved by the same traces and timed by the same schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import nn

from brim.core import Plan
from brim.errors import BudgetError, UnsupportedError
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.solver.step_profile import KEEP, OFFLOAD, Limits, Way
from brim.planning.strategy.case import Case, TrainingStrategy
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.ladder import Orders, Subject, climb_down, fits, is_small, ladder, no_smaller, too_small
from brim.planning.strategy.prediction import Rehearsal
from brim.planning.strategy.search import Planner
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.streaming.weight_streaming import NAME as STREAMING

_PROOFS = 4  # how often a streaming plan is tightened before it is given up
_WORTH_IT = 0.02  # a plan that is predicted to be faster by less is not worth being another one than a level
_MARGIN_BYTES = 1 << 20


def search_training(planner: Planner, *, top: int = 1, start: int = 0) -> list[TrainingStrategy]:
    """The fastest proved ways to do the planner's training, the best first: ``top`` of them at most.

    With ``start``, a number of fallback levels that failed, it is the first of the others that fits. Raises
    BudgetError, with the smallest bytes that do where they are known, when nothing fits.
    """
    case, best = planner.case, None
    if start <= 0:
        best = _whole(planner, _rungs(case, in_place=False)[0])
        if best is not None and (top == 1 or not _is_searchable(case)):
            return [best]
    # Where not even the weights have room, what is left of activations is not looked at.
    room = planner.limits.budget_bytes[planner.hardware.compute] >= case.rehearsal.partition.bytes
    rungs = _rungs(case, in_place=room and case.rehearsal.inputs is not None and case.in_place())
    if start <= 0:
        if best is None and rungs[0] != rungs[min(1, len(rungs) - 1)] == replace(rungs[0], in_place=True):
            best = _whole(planner, rungs[1], 1)
        looks = _searches(case) if best is None else top > 1
        strategies = _planned(planner, rungs, top) if looks and _is_searchable(case) else []
        if best is not None:
            return [best, *(strategy for strategy in strategies if strategy.choice != best.choice)][:top]
        if strategies:
            return strategies
    return [_by_levels(planner, rungs, max(0, start))]


def follow(planner: Planner, plan: Plan, partition: Partition) -> TrainingStrategy:
    """What ``plan`` decided about the blocks of ``partition``, proved for the budget that there is now; its seconds
    are those that the plan promised. Raises BudgetError where it does not fit."""
    strategy = planner.proved(Choice.of(plan), partition)
    if not _fits(planner, strategy):
        raise too_small(strategy.prediction.peak_bytes, planner.limits.budget_bytes)
    told = plan.promise
    promised = replace(strategy.prediction, step_s=told.step_s, bound_s=told.bound_s, limited_by=told.limited_by)
    return replace(strategy, prediction=promised, planned=True)


def within(orders: Orders, limits: Limits) -> Limits:
    """What of ``limits`` the ``orders`` leave to a search."""
    fixed: dict[str, object] = dict(limits.fixed)
    if orders.micro_batch is not None:
        fixed["micro_batch"] = orders.micro_batch
    if orders.offload_optimizer is not None:
        fixed["states"] = orders.offload_optimizer
        if orders.offload_optimizer == KEEP:
            fixed["gradients"] = KEEP
    kept = {None: limits.activations, "none": (KEEP, OFFLOAD)}
    activations = kept.get(orders.checkpointing, (str(orders.checkpointing),))
    if orders.offload_activations == 0:
        activations = tuple(choice for choice in activations if choice != OFFLOAD)
    streams = limits.streams and orders.stream_weights is not False
    return replace(limits, fixed=fixed, activations=activations, streams=streams)


def loop_case(
    rehearsal: Rehearsal,
    *,
    budget_bytes: Mapping[str, int],
    orders: Orders,
    in_place: Callable[[], bool],
    precision: str = "fp32",
    states_leave: bool = True,
    aside: Callable[[Choice], int] = lambda choice: 0,
    finer: bool = False,
    exact: bool = False,
) -> Case:
    """A training by a loop that is not brim's own: nothing is done that changes what it calls, and gradients of more
    than one step may be there while states pass through."""
    limits = Limits(
        budget_bytes=dict(budget_bytes),
        single_pass=False,
        chunkable=False,
        gradients_leave=states_leave and precision != "fp16-mixed",
        states_leave=states_leave,
        streams=False,
    )
    return Case(
        rehearsal=rehearsal,
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


def _is_searchable(case: Case) -> bool:
    """Whether a search can keep to the orders, and knows what a step does."""
    # A number of blocks is no choice for each of them.
    return case.rehearsal.inputs is not None and not case.orders.offload_activations


def _searches(case: Case) -> bool:
    """Whether there is a search before the levels: a small step is over before a plan is made."""
    return _is_searchable(case) and not is_small(case.rehearsal.model)


def _rungs(case: Case, *, in_place: bool) -> list[Choice]:
    rehearsal, limits = case.rehearsal, case.limits
    subject = Subject(
        compute=rehearsal.hardware.compute,
        batch=rehearsal.batch,
        blocks=[] if rehearsal.inputs is None else checkpointing.blocks(rehearsal.model),
        in_place=in_place,
        chunkable=limits.chunkable and _chunkable(rehearsal.model),
        single_pass=limits.single_pass,
        gradients_leave=limits.gradients_leave,
        states_leave=limits.states_leave,
    )
    rungs = ladder(subject, replace(case.orders, precision=case.precision))
    return [rung for rung in rungs if case.brief or not rung.brief_buffer]


def _whole(planner: Planner, choice: Choice, rung: int = 0) -> TrainingStrategy | None:
    """``choice``, which has all in memory or all that was ordered, where it fits and keeps what memory it frees."""
    if not fits(_floor_bytes(planner, choice), planner.limits.budget_bytes):
        return None
    strategy = replace(planner.proved(choice), rung=rung)
    return strategy if _fits(planner, strategy) and not strategy.heap_s else None


def _planned(planner: Planner, rungs: list[Choice], top: int) -> list[TrainingStrategy]:
    """What the planner finds; a level in place of its first where that is as fast."""
    try:
        strategies = planner.search(top)
    except UnsupportedError:  # states of such an optimizer stay where they are
        return []
    if strategies and planner.case.proves_all:
        best = planner.exactly(strategies[0])
        if not fits(best.prediction.peak_bytes, planner.limits.budget_bytes):
            return []
        strategies = [best, *strategies[1:]]
    if not strategies:
        return []
    strategies = [replace(strategy, rung=_place(planner, rungs, strategy), planned=True) for strategy in strategies]
    if any(rung.in_place for rung in rungs):  # which no search looks at
        level = _level(planner, rungs, 0)
        if level is not None and strategies[0].step_s > level.step_s * (1 - _WORTH_IT):
            return [level, *strategies][:top]
    return strategies


def _place(planner: Planner, rungs: list[Choice], strategy: TrainingStrategy) -> int:
    """The number of the first level that takes no more of the compute tier than ``strategy``, as far as is known
    without a trace; of the last if none does."""
    compute = planner.hardware.compute

    def held(way: Way | None) -> int:
        return 0 if way is None else planner.held(way).get(compute, 0)

    most = held(strategy.way)
    ways = ((rung, planner.way(choice)) for rung, choice in enumerate(rungs))
    return next((rung for rung, way in ways if way is not None and held(way) <= most), len(rungs) - 1)


def _level(planner: Planner, rungs: list[Choice], start: int) -> TrainingStrategy | None:
    """The first level from ``start`` on that fits."""
    nearest = _nearest(planner, rungs, start)
    return nearest if nearest.rung >= start and _fits(planner, nearest) else None


def _nearest(planner: Planner, rungs: list[Choice], start: int) -> TrainingStrategy:
    """As ``_level``; if none fits, the level that comes nearest."""
    case = planner.case
    rung, choice, _ = climb_down(
        rungs,
        planner.predicted,
        planner.limits.budget_bytes,
        compute=planner.hardware.compute,
        batch=case.rehearsal.batch,
        order=case.orders,
        start=start,
        floor=lambda choice: _floor_bytes(planner, choice),
        one_by_one=is_small(case.rehearsal.model),
    )
    return replace(planner.proved(choice), rung=rung)


def _by_levels(planner: Planner, rungs: list[Choice], start: int) -> TrainingStrategy:
    """The first fallback level from ``start`` on that fits, or weights streamed below the last of them."""
    case, budget = planner.case, planner.limits.budget_bytes
    if start > len(rungs):  # weight streaming, below the last of them, was in force
        raise no_smaller()
    if not start and not case.finer and _searches(case):
        return _least(planner, rungs)
    nearest = _nearest(planner, rungs, start)
    if nearest.rung >= start and _fits(planner, nearest):
        return nearest
    if case.finer:
        return _streamed(planner, nearest, len(rungs))
    if not start and _is_searchable(case):
        return planner.least()
    raise no_smaller() if _fits(planner, nearest) else too_small(nearest.prediction.peak_bytes, budget)


def _least(planner: Planner, rungs: list[Choice]) -> TrainingStrategy:
    """What takes least, of what a search looks at and of the last level. Raises BudgetError."""
    try:
        return planner.least()
    except BudgetError:
        last = None
        if fits(_floor_bytes(planner, rungs[-1]), planner.limits.budget_bytes):
            last = _level(planner, rungs, len(rungs) - 1)
        if last is None:
            raise
        return last


def _streamed(planner: Planner, base: TrainingStrategy, rung: int) -> TrainingStrategy:
    """Weight streaming on top of ``base``: planned, predicted, and tightened until it is proved to fit."""
    case, hardware, budget = planner.case, planner.hardware, planner.limits.budget_bytes
    rehearsal, compute, choice = case.rehearsal, hardware.compute, base.choice
    spent = rehearsal.spent_bytes()
    activation_bytes = base.prediction.peak_bytes[compute] - spent.get(compute, 0) - rehearsal.partition.bytes
    step_bytes, margin = max(0, activation_bytes), min(_MARGIN_BYTES, budget[compute] // 64)
    for _ in range(_PROOFS):
        need = Need(
            step_bytes=step_bytes,
            tokens=max(1, 3 * choice.micro_batch * case.tokens),  # backward multiplies twice
            stay=case.stay,
            spent_bytes=spent,
        )
        partition, plan = make_plan(rehearsal.model, hardware, budget, need, rehearsal.weights, task="train")
        streamed = replace(choice, streaming=plan.choices(STREAMING), streaming_settings=plan.settings)
        strategy = planner.proved(streamed, partition)
        peaks = strategy.prediction.peak_bytes
        if fits(peaks, budget):
            return replace(strategy, rung=rung)
        # Never less: where another tier is full, room that is left here would only be filled with weights.
        step_bytes += max(0, peaks[compute] - budget[compute]) + margin
    raise too_small(peaks, budget)


def _fits(planner: Planner, strategy: TrainingStrategy) -> bool:
    return fits(strategy.prediction.peak_bytes, planner.limits.budget_bytes)


def _floor_bytes(planner: Planner, choice: Choice) -> Mapping[str, int]:
    """Weights, gradients and optimizer states that a choice keeps for good in the compute tier."""
    case = planner.case
    trained = [p for p in case.rehearsal.model.parameters() if p.requires_grad]
    floor_bytes = case.rehearsal.partition.bytes
    if not choice.in_backward and choice.gradients == KEEP:
        floor_bytes += _bytes(trained)
    if choice.states == KEEP and case.state_bytes is not None:
        floor_bytes += case.state_bytes(trained)
    return {planner.hardware.compute: floor_bytes}


def _bytes(tensors: Iterable[nn.Parameter]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)


def _chunkable(model: nn.Module) -> bool:
    try:
        chunked_loss.find_head(model)
    except UnsupportedError:
        return False
    return True


__all__ = ["follow", "loop_case", "search_training", "within"]
