"""Search the fastest assignments for a training within a budget, time them by their schedules, and prove them.

An assignment is proved by tracing the step with its techniques in force, on fake tensors. Where the bytes differ from
the estimate, the search is repeated with the difference as a correction. The baselines without a planner (all
resident, checkpointing only, all streamed) are candidates too, so nothing slower is ever offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from brim.core import Category, Hardware, Trace
from brim.core.hardware import RAM
from brim.errors import BudgetError, UnsupportedError
from brim.planning.proof import fits, prove, search
from brim.planning.solver import training as solver
from brim.planning.solver.cost_model import held_bytes, moved_bytes, peak_bytes
from brim.planning.solver.schedule import Schedule
from brim.planning.solver.step_profile import KEEP, Assignment, Limits, StepProfile, shape_of
from brim.planning.solver.steps import training_step_s
from brim.planning.solver.training import deepened, measured, profile_of
from brim.planning.strategy.case import TrainingCase, TrainingStrategy
from brim.planning.strategy.choice import TOKENS_AT_ONCE, Choice, as_assignment, as_choice, rank, signature
from brim.planning.strategy.depth import Shallow
from brim.planning.strategy.ladder import too_small
from brim.planning.strategy.prediction import Prediction, TrainingStep
from brim.techniques.base import Option
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.streaming.placement import RESIDENT

_Least = tuple[Limits, dict[str, int], Assignment]  # of the smallest assignment under limits, and the bytes it needs
_PROOFS = 3  # of an assignment: the first, and two corrections
_LEAST_PROOFS = 4  # of the smallest assignment
_MARGIN_BYTES = 1 << 20
_ROOM = 0.02  # of a budget: with less left over the search is not repeated
_UNFILLED = 0.02  # of a budget: where unfilled segments may be more, every layer is traced
_SURELY = 0.9  # of a baseline's estimated bytes: a lower bound on its real ones
# The further search has a limit in operations that proofs trace (0.5 to 1 ms each): a limit in seconds would give
# other plans on a slower or busier computer.
_SEARCH_OPS = 80_000  # for assignments that may be faster
_MORE_OPS = 5_000  # only to make the list longer
_NOTHING = 0.01  # of a budget: smaller gradients and states (adapters') are not worth a technique
_MANY = 12  # candidates that are tried per requested strategy


class TrainingSearch:
    """A training's search, from traces of its plain step over the whole batch and over one row."""

    def __init__(self, case: TrainingCase) -> None:
        self.case, self._step = case, case.step
        self.limits, self.hardware = case.limits, case.step.hardware
        self._shallow = None if case.exact or case.step.inputs is None else Shallow.of(case.step)
        self._known: dict[str, dict[str, int]] = {}  # choice -> peaks without the program's own
        self._rated: dict[str, Prediction] = {}  # choice -> seconds by the machine's rates, if all layers were traced
        self._learned: dict[str, int] = {}  # per tier, the latest proof's bytes beyond the estimate
        self._seconds: dict[tuple[object, ...], float] = {}  # assignment -> seconds of its simulated schedule
        self._sizes: set[int] = set()  # micro-batches with at least one attempted proof
        self._traced_ops = 0  # by all proofs of this search
        self._proof_ops = 0  # by each proof
        self._plain: StepProfile | None = None

    def within(self, budget_bytes: Mapping[str, int]) -> TrainingSearch:
        """Return a search for another budget that shares the traces."""
        if budget_bytes == self.limits.budget_bytes:
            return self
        other = TrainingSearch(replace(self.case, limits=replace(self.limits, budget_bytes=dict(budget_bytes))))
        other._known, other._rated = self._known, self._rated
        other._plain, other._proof_ops = self._plain, self._proof_ops
        return other

    @cached_property
    def profile(self) -> StepProfile:
        """The plain step's profile, over all rows and over one."""
        whole = self._all_rows()
        return replace(whole, row=self._profile(1) if self._step.batch > 1 else None)

    def _all_rows(self) -> StepProfile:
        """Return the plain step's profile over all rows, from its proof if there was one, else from a trace."""
        if self._plain is None:
            self._plain = self._profile(self._step.batch)
        return self._plain

    def _profile(self, batch: int) -> StepProfile:
        step = replace(self._step, batch=batch)
        if self._shallow is None:
            profile, proof_ops = self._profile_of(step)
        else:
            (shallow, few), (deeper, more) = (
                self._profile_of(replace(self._shallow.few(count), batch=batch)) for count in (1, 2)
            )
            trained = _trained_bytes(step.model, step.partition)
            blocks = [
                (b.name, b.bytes, trained[b.name], self._shallow.template(b.name)) for b in step.partition.blocks
            ]
            left = self._shallow.stack.layers - self._shallow.stack.special - 2
            profile = deepened(shallow, deeper, left, blocks)
            # A few layers are traced at three depths, else all of them once.
            proof_ops = 3 * more if self._few_do(self._shallow) else more + left * (more - few)
        return self._complete(profile, proof_ops, batch)

    def _complete(self, profile: StepProfile, proof_ops: int, batch: int) -> StepProfile:
        """Add the program's own bytes and measured seconds to ``profile``."""
        self._proof_ops = proof_ops
        profile = replace(profile, spent_bytes=dict(self._step.spent_bytes()))
        return profile if self.case.clock is None else measured(profile, self.case.clock(batch))

    def _profile_of(self, step: TrainingStep) -> tuple[StepProfile, int]:
        """Trace the plain step; return its profile and its number of operations."""
        trace = step.trace(self._plain_choice(step.batch))
        return self._read(step, trace), len(trace.ops)

    def _plain_choice(self, batch: int) -> Choice:
        return Choice(precision=self.case.precision, micro_batch=batch)

    def _read(self, step: TrainingStep, trace: Trace) -> StepProfile:
        """Return the profile of the plain ``step`` from its ``trace``."""
        model = step.model
        trained = [p for p in model.parameters() if p.requires_grad]
        return profile_of(
            trace,
            step.partition,
            self.hardware,
            batch=step.batch,
            trained_bytes=_trained_bytes(model, step.partition),
            gradient_bytes=sum(tensor_bytes(p) for p in trained),
            state_bytes=_state_bytes(trace) if self.case.state_bytes is None else self.case.state_bytes(trained),
            repeated=[b.name for b in step.partition.blocks if b.name in set(checkpointing.blocks(model))],
            head=(
                _head_option(model, step.batch * self.case.tokens, self.hardware) if self.limits.chunkable else None
            ),
        )

    # -- the search

    def run(self, top: int) -> list[TrainingStrategy]:
        """Return up to ``top`` proved strategies that differ in more than numbers; empty if none fits.

        The fastest is the first; of equal ones, the one that moves the fewest bytes.
        """
        for limits in self._in_turn():
            strategies = self._search(limits, top)
            if strategies:
                return strategies[:top]
        return []

    def _in_turn(self) -> Iterator[Limits]:
        """Yield ``self.limits``; before it, if gradients and states are tiny, limits without offloading them."""
        trained_bytes = self.profile.state_bytes + self.profile.gradient_bytes
        budget = self.limits.budget_bytes.get(self.hardware.compute, 0)
        ordered = {"states", "gradients", "in_backward"} & self.limits.fixed.keys()
        if trained_bytes < _NOTHING * budget and not ordered:
            yield replace(self.limits, states_leave=False, gradients_leave=False, single_pass=False)
        yield self.limits

    def _search(self, limits: Limits, top: int) -> list[TrainingStrategy]:
        """Prove strategies under ``limits``. Corrections from the first proof hold for later ones."""
        self._learned.clear()
        self._sizes.clear()
        self._traced_ops = 0
        strategies: list[TrainingStrategy] = []
        self._add_proved(limits, top, strategies)
        if strategies and self._learned:
            self._add_proved(replace(limits, corrections=dict(self._learned)), top, strategies)
            self._add_other_sizes(limits, strategies)
        return strategies

    def _add_other_sizes(self, limits: Limits, strategies: list[TrainingStrategy]) -> None:
        """Add a strategy of each unproved micro-batch that may be faster: corrections differ between sizes, and may
        be negative."""

        def candidates() -> Iterator[Assignment]:
            for _, assignment, _ in self._in_order(limits):
                if self._traced_ops > _SEARCH_OPS:
                    return
                if assignment.bound_s < strategies[0].step_s and assignment.frame.micro_batch not in self._sizes:
                    yield assignment

        search(candidates(), lambda each: self.prove(each, limits=limits), results=strategies, add=self._add)

    def _add_proved(self, limits: Limits, top: int, strategies: list[TrainingStrategy]) -> None:
        """Add proved strategies; where ``limits`` has no corrections, stop at the first proof that yields some."""
        corrected = False

        def candidates() -> Iterator[tuple[float, Assignment, bool]]:
            for count, (seconds, assignment, simple) in enumerate(self._in_order(limits)):
                faster = not strategies or seconds < strategies[0].step_s
                most_ops = _SEARCH_OPS if faster else _MORE_OPS - self._proof_ops
                if count >= _MANY * top or (strategies and self._traced_ops > most_ops):
                    return
                if len(strategies) >= top and seconds > strategies[top - 1].step_s:
                    return
                if self._is_worth_it(assignment, seconds, strategies, top):
                    yield seconds, assignment, simple
                    if corrected:
                        return

        def attempt(candidate: tuple[float, Assignment, bool]) -> TrainingStrategy | None:
            nonlocal corrected
            _, assignment, simple = candidate
            strategy = self.prove(assignment, corrects=not simple, limits=limits)
            corrected = strategy is not None and bool(self._learned) and not limits.corrections
            return strategy

        search(candidates(), attempt, results=strategies, add=self._add)

    def _is_worth_it(self, new: Assignment, seconds: float, strategies: list[TrainingStrategy], top: int) -> bool:
        """Return True where it may be among the first ``top``."""
        # A candidate that differs in numbers only and is no faster adds nothing to the list.
        no_slower = (_assignment(strategy) for strategy in strategies if strategy.step_s <= seconds)
        alike = any(signature(other) == signature(new) for other in no_slower)
        return not alike and (len(strategies) < top or seconds < strategies[top - 1].step_s)

    def _order(self, strategy: TrainingStrategy) -> tuple[float, float, int]:
        moved = moved_bytes(self.profile, self.hardware, _assignment(strategy))
        return strategy.step_s, moved, sum(strategy.prediction.peak_bytes.values())

    def _add(self, strategies: list[TrainingStrategy], new: TrainingStrategy) -> None:
        """Add ``new`` to ``strategies``, sorted by seconds; keep the best of those that differ in numbers only."""
        alike = [old for old in strategies if signature(_assignment(old)) == signature(_assignment(new))]
        rest = [strategy for strategy in strategies if strategy not in alike]
        best = min([*alike, new], key=self._order)
        strategies[:] = sorted([*rest, best], key=lambda strategy: rank(strategy.step_s, _assignment(strategy)))

    def _in_order(self, limits: Limits) -> Iterator[tuple[float, Assignment, bool]]:
        """Yield seconds, assignment and True for a baseline, sorted by the seconds of the simulated schedules.

        By the program's bound, no later assignment can be faster.
        """
        waiting = [(self.seconds(each), -1 - index, each) for index, each in enumerate(self.baselines(limits))]
        for index, assignment in enumerate(solver.best(self.profile, self.hardware, limits)):
            ready = [entry for entry in waiting if entry[0] <= assignment.bound_s]
            for entry in sorted(ready, key=lambda entry: rank(entry[0], entry[2])):
                waiting.remove(entry)
                yield entry[0], entry[2], entry[1] < 0
            if not any(assignment.same(other) for _, _, other in waiting):
                waiting.append((self.seconds(assignment), index, assignment))
        for seconds, index, assignment in sorted(waiting, key=lambda entry: rank(entry[0], entry[2])):
            yield seconds, assignment, index < 0

    def baselines(self, limits: Limits | None = None) -> list[Assignment]:
        """Return the baselines that may fit."""
        limits = limits or self.limits
        budget = limits.budget_bytes
        return [
            each
            for each in solver.baselines(self.profile, self.hardware, limits)
            if all(_SURELY * count <= budget.get(tier, count) for tier, count in self.estimated_peaks(each).items())
        ]

    def seconds(self, assignment: Assignment) -> float:
        key = (assignment.frame, *assignment.weights.items(), *assignment.activations.items())
        if key not in self._seconds:
            self._seconds[key] = self._timed(assignment)[0]
        return self._seconds[key]

    def _timed(self, assignment: Assignment) -> tuple[float, Schedule]:
        # The profile over one row is not needed where all rows are computed at once.
        profile = self._all_rows() if assignment.frame.micro_batch == self._step.batch else self.profile
        return training_step_s(profile, self.hardware, assignment)

    def estimated_peaks(self, assignment: Assignment) -> dict[str, int]:
        """Estimate peaks per tier from the profile."""
        return peak_bytes(held_bytes(self.profile, self.hardware, assignment))

    # -- proofs

    def prove(
        self, assignment: Assignment, *, corrects: bool = True, limits: Limits | None = None
    ) -> TrainingStrategy | None:
        """Prove ``assignment`` or, with ``corrects``, its corrections by the real peaks; None where nothing fits."""
        limits = limits or self.limits
        self._sizes.add(assignment.frame.micro_batch)

        def fitting(strategies: Sequence[TrainingStrategy]) -> list[TrainingStrategy]:
            return [s for s in strategies if fits(s.prediction.peak_bytes, limits.budget_bytes)]

        def correct(strategies: Sequence[TrainingStrategy]) -> Assignment | None:
            last, fit = strategies[-1], fitting(strategies)
            if fit and (last is not fit[-1] or not self._has_room(last, limits)):
                return None
            self._learned = self._corrections(last)
            corrected = replace(limits, corrections=self._learned)
            again = solver.solve_shape(self.profile, self.hardware, corrected, shape_of(_assignment(last)))
            return None if again is None or again.same(_assignment(last)) else again

        strategies = prove(assignment, self._strategy, correct, most=_PROOFS if corrects else 1)
        return min(fitting(strategies), key=lambda strategy: strategy.step_s, default=None)

    def proved(self, choice: Choice, partition: Partition | None = None) -> TrainingStrategy:
        """Prove ``choice`` unchanged on the blocks of ``partition`` (None: the profiled ones)."""
        return prove(choice, lambda choice: self._strategy_of(choice, partition))[0]

    def _strategy_of(self, choice: Choice, partition: Partition | None) -> TrainingStrategy:
        assignment = self.assignment(choice) if partition is None and self._step.inputs is not None else None
        if assignment is not None:
            return self._strategy(assignment, choice)
        peaks = self._peaks_of(choice, partition)
        return TrainingStrategy(
            choice=choice,
            partition=self._step.partition if partition is None else partition,
            prediction=replace(self._rated[_key(choice, partition)], peak_bytes=peaks),
            spent_bytes=self._spent(choice, partition, peaks),
        )

    def predicted(self, choice: Choice) -> Prediction:
        """Predict the peaks of ``choice``, without seconds."""
        assignment = self.assignment(choice) if self._step.inputs is not None else None
        return Prediction(peak_bytes=self._peaks_of(choice) if assignment is None else self.peaks(assignment, choice))

    def _strategy(self, assignment: Assignment, choice: Choice | None = None) -> TrainingStrategy:
        choice = self.choice(assignment) if choice is None else choice
        peaks = self.peaks(assignment, choice)
        seconds, schedule = self._timed(assignment)
        prediction = Prediction(
            peak_bytes=peaks,
            step_s=seconds,
            bound_s=min(assignment.bound_s or seconds, seconds),
            limited_by=schedule.limited_by(),
        )
        return TrainingStrategy(
            choice=choice,
            partition=self._step.partition,
            prediction=prediction,
            spent_bytes=self._spent(choice, None, peaks),
            assignment=assignment,
            schedule=schedule,
        )

    def _spent(self, choice: Choice, partition: Partition | None, peaks: Mapping[str, int]) -> dict[str, int]:
        """Return the program's own bytes in ``peaks``."""
        own = self._known[_key(choice, partition)]
        return {tier: count - own.get(tier, 0) for tier, count in peaks.items() if count != own.get(tier, 0)}

    def peaks(self, assignment: Assignment, choice: Choice) -> dict[str, int]:
        """Return peaks per tier from traces of the step with ``choice`` in force, the program's own included."""
        key = _key(choice)
        if (
            key not in self._known
            and not choice.in_place
            and self._shallow is not None
            and self._few_do(self._shallow)
        ):
            peaks = self._shallow.predict(choice, assignment, self.profile)
            if peaks is not None:
                self._traced_ops += self._proof_ops
                self._known[key] = peaks
        return self._peaks_of(choice)

    def _peaks_of(self, choice: Choice, partition: Partition | None = None) -> dict[str, int]:
        """Return peaks per tier, from the cache or a trace of every layer."""
        key, step = _key(choice, partition), self._step
        if partition is not None:
            step = replace(step, partition=partition)
        if key not in self._known:
            self._known[key] = self._simulated(key, step, choice)
        return step.in_all(choice, self._known[key])

    def _simulated(self, key: str, step: TrainingStep, choice: Choice) -> dict[str, int]:
        seen = step.simulate(choice)
        self._rated[key] = seen.timed
        self._traced_ops += self._proof_ops
        if (
            self._plain is None
            and self._shallow is None
            and step is self._step
            and choice == self._plain_choice(step.batch)
            and step.inputs is not None
        ):  # the profile is read from the same trace
            self._plain = self._complete(self._read(step, seen.trace), len(seen.trace.ops), step.batch)
        compute = self.hardware.compute
        return {**seen.peak_bytes, compute: seen.peak_bytes[compute] + self.case.aside(choice)}

    def exactly(self, strategy: TrainingStrategy) -> TrainingStrategy:
        """Prove ``strategy`` by a trace of all its layers."""
        key = _key(strategy.choice)
        if key not in self._rated:
            self._known[key] = self._simulated(key, self._step, strategy.choice)
        peaks = self._peaks_of(strategy.choice)
        spent = self._spent(strategy.choice, None, peaks)
        return replace(strategy, prediction=replace(strategy.prediction, peak_bytes=peaks), spent_bytes=spent)

    def _few_do(self, shallow: Shallow) -> bool:
        """Return True where peaks can be extrapolated from a few layers.

        They cannot on a processor, whose heap's gaps do not grow layer by layer, nor where the allowance for the
        allocator's unfilled segments is a notable part of the budget.
        """
        compute = self.hardware.compute
        budget = self.limits.budget_bytes.get(compute, math.inf)
        return compute != RAM and shallow.unfilled_bytes <= _UNFILLED * budget

    def _has_room(self, strategy: TrainingStrategy, limits: Limits) -> bool:
        """Return True where a strategy that offloads or recomputes leaves room to do less of it."""
        assignment = _assignment(strategy)
        plain = (frame := assignment.frame).states == KEEP and set(assignment.weights.values()) == {RESIDENT}
        if plain and set(assignment.activations.values()) == {KEEP} and frame.micro_batch == self.profile.batch:
            return False
        peaks, compute = strategy.prediction.peak_bytes, self.hardware.compute
        budget = limits.budget_bytes.get(compute, peaks[compute])
        return budget - peaks[compute] > _ROOM * budget

    def _corrections(self, strategy: TrainingStrategy) -> dict[str, int]:
        """Return the proof's bytes beyond the estimate, for each tier in use."""
        thought = self.estimated_peaks(_assignment(strategy))
        return {
            tier: count - thought.get(tier, 0) + _MARGIN_BYTES
            for tier, count in strategy.prediction.peak_bytes.items()
            if tier in self.limits.budget_bytes and (count or thought.get(tier))
        }

    def least(self) -> TrainingStrategy:
        """Return the smallest strategy if its proof fits; else raise BudgetError with its bytes."""
        budget = self.limits.budget_bytes

        def smallest(limits: Limits) -> _Least | None:
            least = solver.smallest(self.profile, self.hardware, limits)
            return None if least is None else (limits, least[0], least[1])

        def proof(least: _Least) -> tuple[_Least, TrainingStrategy]:
            return least, self._strategy(least[2])

        def correct(proofs: Sequence[tuple[_Least, TrainingStrategy]]) -> _Least | None:
            (limits, need, _), strategy = proofs[-1]
            if fits(strategy.prediction.peak_bytes, {**budget, **need}):
                return None
            corrections = {t: max(0, n, limits.corrections.get(t, 0)) for t, n in self._corrections(strategy).items()}
            return smallest(replace(limits, corrections=corrections))

        proofs = prove(smallest(self.limits), proof, correct, most=_LEAST_PROOFS)
        if not proofs:
            raise BudgetError(
                "Cannot train within this budget.",
                "No sufficient budget is known.",
                "Reduce --batch, --seq or the model.",
            )
        (_, need, _), strategy = proofs[-1]
        peaks = strategy.prediction.peak_bytes
        if fits(peaks, budget):
            return strategy
        short = {tier: max(peaks.get(tier, 0), count) for tier, count in need.items()}
        raise too_small({**{t: n for t, n in peaks.items() if t not in short}, **short}, budget)

    def choice(self, assignment: Assignment) -> Choice:
        """Convert ``assignment`` to the runtime's form."""
        return as_choice(assignment, self.case.precision, self.hardware.compute)

    def assignment(self, choice: Choice) -> Assignment | None:
        """Convert ``choice`` to the solver's form; None where it has other blocks."""
        return as_assignment(choice, [block.name for block in self._step.partition.blocks])


