"""Find a choice that fits greedily: the linear program starts from it and never ends worse.

Every block begins with its fastest column. While a tier is over its budget, blocks move to the column that frees the
most excess bytes per second that it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from brim.planning.solver.problem import BlockClass, Column, Counts, Problem, room_bytes

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
    """Return a choice that fits every tier; None where the greedy search finds none."""
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
