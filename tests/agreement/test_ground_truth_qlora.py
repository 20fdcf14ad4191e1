"""Predicted memory of published runs of QLoRA. ``bench/accuracy.py --qlora`` has all ten."""

from __future__ import annotations

import pytest

from support.accuracy import qlora

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about a model that it did not load itself


@pytest.mark.thorough
@pytest.mark.parametrize("run", [qlora.RUNS[7], qlora.RUNS[9]], ids=["1.5B of 4,096 tokens", "7B"])
def test_qlora_with_bitsandbytes_is_predicted_within_one_percent(run: qlora.Run) -> None:
    row = qlora.predict(run)
    assert abs(row.error) <= 0.01
    assert abs(row.notes["reserved, %"]) <= 5
