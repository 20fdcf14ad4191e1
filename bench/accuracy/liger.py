"""Peaks of operators and losses: every plain PyTorch row of Liger-Kernel's benchmarks."""

from __future__ import annotations

import time

import brim
import liger_rows
from accuracy import ground_truth
from accuracy.table import MIB, Row


def rows(only: str = "") -> list[Row]:
    found = []
    for row in ground_truth.rows("liger_ops.csv"):
        build = liger_rows.build(row)
        if build is None or only not in row["kernel_name"]:
            continue
        started = time.perf_counter()
        made = brim.trace(build, steps=3, target="cuda", capability=liger_rows.capability(row))
        what = f"{row['kernel_name']} {row['kernel_operation_mode']} {row['x_name']}={row['x_value']}"
        found.append(Row(
            name=f"{what} {row['gpu_name'][7:]}",
            predicted_bytes=brim.simulate(made).peak_bytes.allocated,
            measured_bytes=float(row["y_value_50"]) * MIB, seconds=time.perf_counter() - started,
        ))  # fmt: skip
    return found