def _assignment(strategy: TrainingStrategy) -> Assignment:
    assert strategy.assignment is not None, "a search has an assignment"
    return strategy.assignment


def _state_bytes(trace: Trace) -> int:
    """Return the bytes that the optimizer keeps between steps."""
    begin = trace.step_starts[0]
    return sum(s.bytes for s in trace.storages if s.category is Category.OPTIMIZER_STATE and s.born < begin)


def _key(choice: Choice, partition: Partition | None = None) -> str:
    blocks = () if partition is None else tuple(block.name for block in partition.blocks)
    return f"{choice!r} {blocks}"


def _trained_bytes(model: nn.Module, partition: Partition) -> dict[str, int]:
    parameters = dict(model.named_parameters())
    return {
        block.name: sum(tensor_bytes(parameters[n]) for n in block.tensors if parameters[n].requires_grad)
        for block in partition.blocks
    }


def _head_option(model: nn.Module, tokens: int, hardware: Hardware) -> Option | None:
    try:
        layer: Any = model.get_submodule(chunked_loss.find_head(model))
    except UnsupportedError:
        return None
    classes, hidden = layer.weight.shape
    if tokens <= TOKENS_AT_ONCE:
        return None
    return chunked_loss.option(tokens, classes, hidden, hardware, chunk=TOKENS_AT_ONCE, dtype=layer.weight.dtype)
