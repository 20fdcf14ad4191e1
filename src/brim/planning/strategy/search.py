"""The fastest ways to train a model within a budget: searched, timed by their schedules, and proved.

A way is proved by tracing the step with the very techniques in force, on fake tensors. Where that takes other bytes
than the search thought, the search is made again with what was found. What one would do without a planner (all
resident, checkpointing only, all streamed) is a candidate like any other, so nothing slower is ever offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from brim.core import Category, Trace
from brim.core.hardware import RAM
from brim.errors import BudgetError
from brim.memory.heap import most_in_use_bytes
from brim.planning.seconds.fresh_memory import given_back
from brim.planning.solver import training as ways
from brim.planning.solver.cost_model import held_bytes, moved_bytes, peak_bytes
from brim.planning.solver.profile import deepened, measured, profile_of
from brim.planning.solver.schedule import Schedule
from brim.planning.solver.step_profile import KEEP, Limits, StepProfile, Way, shape_of
from brim.planning.solver.steps import contention_of, training_step_s
from brim.planning.solver.tie_break import Weighed, as_fast_s, quietest
from brim.planning.strategy.case import Case, TrainingStrategy
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.depth import Shallow
from brim.planning.strategy.ladder import fits, too_small
from brim.planning.strategy.prediction import Prediction, Rehearsal
from brim.planning.strategy.ways import as_choice, as_way, head_option, rank, signature, trained_bytes
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.streaming.placement import RESIDENT

_PROOFS = 3  # of one way: as it was found, corrected, and corrected once more
_LEAST_PROOFS = 4  # of the way that takes least
_MARGIN_BYTES = 1 << 20
_ROOM = 0.02  # of a budget: less left over is no reason to search again
_UNFILLED = 0.02  # of a budget: more that may be added for nothing is a reason to rehearse every layer
_SURELY = 0.9  # of what the profile says of a simple way: what it takes at least
# What is looked at once there is a way, as operations that proofs trace (one takes 0.5 to 1 ms): a limit in seconds
# would give other plans on a slower or busier computer.
_SEARCH_OPS = 80_000  # for ways that may be faster
_MORE_OPS = 5_000  # only to make the list longer
_NOTHING = 0.01  # of a budget: gradients and states that are less (adapters') are not worth a technique
_MANY = 12  # ways that are tried for each that is asked for


class Planner:
    """One training, its step traced without any technique over the whole batch and over one row."""

    def __init__(self, case: Case) -> None:
        self.case, self._rehearsal = case, case.rehearsal
        self.limits, self.hardware = case.limits, case.rehearsal.hardware
        self._shallow = None if case.exact or case.rehearsal.inputs is None else Shallow.of(case.rehearsal)
        self._known: dict[str, dict[str, int]] = {}  # choice -> peaks without the program's own
        self._rated: dict[
            str, Prediction
        ] = {}  # choice -> seconds by the machine's rates, where every layer was traced
        self._fresh: dict[str, int] = {}  # choice -> bytes that a step asks for anew, where that is known
        self._learned: dict[str, int] = {}  # per tier, what the latest proof found beyond the profile
        self._seconds: dict[tuple[object, ...], float] = {}  # of ways whose schedules were simulated
        self._simple_s = math.inf  # of the fastest simple way
        self._sizes: set[int] = set()  # of micro-batches with at least one attempted proof
        self._traced_ops = 0  # by the proofs of this search
        self._proof_ops = 0  # that a proof traces
        self._plain: StepProfile | None = None

    def within(self, budget_bytes: Mapping[str, int]) -> Planner:
        """The same for another budget, with what was traced already."""
        if budget_bytes == self.limits.budget_bytes:
            return self
        other = Planner(replace(self.case, limits=replace(self.limits, budget_bytes=dict(budget_bytes))))
        other._known, other._rated, other._fresh = self._known, self._rated, self._fresh
        other._plain, other._proof_ops = self._plain, self._proof_ops
        return other

    @cached_property
    def profile(self) -> StepProfile:
        """Of the plain step, over all rows and over one."""
        whole = self._whole()
        return replace(whole, row=self._profile(1) if self._rehearsal.batch > 1 else None)

    def _whole(self) -> StepProfile:
        """Of the plain step over all rows, the one that a proof of it leaves, or one that is made for it."""
        if self._plain is None:
            self._plain = self._profile(self._rehearsal.batch)
        return self._plain

    def _profile(self, batch: int) -> StepProfile:
        rehearsal = replace(self._rehearsal, batch=batch)
        if self._shallow is None:
            profile, proof_ops = self._profile_of(rehearsal)
        else:
            (shallow, few), (deeper, more) = (
                self._profile_of(replace(self._shallow.few(count), batch=batch)) for count in (1, 2)
            )
            trained = trained_bytes(rehearsal.model, rehearsal.partition)
            blocks = [
                (b.name, b.bytes, trained[b.name], self._shallow.template(b.name)) for b in rehearsal.partition.blocks
            ]
            left = self._shallow.stack.layers - self._shallow.stack.special - 2
            profile = deepened(shallow, deeper, left, blocks)
            # A few layers are traced at three depths, else all of them once.
            proof_ops = 3 * more if self._few_do(self._shallow) else more + left * (more - few)
        return self._complete(profile, proof_ops, batch)

    def _complete(self, profile: StepProfile, proof_ops: int, batch: int) -> StepProfile:
        """``profile`` with what is known beside a trace."""
        self._proof_ops = proof_ops
        profile = replace(profile, spent_bytes=dict(self._rehearsal.spent_bytes()))
        return profile if self.case.clock is None else measured(profile, self.case.clock(batch))

    def _profile_of(self, rehearsal: Rehearsal) -> tuple[StepProfile, int]:
        """The plain step's profile, and how many operations were traced for it."""
        trace = rehearsal.trace(self._plain_choice(rehearsal.batch))
        return self._read(rehearsal, trace), len(trace.ops)

    def _plain_choice(self, batch: int) -> Choice:
        return Choice(precision=self.case.precision, micro_batch=batch)

    def _read(self, rehearsal: Rehearsal, trace: Trace) -> StepProfile:
        """The profile of the plain step of ``rehearsal``, read from its ``trace``."""
        model = rehearsal.model
        trained = [p for p in model.parameters() if p.requires_grad]
        return profile_of(
            trace,
            rehearsal.partition,
            self.hardware,
            batch=rehearsal.batch,
            trained_bytes=trained_bytes(model, rehearsal.partition),
            gradient_bytes=sum(tensor_bytes(p) for p in trained),
            state_bytes=_state_bytes(trace) if self.case.state_bytes is None else self.case.state_bytes(trained),
            repeated=[b.name for b in rehearsal.partition.blocks if b.name in set(checkpointing.blocks(model))],
            head=(
                head_option(model, rehearsal.batch * self.case.tokens, self.hardware)
                if self.limits.chunkable
                else None
            ),
        )

    # -- the search

    def search(self, top: int) -> list[TrainingStrategy]:
        """Up to ``top`` proved ways that differ in more than numbers: of those as fast as the fastest, the one that
        moves least comes first, then the others by their seconds.

        Empty if none fits.
        """
        for limits in self._in_turn():
            strategies = self._search(limits, top)
            if strategies:
                strategies = self._with_room_for_the_heap(strategies, limits, top)
                best = quietest(strategies, self._weighed, most_s=self._simple_s)
                return [best, *(strategy for strategy in strategies if strategy is not best)][:top]
        return []

    def _with_room_for_the_heap(
        self, strategies: list[TrainingStrategy], limits: Limits, top: int
    ) -> list[TrainingStrategy]:
        """``strategies``, and those with less RAM in use if the best one's heap frees memory that it needs again."""
        if not strategies[0].heap_s:
            return strategies
        simple_s = self._simple_s
        less = {**limits.budget_bytes, RAM: most_in_use_bytes(limits.budget_bytes[RAM])}
        for strategy in self._search(replace(limits, budget_bytes=less), top):
            strategies = self._with(strategies, strategy)
        self._simple_s = simple_s
        return strategies

    def _in_turn(self) -> Iterator[Limits]:
        """``self.limits``; first, if gradients and states are very small, the same without moving those."""
        trained_bytes = self.profile.state_bytes + self.profile.gradient_bytes
        budget = self.limits.budget_bytes.get(self.hardware.compute, 0)
        ordered = {"states", "gradients", "in_backward"} & self.limits.fixed.keys()
        if trained_bytes < _NOTHING * budget and not ordered:
            yield replace(self.limits, states_leave=False, gradients_leave=False, single_pass=False)
        yield self.limits

    def _search(self, limits: Limits, top: int) -> list[TrainingStrategy]:
        """Strategies proved under ``limits``. The first proof's corrections to the profile hold for later ones."""
        self._learned.clear()
        self._sizes.clear()
        self._simple_s = min(map(self.seconds, self.baselines(limits)), default=math.inf)
        self._traced_ops = 0
        strategies = self._proved(limits, top, [])
        if strategies and self._learned:
            strategies = self._proved(replace(limits, corrections=dict(self._learned)), top, strategies)
            strategies = self._of_other_sizes(limits, strategies)
        return strategies

    def _of_other_sizes(self, limits: Limits, strategies: list[TrainingStrategy]) -> list[TrainingStrategy]:
        """``strategies``, and one of each micro-batch that may be faster and has no proof: a proof's correction to
        the profile differs between sizes, and may be negative."""
        for _, way, _ in self._in_order(limits):
            if self._traced_ops > _SEARCH_OPS:
                break
            if way.bound_s < strategies[0].step_s and way.frame.micro_batch not in self._sizes:
                strategy = self.prove(way, limits=limits)
                strategies = strategies if strategy is None else self._with(strategies, strategy)
        return strategies

    def _proved(self, limits: Limits, top: int, strategies: list[TrainingStrategy]) -> list[TrainingStrategy]:
        """``strategies`` and further proved ones; without corrections yet, up to the first proof that has any."""
        for count, (seconds, way, simple) in enumerate(self._in_order(limits)):
            faster = not strategies or seconds < strategies[0].step_s
            most_ops = _SEARCH_OPS if faster else _MORE_OPS - self._proof_ops
            if count >= _MANY * top or (strategies and self._traced_ops > most_ops):
                break
            if len(strategies) >= top and seconds > max(strategies[top - 1].step_s, self._tied_s(strategies)):
                break
            if not self._is_worth_it(way, seconds, strategies, top):
                continue
            strategy = self.prove(way, corrects=not simple, limits=limits)
            if strategy is not None:
                strategies = self._with(strategies, strategy)
                if self._learned and not limits.corrections:
                    break
        return strategies

    def _is_worth_it(self, way: Way, seconds: float, strategies: list[TrainingStrategy], top: int) -> bool:
        """Whether it may be one of the first ``top``, or the quietest of those that are as fast as the first."""
        if not strategies:
            return True
        tied_s = self._tied_s(strategies)
        tied = [_way(strategy) for strategy in strategies if strategy.step_s <= tied_s]
        moved = min(moved_bytes(self.profile, self.hardware, other) for other in tied)
        if seconds <= tied_s and moved_bytes(self.profile, self.hardware, way) < moved:
            return True
        # What differs in numbers only and is no faster makes no list longer.
        no_slower = (_way(strategy) for strategy in strategies if strategy.step_s <= seconds)
        alike = any(signature(other) == signature(way) for other in no_slower)
        return not alike and (len(strategies) < top or seconds < strategies[top - 1].step_s)

    def _tied_s(self, strategies: list[TrainingStrategy]) -> float:
        least_s = min(strategy.step_s for strategy in strategies)
        return max(least_s, min(self._simple_s, as_fast_s(least_s)))

    def _weighed(self, strategy: TrainingStrategy) -> Weighed:
        return Weighed(
            seconds=strategy.step_s,
            moved_bytes=moved_bytes(self.profile, self.hardware, _way(strategy)),
            held_bytes=sum(strategy.prediction.peak_bytes.values()),
        )

    def _with(self, strategies: list[TrainingStrategy], new: TrainingStrategy) -> list[TrainingStrategy]:
        """``strategies`` and ``new``, by seconds; of those that differ in numbers only, the best."""
        alike = [strategy for strategy in strategies if signature(_way(strategy)) == signature(_way(new))]
        rest = [strategy for strategy in strategies if strategy not in alike]
        best = quietest([*alike, new], self._weighed, most_s=self._simple_s)
        return sorted([*rest, best], key=lambda strategy: rank(strategy.step_s, _way(strategy)))

    def _in_order(self, limits: Limits) -> Iterator[tuple[float, Way, bool]]:
        """Ways by the seconds of their schedules, and whether each is one of the simple ones.

        The program's bound says when no later one can be faster.
        """
        waiting = [(self.seconds(way), -1 - index, way) for index, way in enumerate(self.baselines(limits))]
        for index, way in enumerate(ways.best(self.profile, self.hardware, limits)):
            ready = [entry for entry in waiting if entry[0] <= way.bound_s]
            for entry in sorted(ready, key=lambda entry: rank(entry[0], entry[2])):
                waiting.remove(entry)
                yield entry[0], entry[2], entry[1] < 0
            if not any(way.same(other) for _, _, other in waiting):
                waiting.append((self.seconds(way), index, way))
        for seconds, index, way in sorted(waiting, key=lambda entry: rank(entry[0], entry[2])):
            yield seconds, way, index < 0

    def baselines(self, limits: Limits | None = None) -> list[Way]:
        """The simple ways that may fit."""
        limits = limits or self.limits
        budget = limits.budget_bytes
        return [
            way
            for way in ways.baselines(self.profile, self.hardware, limits)
            if all(_SURELY * count <= budget.get(tier, count) for tier, count in self.held(way).items())
        ]

    def seconds(self, way: Way) -> float:
        key = (way.frame, *way.weights.items(), *way.activations.items())
        if key not in self._seconds:
            self._seconds[key] = self._timed(way)[0]
        return self._seconds[key]

    def _timed(self, way: Way) -> tuple[float, Schedule]:
        beside = contention_of(self.hardware) if self.case.beside is None else self.case.beside
        # All rows at once are timed without what one of them says.
        profile = self._whole() if way.frame.micro_batch == self._rehearsal.batch else self.profile
        return training_step_s(profile, self.hardware, way, beside)

    def held(self, way: Way) -> dict[str, int]:
        """Peaks per tier, as far as the profile knows them."""
        return peak_bytes(held_bytes(self.profile, self.hardware, way))

    # -- proofs

    def prove(self, way: Way, *, corrects: bool = True, limits: Limits | None = None) -> TrainingStrategy | None:
        """``way``, or the search's correction of it once its real peaks are known; None: nothing fits.

        ``corrects``: whether to try corrections.
        """
        limits, best = limits or self.limits, None
        self._sizes.add(way.frame.micro_batch)
        for _ in range(_PROOFS if corrects else 1):
            strategy = self._found(way)
            if fits(strategy.prediction.peak_bytes, limits.budget_bytes):
                best = strategy if best is None or strategy.step_s < best.step_s else best
                if not self._has_room(strategy, limits):
                    break
            elif best is not None:
                break
            self._learned = self._corrections(strategy)
            corrected = replace(limits, corrections=self._learned)
            again = ways.solve_shape(self.profile, self.hardware, corrected, shape_of(way))
            if again is None or again.same(way):
                break
            way = again
        return best

    def proved(self, choice: Choice, partition: Partition | None = None) -> TrainingStrategy:
        """``choice`` as it is, whoever made it, of the blocks of ``partition`` (None: those that are profiled)."""
        way = self.way(choice) if partition is None and self._rehearsal.inputs is not None else None
        if way is not None:
            return self._found(way, choice)
        peaks = self._peaks_of(choice, partition)
        return TrainingStrategy(
            choice=choice,
            partition=self._rehearsal.partition if partition is None else partition,
            prediction=replace(self._rated[_key(choice, partition)], peak_bytes=peaks),
            spent_bytes=self._spent(choice, partition, peaks),
        )

    def predicted(self, choice: Choice) -> Prediction:
        """What ``choice`` takes, its seconds left out."""
        way = self.way(choice) if self._rehearsal.inputs is not None else None
        return Prediction(peak_bytes=self._peaks_of(choice) if way is None else self.peaks(way, choice))

    def _found(self, way: Way, choice: Choice | None = None) -> TrainingStrategy:
        choice = self.choice(way) if choice is None else choice
        peaks = self.peaks(way, choice)
        seconds, schedule = self._timed(way)
        heap_s = self._heap_s(choice, peaks)
        seconds += heap_s
        prediction = Prediction(
            peak_bytes=peaks,
            step_s=seconds,
            bound_s=min(way.bound_s or seconds, seconds),
            limited_by=schedule.limited_by(),
        )
        return TrainingStrategy(
            choice=choice,
            partition=self._rehearsal.partition,
            prediction=prediction,
            spent_bytes=self._spent(choice, None, peaks),
            way=way,
            schedule=schedule,
            heap_s=heap_s,
        )

    def _spent(self, choice: Choice, partition: Partition | None, peaks: Mapping[str, int]) -> dict[str, int]:
        """Of ``peaks``, the program's own."""
        own = self._known[_key(choice, partition)]
        return {tier: count - own.get(tier, 0) for tier, count in peaks.items() if count != own.get(tier, 0)}

    def _heap_s(self, choice: Choice, peaks: Mapping[str, int]) -> float:
        """Seconds for pages that a step gives back and asks for anew, where it computes in RAM."""
        rate = self.case.fresh_s_per_byte
        if not rate or self.hardware.compute != RAM:
            return 0.0
        share = given_back(peaks[RAM], self.limits.budget_bytes.get(RAM, peaks[RAM]))
        return rate * share * self._fresh.get(_key(choice), 0)

    def peaks(self, way: Way, choice: Choice) -> dict[str, int]:
        """Peaks per tier from traces of the step with ``choice`` in force, the program's own share included."""
        key = _key(choice)
        if (
            key not in self._known
            and not choice.in_place
            and self._shallow is not None
            and self._few_do(self._shallow)
        ):
            peaks = self._shallow.predict(choice, way, self.profile)
            if peaks is not None:
                self._traced_ops += self._proof_ops
                self._known[key] = peaks
        return self._peaks_of(choice)

    def _peaks_of(self, choice: Choice, partition: Partition | None = None) -> dict[str, int]:
        """As ``peaks``, by a trace of every layer where nothing is known yet."""
        key, rehearsal = _key(choice, partition), self._rehearsal
        if partition is not None:
            rehearsal = replace(rehearsal, partition=partition)
        if key not in self._known:
            self._known[key] = self._rehearsed(key, rehearsal, choice)
        return rehearsal.in_all(choice, self._known[key])

    def _rehearsed(self, key: str, rehearsal: Rehearsal, choice: Choice) -> dict[str, int]:
        seen = rehearsal.rehearse(choice)
        self._fresh[key], self._rated[key] = seen.fresh_bytes, seen.timed
        self._traced_ops += self._proof_ops
        if (
            self._plain is None
            and self._shallow is None
            and rehearsal is self._rehearsal
            and choice == self._plain_choice(rehearsal.batch)
            and rehearsal.inputs is not None
        ):  # its trace is what a profile is read from
            self._plain = self._complete(self._read(rehearsal, seen.trace), len(seen.trace.ops), rehearsal.batch)
        compute = self.hardware.compute
        return {**seen.peak_bytes, compute: seen.peak_bytes[compute] + self.case.aside(choice)}

    def exactly(self, strategy: TrainingStrategy) -> TrainingStrategy:
        """``strategy`` with the peaks of a trace of all its layers."""
        key = _key(strategy.choice)
        if key not in self._rated:
            self._known[key] = self._rehearsed(key, self._rehearsal, strategy.choice)
        peaks = self._peaks_of(strategy.choice)
        spent = self._spent(strategy.choice, None, peaks)
        return replace(strategy, prediction=replace(strategy.prediction, peak_bytes=peaks), spent_bytes=spent)

    def _few_do(self, shallow: Shallow) -> bool:
        """Whether a few layers say enough of all.

        Not on a processor: what a heap keeps between tensors does not grow layer by layer. And not where what is
        added for segments of the allocator would be a part of the budget that counts.
        """
        compute = self.hardware.compute
        budget = self.limits.budget_bytes.get(compute, math.inf)
        return compute != RAM and shallow.unfilled_bytes <= _UNFILLED * budget

    def _has_room(self, strategy: TrainingStrategy, limits: Limits) -> bool:
        """Whether a way that offloads or recomputes leaves so much room that it may not need to."""
        way = _way(strategy)
        plain = way.frame.states == KEEP and set(way.weights.values()) == {RESIDENT}
        if plain and set(way.activations.values()) == {KEEP} and way.frame.micro_batch == self.profile.batch:
            return False
        peaks, compute = strategy.prediction.peak_bytes, self.hardware.compute
        budget = limits.budget_bytes.get(compute, peaks[compute])
        return budget - peaks[compute] > _ROOM * budget

    def _corrections(self, strategy: TrainingStrategy) -> dict[str, int]:
        """The bytes of the proof beyond the profile's, for each tier in use."""
        thought = self.held(_way(strategy))
        return {
            tier: count - thought.get(tier, 0) + _MARGIN_BYTES
            for tier, count in strategy.prediction.peak_bytes.items()
            if tier in self.limits.budget_bytes and (count or thought.get(tier))
        }

    def least(self) -> TrainingStrategy:
        """The smallest way, if it fits after all; else raises BudgetError with the bytes that it takes."""
        limits, need, strategy = self.limits, dict[str, int](), None
        for _ in range(_LEAST_PROOFS):
            least = ways.smallest(self.profile, self.hardware, limits)
            if least is None:
                break
            need, strategy = least[0], self._found(least[1])
            peaks = strategy.prediction.peak_bytes
            if fits(peaks, self.limits.budget_bytes):
                return strategy
            if fits(peaks, {**self.limits.budget_bytes, **need}):
                break
            corrections = {t: max(0, n, limits.corrections.get(t, 0)) for t, n in self._corrections(strategy).items()}
            limits = replace(limits, corrections=corrections)
        if strategy is None:
            raise BudgetError(
                "Cannot train within this budget.",
                "No sufficient budget is known.",
                "Reduce --batch, --seq or the model.",
            )
        peaks = strategy.prediction.peak_bytes
        short = {tier: max(peaks.get(tier, 0), count) for tier, count in need.items()}
        raise too_small({**{t: n for t, n in peaks.items() if t not in short}, **short}, self.limits.budget_bytes)

    def choice(self, way: Way) -> Choice:
        """``way`` as the runtime takes it."""
        return as_choice(way, self.case.precision, self.hardware.compute)

    def way(self, choice: Choice) -> Way | None:
        """``choice`` as the search knows it; None where it speaks of other blocks."""
        return as_way(choice, [block.name for block in self._rehearsal.partition.blocks])


def _way(strategy: TrainingStrategy) -> Way:
    assert strategy.way is not None, "a search finds ways"
    return strategy.way


def _state_bytes(trace: Trace) -> int:
    """What the optimizer keeps from one step to the next."""
    begin = trace.step_starts[0]
    return sum(s.bytes for s in trace.storages if s.category is Category.OPTIMIZER_STATE and s.born < begin)


def _key(choice: Choice, partition: Partition | None = None) -> str:
    blocks = () if partition is None else tuple(block.name for block in partition.blocks)
    return f"{choice!r} {blocks}"


__all__ = ["Planner", "trained_bytes"]
