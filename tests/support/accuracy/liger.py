"""Peaks of operators and losses: every plain PyTorch and Hugging Face row of Liger-Kernel's benchmarks.

What is left out is said on standard error, with the reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import brim
from support.accuracy import ground_truth, liger_rows
from support.accuracy.table import MIB, Row

# Rows whose peak holds more than their own step, by the same number of bytes whatever the size: the benchmark runs
# Liger's provider first in the same process, at all sizes. Its function is compiled for the first, and with sizes
# left open for the second; then it is compiled no more. Both compilations keep what they were made with: the weights
# (and biases) of both runs and their inputs of batch 2 and batch 4 are there to 0.1 MiB, and for CPO (2,084.0 MiB) a
# gradient of the second input, for KTO (1,265.5 MiB) one more matrix of a weight's size. That they are is inferred
# from these sums, not seen.
HELD_BEFORE = ("fused_linear_cpo_loss", "kto_loss")
NOT_BUILT = {
    "liger": "Liger's own Triton kernels",
    "megatron-fused": "Megatron's loss compiled by TorchScript: what its fused kernels keep is the compiler's choice",
    "deepspeed": "DeepSpeed's tiled layer, not plain PyTorch",
    "distill_jsd_loss": "recorded two months before its script was published, which takes other sizes",
}


def reason_not_built(row: Mapping[str, str]) -> str:
    """Why a row has no prediction; "" where it has one."""
    for start, reason in NOT_BUILT.items():
        if row["kernel_provider"].startswith(start) or row["kernel_name"] == start:
            return reason
    return "" if liger_rows.build(row) is not None else "no builder"


def predict(row: Mapping[str, str]) -> Row:
    build = liger_rows.build(row)
    assert build is not None
    started = time.perf_counter()
    made = brim.trace(build, steps=3, target="cuda", capability=liger_rows.capability(row))
    what = f"{row['kernel_name']} {row['kernel_operation_mode']} {row['x_name']}={row['x_value']}"
    return Row(
        name=f"{what} {row['gpu_name'][7:]}",
        predicted_bytes=brim.simulate(made).peak_bytes.allocated,
        measured_bytes=float(row["y_value_50"]) * MIB, seconds=time.perf_counter() - started,
    )  # fmt: skip


def rows(only: str = "") -> list[Row]:
    found: list[Row] = []
    left_out: dict[tuple[str, str, str], int] = {}
    held: dict[str, list[Row]] = {}
    for row in ground_truth.rows("liger_ops.csv"):
        if only not in row["kernel_name"]:
            continue
        reason = reason_not_built(row)
        if reason:
            key = (row["kernel_name"], row["kernel_provider"], reason)
            left_out[key] = left_out.get(key, 0) + 1
        elif row["kernel_name"] in HELD_BEFORE:
            held.setdefault(row["kernel_name"], []).append(predict(row))
        else:
            found.append(predict(row))
    for (name, provider, reason), count in left_out.items():
        print(f"{name} by {provider}: {count} rows not built: {reason}", file=sys.stderr)
    for name, sizes in held.items():
        over = [(row.measured_bytes - row.predicted_bytes) / MIB for row in sizes]
        print(
            f"{name}: {len(sizes)} rows left out: the process held {min(over):,.1f} to {max(over):,.1f} MiB more, "
            f"while the step grew by {(sizes[-1].measured_bytes - sizes[0].measured_bytes) / MIB:,.0f} MiB",
            file=sys.stderr,
        )
    return found
