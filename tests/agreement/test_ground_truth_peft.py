"""Predicted reserved memory against peft's method comparison. ``bench/accuracy.py --peft`` has all of it."""

from __future__ import annotations

import pytest

from support.accuracy import ground_truth, peft

TABLE = "peft_method_comparison.csv"

pytestmark = [
    pytest.mark.skipif(not (ground_truth.folder() / TABLE).exists(), reason="the published runs are not here"),
    pytest.mark.filterwarnings("ignore"),  # of peft, about a model that it did not load itself
]


@pytest.mark.thorough
def test_fine_tuning_llama_with_lora_is_predicted_within_three_percent() -> None:
    row = next(row for row in ground_truth.rows(TABLE) if row["experiment"] == "lora/llama-3.2-3B-rank32")
    assert abs(peft.predict(row).error) <= 0.03
