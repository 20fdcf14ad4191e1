"""Predicted memory against torchtune's technique ladder. ``bench/accuracy.py --torchtune`` prints it."""

from __future__ import annotations

import itertools

import pytest

from accuracy import ground_truth, torchtune

GIB = 1 << 30
ROUNDING = 0.1 * GIB  # figures are published to a tenth: of two that are subtracted, half of it each

pytestmark = [
    pytest.mark.skipif(not (ground_truth.folder() / "published_tables.csv").exists(), reason="the table is not here"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about its own future
]


@pytest.fixture(scope="module")
def ladder() -> list[tuple[str, float, float]]:
    """Name, predicted and measured bytes of every rung, in the published order."""
    rungs = [(name, there) for name, there in torchtune.measured() if name in torchtune.RUNGS]
    return [(name, torchtune.peak_bytes(torchtune.RUNGS[name]), there) for name, there in rungs]


def test_every_rung_that_needs_no_compiler_or_quantization_is_predicted(
    ladder: list[tuple[str, float, float]],
) -> None:
    assert [name for name, _, _ in ladder] == list(torchtune.RUNGS)


def test_the_rungs_stand_in_the_measured_order(ladder: list[tuple[str, float, float]]) -> None:
    predicted = sorted(ladder, key=lambda rung: rung[1])
    assert predicted == sorted(ladder, key=lambda rung: rung[2])


def test_every_change_from_rung_to_rung_is_predicted_within_ten_percent(
    ladder: list[tuple[str, float, float]],
) -> None:
    for (_, before, there_before), (name, after, there_after) in itertools.pairwise(ladder):
        predicted, measured = after - before, there_after - there_before
        assert abs(predicted - measured) <= 0.1 * abs(measured) + ROUNDING, name


def test_every_rung_is_predicted_within_five_percent(ladder: list[tuple[str, float, float]]) -> None:
    for name, predicted, measured in ladder:
        assert abs(predicted / measured - 1) <= 0.05, name
