"""Peaks of operators that others measured on GPUs, against PyTorch's own allocator on the rehearsal device."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accuracy import liger

if TYPE_CHECKING:
    from conftest import OnDevice

BENCH = Path(__file__).parents[2] / "bench"
TABLE = (
    Path(os.environ.get("BRIM_GROUND_TRUTH", Path(__file__).parents[3] / "shared" / "ground_truth")) / "liger_ops.csv"
)
CARDS = {"H100": "H100", "4090": "RTX 4090"}
# Its routing is a loop over numbers that only computed values tell.
BY_VALUES = ("fused_moe",)

PROGRAM = """
    import gc, json, sys, warnings
    sys.path.insert(0, {bench!r})
    warnings.simplefilter("ignore")
    import torch, liger_rows
    result = []
    for row in json.loads({rows!r}):
        try:
            step = liger_rows.build(row)()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                step()
            result.append(torch.cuda.max_memory_allocated())
        except Exception as error:
            result.append(repr(error)[:200])
        step = None
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # each row is of a process of its own
        torch.cuda.empty_cache()
"""


@pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE} is not here")
@pytest.mark.parametrize("card", CARDS)
def test_published_peaks_are_met(on_device: OnDevice, card: str) -> None:
    with TABLE.open() as table:
        published = list(csv.DictReader(table))
    rows = [
        row
        for row in published
        if card in row["gpu_name"]
        and not liger.reason_not_built(row)
        and row["kernel_name"] not in (*liger.HELD_BEFORE, *BY_VALUES)
    ]
    found = on_device.run(PROGRAM.format(bench=str(BENCH), rows=json.dumps(rows)), CARDS[card], timeout_s=280)
    errors = []
    for row, peak_bytes in zip(rows, found, strict=True):
        what = " ".join(row[name] for name in ("kernel_name", "kernel_operation_mode", "x_value"))
        assert isinstance(peak_bytes, int), f"{what}: {peak_bytes}"
        errors.append((abs(peak_bytes / (1 << 20) - float(row["y_value_50"])), what))
    exact = sum(error <= 0.001 for error, _ in errors)  # of a MiB
    assert exact >= 0.75 * len(errors), sorted(errors)
