"""``brim estimate --gpus`` against torchtitan's published runs on 8 to 512 H100, most of them compiled."""

from __future__ import annotations

import itertools

import pytest

from support.accuracy import ground_truth, torchtitan_ranks

Row = dict[str, str]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (ground_truth.folder() / "published_tables.csv").exists(), reason="the table is not here"),
    pytest.mark.filterwarnings("ignore"),
]

# Of 8B 83.9, 84.2 and 84.0 GiB were published for CP 1, 2 and 4, predicted are 84.34, 84.22 and 84.34; of 405B 75.9,
# 77.1 and 84.9 for CP 2, 4 and 8, predicted are 79.2, 79.4 and 78.2 (docs/accuracy.md).
SWAPPED = [
    ("8B FSDP 8, CP 1", "8B FSDP 4, CP 2"), ("8B FSDP 4, CP 2", "8B FSDP 2, CP 4"),
    ("405B FSDP 4, CP 2", "405B FSDP 1, CP 8"), ("405B FSDP 2, CP 4", "405B FSDP 1, CP 8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def predicted() -> list[tuple[Row, int, float]]:
    """Each row, with predicted and measured bytes."""
    return [
        (row, torchtitan_ranks.peak_bytes(torchtitan_ranks.job_of(row)), float(row["peak"]) * 2**30)
        for row in torchtitan_ranks.rows()
    ]


def test_every_row_is_predicted() -> None:
    names = {torchtitan_ranks.name_of(row) for row in torchtitan_ranks.rows()}
    assert names == set(torchtitan_ranks.SPLITS)
    assert len(list(torchtitan_ranks.rows())) == 18


def test_reserved_is_within_ten_percent(predicted: list[tuple[Row, int, float]]) -> None:
    for row, ours, there in predicted:
        assert abs(ours / there - 1) <= 0.10, (row["method"], ours / 2**30, there / 2**30)


def test_no_two_rows_of_a_table_are_the_other_way_round_but_these(predicted: list[tuple[Row, int, float]]) -> None:
    """Rows that differ in Float8 or asynchronous tensor parallelism alone are predicted alike."""
    wrong = []
    for (row, ours, there), (other, others, elsewhere) in itertools.combinations(predicted, 2):
        if row["line"] == other["line"] and there != elsewhere and (ours - others) * (there - elsewhere) < 0:
            wrong.append((torchtitan_ranks.name_of(row), torchtitan_ranks.name_of(other)))
    assert wrong == SWAPPED
