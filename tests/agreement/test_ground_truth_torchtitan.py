"""Predicted memory against torchtitan's FSDP2 runs on 8 and 128 H100, through PyTorch's fake process group."""

from __future__ import annotations

import pytest

from support.accuracy import ground_truth, torchtitan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ground_truth.folder() / "published_tables.csv").exists(), reason="the table is not here"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def rows() -> list[tuple[tuple[str, str], float, float]]:
    """The run, predicted and measured bytes."""
    return [(key, torchtitan.peak_bytes(torchtitan.RUNS[key]), there) for key, there in torchtitan.measured()]


def test_every_run_under_fsdp_without_a_compiler_is_predicted(
    rows: list[tuple[tuple[str, str], float, float]],
) -> None:
    assert {key for key, _, _ in rows} == set(torchtitan.RUNS)


def test_reserved_is_within_ten_percent(rows: list[tuple[tuple[str, str], float, float]]) -> None:
    for key, predicted, there in rows:
        assert abs(predicted / there - 1) <= 0.10, (key, predicted / 2**30, there / 2**30)


def test_runs_stand_in_the_measured_order(rows: list[tuple[tuple[str, str], float, float]]) -> None:
    by_prediction = sorted(rows, key=lambda row: row[1])
    assert [key for key, _, _ in by_prediction] == [key for key, _, _ in sorted(rows, key=lambda row: row[2])]
