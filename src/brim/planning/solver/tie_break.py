"""Of plans that are as fast as anybody can tell, the one that moves least, and of those the one that needs least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Predictions are off by several times as much (5 % in the median, and one plan's runs differ by as much between
# them), and an answer says that it is within a hundredth of the best. Bytes that cross a link or a drive are known
# exactly, and what they cost beside their seconds (wear, noise, others who use the link) no prediction sees.
AS_FAST = 0.01

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """What a plan is compared by: seconds of a step, bytes that it moves over links, bytes that it holds."""

    seconds: float
    moved_bytes: float
    held_bytes: int


def quietest(found: Sequence[T], weighed: Callable[[T], Weighed], *, most_s: float = float("inf")) -> T:
    """The fastest of ``found``, or one as fast within ``AS_FAST`` that moves less, or moves as much and holds less.

    One that is slower than ``most_s`` (the time without a planner) never replaces another. Of equals, the
    first.
    """
    with_weights = [(candidate, weighed(candidate)) for candidate in found]
    least_s = min(weight.seconds for _, weight in with_weights)
    tied = [
        (candidate, weight)
        for candidate, weight in with_weights
        if weight.seconds <= max(least_s, min(most_s, as_fast_s(least_s)))
    ]
    return min(tied, key=lambda pair: (pair[1].moved_bytes, pair[1].held_bytes, pair[1].seconds))[0]


def as_fast_s(least_s: float) -> float:
    """The most seconds that cannot be distinguished from ``least_s``."""
    return (1 + AS_FAST) * least_s
