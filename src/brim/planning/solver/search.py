"""Choose per block by a mixed-integer linear program: the fewest seconds whose bytes fit every tier.

Equal blocks are a class, and a variable per column counts the blocks of the class that choose it. Lanes (compute, a
link, the disk) work in parallel, so a step lasts at least as long as its busiest one:

    minimise T + a little of all traffic
    T >= serial + fixed_s[lane] + sum of columns' seconds on it     for each lane
    fixed[tier] + sum of columns' bytes + its pools <= budget       for each tier
    pool >= slots * what every column in use needs of a slot        for each pool

Where a part of the computation and a link slow each other (``Beside``), both are busy for B of a step's T seconds.
In B the part works at its share s of its speed and the link at its share r, and each does the rest of its work
alone. With the part's and the link's undisturbed seconds P and L:

    T >= chain + (1 - s) B                          the chain of computation has the part in it
    T >= L + (1 - r) B
    T >= (P - s B) + (L - r B) + B                  alone, alone, and both
    r B <= L,  s B <= P, and block by block of the part r B <= what the slots of the pool take

Every step has such a B, so no step is faster than the minimum over all B. Other waits between lanes are left to the
simulated schedule. Solved by HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", Mathematical
Programming Computation 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from brim.planning.solver.problem import SERIAL, Beside, BlockClass, Column, Counts, Problem, busiest, room_bytes

_TRAFFIC = 1e-3  # weight of all lanes' seconds: among about equally fast choices, less work is better
MOST_NODES = 1000  # programs of a training step take 5 at most
_GIB = float(1 << 30)  # GiB, and seconds as shares of the slowest choice, keep the matrix well scaled


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """``counts``: class -> column -> blocks. No choice that fits has a busiest lane below ``bound_s``.

    ``gap`` is (busiest_s - bound_s) / busiest_s; 0: optimal.
    """

    counts: Counts
    busiest_s: float
    bound_s: float
    gap: float


def solve(problem: Problem, *, most_nodes: int = MOST_NODES, traffic: float = _TRAFFIC) -> Solution | None:
    """Return the best choice within ``most_nodes`` of the search tree; None where nothing fits or was found.

    The limit counts nodes, not seconds, so that a plan does not depend on this computer's speed.

    The search starts from the greedy choice, if that exists, and never ends worse. With ``traffic`` 0 the bound is
    sharpest, and ties between about equally fast choices are broken arbitrarily.
    """
    return _Program(problem, traffic).solve(most_nodes, greedy(problem))


class _Program:
    """Variables: a count and a "used" flag per column, then T, a size per pool, and B for each column of the part."""

    def __init__(self, problem: Problem, weight: float) -> None:
        self._problem, self._weight = problem, weight
        self._columns = [(kind, column) for kind in problem.classes for column in kind.columns]
        n = len(self._columns)
        self._flag, self._time = n, 2 * n
        self._pools = {pool.name: 2 * n + 1 + index for index, pool in enumerate(problem.pools)}
        self._lanes = {*problem.fixed_s, *(lane for _, column in self._columns for lane in column.seconds)}
        self._scale_s = self._slowest_s() or 1.0
        self._model = highspy.Highs()  # type: ignore[no-untyped-call]
        self._model.setOptionValue("output_flag", False)
        self._model.setOptionValue("threads", 1)
        self._model.setOptionValue("mip_rel_gap", 1e-5)
        self._add_variables()
        self._add_choices()
        self._add_lanes()
        self._add_tiers()
        if problem.beside is not None:
            self._add_beside(problem.beside)

    def _slowest_s(self) -> float:
        most = sum(
            max((sum(c.seconds.values()) for c in f.columns), default=0.0) * f.count for f in self._problem.classes
        )
        return most + max(self._problem.fixed_s.values(), default=0.0)

    def _add_variables(self) -> None:
        model, infinity = self._model, highspy.kHighsInf
        for kind, column in self._columns:
            traffic = sum(column.seconds.values()) / self._scale_s
            model.addVar(0, kind.count)
            model.changeColCost(model.getNumCol() - 1, self._weight * traffic)
        for _, column in self._columns:
            model.addVar(0, 1 if column.slot_bytes else 0)
        for _ in range(1 + len(self._pools)):
            model.addVar(0, infinity)
        model.changeColCost(self._time, 1.0)
        whole = np.arange(2 * len(self._columns), dtype=np.int32)
        kinds = np.full(len(whole), highspy.HighsVarType.kInteger.value, dtype=np.uint8)
        model.changeColsIntegrality(len(whole), whole, kinds)

    def _row(self, low: float, high: float, terms: Mapping[int, float]) -> None:
        index = np.fromiter(terms, dtype=np.int32, count=len(terms))
        value = np.fromiter(terms.values(), dtype=np.float64, count=len(terms))
        self._model.addRow(low, high, len(terms), index, value)

    def _add_choices(self) -> None:
        for kind in self._problem.classes:
            mine = {index: 1.0 for index, (owner, _) in enumerate(self._columns) if owner is kind}
            self._row(kind.count, kind.count, mine)
        for index, (kind, column) in enumerate(self._columns):
            if column.slot_bytes:
                self._row(-highspy.kHighsInf, 0, {index: 1.0, self._flag + index: -float(kind.count)})
            for pool, count in column.slot_bytes.items():
                needed = {self._pools[pool]: 1.0, self._flag + index: -count / _GIB}
                self._row(0, highspy.kHighsInf, needed)

    def _add_lanes(self) -> None:
        problem = self._problem
        for lane in sorted(self._lanes - {SERIAL}) or [SERIAL]:
            on = {lane, SERIAL}
            seconds = [sum(column.seconds.get(name, 0.0) for name in on) for _, column in self._columns]
            terms = {index: -count / self._scale_s for index, count in enumerate(seconds) if count}
            fixed = sum(problem.fixed_s.get(name, 0.0) for name in on)
            self._row(fixed / self._scale_s, highspy.kHighsInf, {self._time: 1.0, **terms})

    def _add_beside(self, beside: Beside) -> None:
        """Add the inequalities of the module's docstring, in shares of the slowest choice's seconds."""
        fixed, model = self._problem.fixed_s, self._model
        mine = [index for index, (_, column) in enumerate(self._columns) if column.name in beside.columns]
        both = {index: model.getNumCol() + number for number, index in enumerate(mine)}
        for _ in mine:
            model.addVar(0, highspy.kHighsInf)
        chain, other = (self._on(lane) for lane in (beside.chain, beside.other))
        part = {index: count for index, count in chain.items() if index in both}
        alone = {index: part.get(index, 0.0) + other.get(index, 0.0) for index in {*part, *other}}
        chain_s, other_s = (fixed.get(lane, 0.0) / self._scale_s for lane in (beside.chain, beside.other))
        s, r = beside.part_share, beside.other_share
        for least, of, more in ((chain_s, chain, 1 - s), (other_s, other, 1 - r), (other_s, alone, 1 - s - r)):
            terms = {index: -count for index, count in of.items()} | dict.fromkeys(both.values(), -more)
            self._row(least, highspy.kHighsInf, {self._time: 1.0, **terms})
        limit = {index: -count for index, count in other.items()} | dict.fromkeys(both.values(), r)
        self._row(-highspy.kHighsInf, other_s, limit)
        slots = {pool.name: pool.slots for pool in self._problem.pools}[beside.pool]
        for index, variable in both.items():
            count = self._columns[index][0].count * slots / self._scale_s
            self._row(-highspy.kHighsInf, 0, {variable: s, index: -part.get(index, 0.0)})
            filled = {variable: r, self._pools[beside.pool]: -count * beside.s_per_byte * _GIB}
            self._row(-highspy.kHighsInf, count * beside.slot_s, filled)

    def _on(self, lane: str) -> dict[int, float]:
        """Return the scaled seconds on ``lane`` of a block in each column."""
        seconds = {index: column.seconds.get(lane, 0.0) for index, (_, column) in enumerate(self._columns)}
        return {index: count / self._scale_s for index, count in seconds.items() if count}

    def _add_tiers(self) -> None:
        problem = self._problem
        for tier in problem.budget_bytes:
            terms = {
                index: column.bytes[tier] / _GIB
                for index, (_, column) in enumerate(self._columns)
                if column.bytes.get(tier)
            }
            terms |= {self._pools[pool.name]: float(pool.slots) for pool in problem.pools if tier in pool.tiers}
            room = room_bytes(problem, tier) / _GIB
            self._row(-highspy.kHighsInf, room, terms)

    def solve(self, most_nodes: int, start: Counts | None) -> Solution | None:
        model = self._model
        model.setOptionValue("mip_max_nodes", most_nodes)
        if start is not None:
            warm_start = highspy.HighsSolution()
            warm_start.col_value = self._values(start)
            model.setSolution(warm_start)
        model.run()
        info = model.getInfo()
        if info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
            return self._solution(self._counts(list(model.getSolution().col_value)), info.mip_dual_bound)
        if start is None or model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None
        return self._solution(start, 0.0)  # the nodes were used up before a bound was known

    def _values(self, start: Counts) -> list[float]:
        counts = [start[kind.name].get(column.name, 0) for kind, column in self._columns]
        told = list(zip(counts, (column for _, column in self._columns), strict=True))
        flags = [float(count > 0 and bool(column.slot_bytes)) for count, column in told]
        used = [column for count, column in told if count]
        pools = [max((column.slot_bytes.get(name, 0) for column in used), default=0) / _GIB for name in self._pools]
        _, seconds = busiest(self._problem, start)
        beside = self._problem.beside
        if beside is not None:  # B starts at 0: nothing overlaps
            seconds += sum(count * column.seconds.get(beside.other, 0.0) for count, column in told)
        rest = [0.0] * (self._model.getNumCol() - 2 * len(counts) - 1 - len(pools))
        return [*map(float, counts), *flags, seconds / self._scale_s, *pools, *rest]

    def _counts(self, values: Sequence[float]) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {kind.name: {} for kind in self._problem.classes}
        for (kind, column), value in zip(self._columns, values, strict=False):
            if round(value):
                counts[kind.name][column.name] = round(value)
        return counts

    def _solution(self, counts: Counts, bound: float) -> Solution:
        _, seconds = busiest(self._problem, counts)
        # No lane is busy for longer than the step, which limits the traffic term of the objective.
        bound_s = min(seconds, max(0.0, bound) * self._scale_s / (1 + self._weight * len(self._lanes)))
        gap = 0.0 if seconds == 0 else (seconds - bound_s) / seconds
        return Solution(counts=counts, busiest_s=seconds, bound_s=bound_s, gap=gap)


_MOST_MOVES = 64
_LEAST_S = 1e-9  # moves that cost no time are compared by their bytes

_Held = dict[str, dict[str, int]]  # a mutable Counts


@dataclass(frozen=True, slots=True)
class _Move:
    blocks: BlockClass
    source: Column
    target: Column

    def apply(self, counts: _Held, number: int) -> _Held:
        mine = dict(counts[self.blocks.name])
        mine[self.source.name] -= number
        mine[self.target.name] = mine.get(self.target.name, 0) + number
        return {**counts, self.blocks.name: {name: count for name, count in mine.items() if count}}


def greedy(problem: Problem) -> Counts | None:
    """Return a choice that fits every tier; None where the greedy search finds none.

    The linear program starts from it and never ends worse. Every block begins with its fastest column. While a tier
    is over its budget, blocks move to the column that frees the most excess bytes per second that it costs.
    """
    counts: _Held = {kind.name: {min(kind.columns, key=_seconds).name: kind.count} for kind in problem.classes}
    for _ in range(_MOST_MOVES):
        over = _over(problem, counts)
        if not over:
            return counts
        improved = _best(problem, counts, over)
        if improved is None:
            return None
        counts = improved
    return None


def _best(problem: Problem, counts: _Held, over: Mapping[str, int]) -> _Held | None:
    """Return ``counts`` after the move that frees most per second; None where none frees anything."""
    before, best, most = sum(over.values()), None, 0.0
    for move in _moves(problem, counts):
        number = _number(move, counts, over)
        if not number:
            continue
        moved = move.apply(counts, number)
        freed = before - sum(_over(problem, moved).values())
        if freed <= 0:
            continue
        value = freed / max(_LEAST_S, number * (_seconds(move.target) - _seconds(move.source)))
        if value > most:
            best, most = moved, value
    return best


def _moves(problem: Problem, counts: _Held) -> Iterator[_Move]:
    for kind in problem.classes:
        for source in kind.columns:
            if counts[kind.name].get(source.name):
                yield from (_Move(kind, source, target) for target in kind.columns if target is not source)


def _number(move: _Move, counts: _Held, over: Mapping[str, int]) -> int:
    """Return how many blocks to move: enough for the tier that needs most, or all."""
    number = 0
    for tier, count in over.items():
        less = move.source.bytes.get(tier, 0) - move.target.bytes.get(tier, 0)
        if less > 0:
            number = max(number, -(-count // less))
    return min(number, counts[move.blocks.name][move.source.name])


def _over(problem: Problem, counts: Counts) -> dict[str, int]:
    """Return the excess bytes of each tier that is over its budget."""
    used = dict.fromkeys(problem.budget_bytes, 0)
    slots: dict[str, int] = {}
    for kind in problem.classes:
        for column in kind.columns:
            number = counts[kind.name].get(column.name, 0)
            if not number:
                continue
            for tier, count in column.bytes.items():
                if tier in used:
                    used[tier] += number * count
            for pool_name, count in column.slot_bytes.items():
                slots[pool_name] = max(slots.get(pool_name, 0), count)
    for pool in problem.pools:
        for tier in pool.tiers:
            if tier in used:
                used[tier] += pool.slots * slots.get(pool.name, 0)
    excess = {tier: count - room_bytes(problem, tier) for tier, count in used.items()}
    return {tier: count for tier, count in excess.items() if count > 0}


def _seconds(column: Column) -> float:
    return sum(column.seconds.values())
