"""The linear program's input: classes of blocks, and the columns that each may choose from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCE_BYTES = 4096  # HiGHS lets a row be over by 1e-6 of its unit, and units are GiB
SERIAL = "serial"  # the lane of work that nothing overlaps with: its seconds count on every lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A choice for a block: its bytes per tier, seconds per lane, and the slot that it needs of each shared pool."""

    name: str
    bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    slot_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockClass:
    """``count`` equal blocks, each in one of ``columns``."""

    name: str
    count: int
    columns: Sequence[Column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """``slots`` of the size that the largest block in them needs, in each of ``tiers``."""

    name: str
    tiers: Sequence[str]
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A part of the lane ``chain`` and the lane ``other`` slow each other, as both read the same memory.

    The part is the work of blocks in ``columns``; it keeps ``part_share`` of its speed, the other lane
    ``other_share``. During such a block no slot of ``pool`` is released, so the other lane fills each slot at most
    once, in ``slot_s`` and ``s_per_byte`` of its size.
    """

    chain: str
    columns: Collection[str]
    other: str
    part_share: float
    other_share: float
    pool: str
    s_per_byte: float
    slot_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The classes with their budgets; ``fixed_bytes`` and ``fixed_s`` are common to all choices.

    A "tier" may be a tier at a moment (``ram@update``), for a step with several possible peaks.
    """

    classes: Sequence[BlockClass]
    budget_bytes: Mapping[str, int]
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    pools: Sequence[Pool] = ()
    beside: Beside | None = None


Counts = Mapping[str, Mapping[str, int]]  # class -> column -> blocks


def room_bytes(problem: Problem, tier: str) -> int:
    """Return the bytes of ``tier`` for columns and pools; negative where fixed bytes exceed the budget.

    The solver's tolerance is taken off, but never below 0: a tier without room is allowed, and stays unused.
    """
    room = problem.budget_bytes[tier] - problem.fixed_bytes.get(tier, 0)
    return room if room < 0 else max(0, room - TOLERANCE_BYTES)


def busiest(problem: Problem, counts: Counts) -> tuple[str, float]:
    """Return the busiest lane under ``counts``, and its seconds with the serial ones."""
    lanes = dict(problem.fixed_s)
    for kind in problem.classes:
        for column in kind.columns:
            for lane, seconds in column.seconds.items():
                lanes[lane] = lanes.get(lane, 0.0) + seconds * counts[kind.name].get(column.name, 0)
    if problem.beside is not None:
        chain, other = problem.beside.chain, problem.beside.other
        longer = chain if lanes.get(chain, 0.0) > lanes.get(other, 0.0) else other
        lanes[longer] = max(lanes.get(longer, 0.0), _beside_s(problem, problem.beside, counts, lanes))
    serial_s = lanes.pop(SERIAL, 0.0)
    lane, seconds = max(lanes.items(), key=lambda item: item[1], default=("", 0.0))
    return lane, seconds + serial_s


def _beside_s(problem: Problem, beside: Beside, counts: Counts, lanes: Mapping[str, float]) -> float:
    """Return the least seconds of two lanes that slow each other, over how long both are busy (see ``search``).

    The maximum of a few straight lines is least where two of them cross, or at an end.
    """
    chain, other = lanes.get(beside.chain, 0.0), lanes.get(beside.other, 0.0)
    part, most = 0.0, 0.0
    slots = next((pool.slots for pool in problem.pools if pool.name == beside.pool), 0)
    used = [(c, f.count, counts[f.name].get(c.name, 0)) for f in problem.classes for c in f.columns]
    size = max((c.slot_bytes.get(beside.pool, 0) for c, _, n in used if n), default=0)
    filled_s = slots * (beside.slot_s + beside.s_per_byte * size)
    for column, count, chosen in used:
        if column.name in beside.columns:
            took_s = column.seconds.get(beside.chain, 0.0) * chosen
            part += took_s
            most += min(took_s / beside.part_share, count * filled_s / beside.other_share)
    most = min(most, other / beside.other_share)
    both = (0.0, most, part / beside.part_share, (part + other - chain) / beside.other_share)
    lost, slower = 1 - beside.part_share, 1 - beside.other_share
    return min(
        max(chain + lost * both_s, other + slower * both_s, part + other - (beside.part_share - slower) * both_s)
        for both_s in (min(max(0.0, bound_s), most) for bound_s in both)
    )
