"""What techniques of a training plan save and cost, as a plan tells it."""

import pytest

from brim.cli.plan.command import _costs
from brim.planning.strategy.effects import _difference_s


@pytest.mark.parametrize(
    ("one_s", "other_s", "difference_s"),
    [
        (0.1 + 0.2, 0.3, 0.0),  # rounding of sums: no cost, and no gain of -5.55e-17 s
        (1.25, 1.0, 0.25),
        (1.0, 1.25, -0.25),
        (2e-7, 1e-7, 1e-7),
    ],
)
def test_what_is_rounding_is_no_cost(one_s: float, other_s: float, difference_s: float) -> None:
    assert _difference_s(one_s, other_s) == pytest.approx(difference_s, abs=0)


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "nothing"), (0.25, "250 ms"), (-0.25, "250 ms less")])
def test_costs_are_told_in_words(seconds: float, told: str) -> None:
    assert _costs(seconds) == told
