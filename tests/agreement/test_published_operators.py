"""Peaks of operators that others measured on GPUs, against what is predicted without one."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from support.accuracy import ground_truth, liger, liger_rows

TABLE = (
    Path(os.environ.get("BRIM_GROUND_TRUTH", Path(__file__).parents[3] / "shared" / "ground_truth")) / "liger_ops.csv"
)
pytestmark = pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE} is not here")


def _ends(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of every sweep its smallest and largest case; of the mixture of experts, a loop in Python, the smallest."""
    sweeps: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        key = ("kernel_name", "kernel_operation_mode", "extra_benchmark_config_str", "gpu_name", "x_name")
        if not liger.reason_not_built(row) and row["kernel_name"] not in liger.HELD_BEFORE:
            sweeps.setdefault(tuple(row[name] for name in key), []).append(row)
    found = []
    for sweep in sweeps.values():
        sweep.sort(key=lambda row: float(row["x_value"]))
        found += sweep[:1] if sweep[0]["kernel_name"] == "fused_moe" or len(sweep) == 1 else [sweep[0], sweep[-1]]
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_published_peaks_are_met():
    errors = []
    for row in _ends(list(csv.DictReader(TABLE.open()))):
        build = liger_rows.build(row)
        assert build is not None
        made = trace(build, steps=3, target="cuda", capability=liger_rows.capability(row))
        measured = float(row["y_value_50"]) * (1 << 20)
        errors.append(abs(simulate(made).peak_bytes.allocated - measured) / measured)
    errors.sort()
    assert len(errors) > 55
    assert errors[len(errors) // 2] <= 0.0005
    assert errors[int(len(errors) * 0.95)] <= 0.03


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_every_plain_row_is_built_or_has_a_reason():
    """Growth with size is right even where a run held memory of the one before."""
    held: dict[str, list[tuple[float, float]]] = {}
    for row in ground_truth.rows(TABLE.name):
        assert liger.reason_not_built(row) != "no builder"
        if row["kernel_name"] in liger.HELD_BEFORE:
            made = liger.predict(row)
            held.setdefault(row["kernel_name"], []).append((made.predicted_bytes, made.measured_bytes))
    assert held.keys() == set(liger.HELD_BEFORE)
    for sizes in held.values():
        growth = [(sizes[-1][which] - sizes[0][which]) for which in (0, 1)]
        assert growth[0] == pytest.approx(growth[1], rel=0.002)
