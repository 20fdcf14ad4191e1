"""Break ties between plans of indistinguishable seconds by the fewest bytes moved, then the fewest bytes held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Predictions are off by several times as much (5 % in the median, as are runs of the same plan), and an answer says
# that it is within a hundredth of the best. Bytes that cross a link or a drive are known exactly, and cost more than
# seconds: wear, noise, other users of the link.
AS_FAST = 0.01

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """A plan's criteria: seconds of a step, bytes moved over links, bytes held."""

    seconds: float
    moved_bytes: float
    held_bytes: int


def quietest(candidates: Sequence[T], weighed: Callable[[T], Weighed], *, most_s: float = float("inf")) -> T:
    """Return the candidate that moves, then holds the fewest bytes among those within ``AS_FAST`` of the fastest.

    A candidate slower than ``most_s`` (the time without a planner) never replaces the fastest. Of equals, the first
    wins.
    """
    with_weights = [(candidate, weighed(candidate)) for candidate in candidates]
    least_s = min(weight.seconds for _, weight in with_weights)
    tied = [
        (candidate, weight)
        for candidate, weight in with_weights
        if weight.seconds <= max(least_s, min(most_s, as_fast_s(least_s)))
    ]
    return min(tied, key=lambda pair: (pair[1].moved_bytes, pair[1].held_bytes, pair[1].seconds))[0]


def as_fast_s(least_s: float) -> float:
    """Return the most seconds that cannot be distinguished from ``least_s``."""
    return (1 + AS_FAST) * least_s
