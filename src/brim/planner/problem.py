"""What the linear program decides: classes of blocks, and the ways in which each may be treated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TOLERANCE_BYTES = 4096  # HiGHS lets a row be over by 1e-6 of its unit, and units are GiB
SERIAL = "serial"  # the lane of what nothing runs beside: its seconds count on every lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One way to treat a block: what one such block holds per tier and how many seconds it takes per lane.

    ``slot_bytes``: how large a slot it needs of each pool, which all share that pass through it.
    """

    name: str
    bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    slot_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockClass:
    """``count`` blocks that are alike, each in one of ``columns``."""

    name: str
    count: int
    columns: Sequence[Column]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """``slots`` of one size, as large as the largest block in them needs, in each of ``tiers``."""

    name: str
    tiers: Sequence[str]
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """``fixed_bytes`` and ``fixed_s`` are there whatever is chosen.

    A "tier" may also be one tier at one moment (``ram@update``), where a step has several that could be its peak.
    """

    classes: Sequence[BlockClass]
    budget_bytes: Mapping[str, int]
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    pools: Sequence[Pool] = ()


Counts = Mapping[str, Mapping[str, int]]  # class -> column -> blocks


def room_bytes(problem: Problem, tier: str) -> int:
    """What columns and pools may take of ``tier``; negative where what is fixed is too much already.

    A little less than there is, so that the program's own rounding stays inside; but nothing at all is a room too:
    a tier that is not to be used.
    """
    room = problem.budget_bytes[tier] - problem.fixed_bytes.get(tier, 0)
    return room if room < 0 else max(0, room - TOLERANCE_BYTES)


def busiest(problem: Problem, counts: Counts) -> tuple[str, float]:
    """The lane that sets the pace under ``counts``, and its seconds with what is serial."""
    lanes = dict(problem.fixed_s)
    for found in problem.classes:
        for column in found.columns:
            for lane, seconds in column.seconds.items():
                lanes[lane] = lanes.get(lane, 0.0) + seconds * counts[found.name].get(column.name, 0)
    serial_s = lanes.pop(SERIAL, 0.0)
    lane, seconds = max(lanes.items(), key=lambda item: item[1], default=("", 0.0))
    return lane, seconds + serial_s
