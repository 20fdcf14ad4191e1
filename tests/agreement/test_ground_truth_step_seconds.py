"""Seconds of steps against timm's published ones, of families that no share was fitted to (bench/fit_seconds.py)."""

from __future__ import annotations

from statistics import median

import pytest

from brim import catalog
from brim.predict import cost
from support.accuracy import ground_truth, step_seconds

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of timm, about names of its own
    pytest.mark.skipif(
        not (ground_truth.folder() / "step_seconds").exists(), reason="the published measurements are absent"
    ),
    pytest.mark.skipif(not step_seconds.has_timm(), reason="timm is not installed"),
]
_ROWS = 8  # of a set; all are in the benchmark


@pytest.mark.thorough
@pytest.mark.parametrize("name", step_seconds.SETS)
def test_families_held_out_are_within_ten_percent_in_the_median(name: str) -> None:
    rows = sorted((row for row in step_seconds.published(name, 1) if row.is_held_out), key=lambda row: row.family)
    errors = []
    for row in rows[:: len(rows) // _ROWS]:
        predicted_s = cost.step_s(step_seconds.traced(row), catalog.gpu(row.gpu).hardware())
        errors.append(abs(predicted_s / row.step_s - 1))
    assert len(errors) >= _ROWS
    assert median(errors) <= 0.10
    assert sorted(errors)[-2] <= 0.25
