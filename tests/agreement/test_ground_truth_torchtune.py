"""Predicted memory against torchtune's technique ladder. ``bench/accuracy.py --torchtune`` has more rungs."""

from __future__ import annotations

import pytest

from accuracy import ground_truth, torchtune

pytestmark = [
    pytest.mark.skipif(not (ground_truth.folder() / "published_tables.csv").exists(), reason="the table is not here"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about its own future
]


def test_an_optimizer_that_steps_in_the_backward_pass_is_predicted_within_two_percent() -> None:
    (row,) = torchtune.rows("Fuse optimizer")
    assert abs(row.error) <= 0.02
