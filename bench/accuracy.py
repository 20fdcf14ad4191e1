"""How right the predictions are: published GPU peaks, and real runs on this machine's CPU."""

from __future__ import annotations

import argparse
import csv
import json
import os
import warnings
from pathlib import Path

import liger_rows
from brim.estimation.simulation import simulate
from brim.predict.tracer import trace
from cpu_truth import measured_peak_bytes
from cpu_zoo import CONFIGURATIONS

MIB = 1 << 20


def ground_truth() -> Path:
    return Path(os.environ.get("BRIM_GROUND_TRUTH", Path(__file__).parents[2] / "shared" / "ground_truth"))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def liger(only: str) -> list[dict[str, float | str]]:
    """Every plain PyTorch row of the published operator benchmarks: predicted and measured peak, in MiB."""
    found: list[dict[str, float | str]] = []
    for row in csv.DictReader((ground_truth() / "liger_ops.csv").open()):
        build = liger_rows.build(row)
        if build is None or only not in row["kernel_name"]:
            continue
        made = trace(build, steps=3, target="cuda", capability=liger_rows.capability(row))
        predicted = simulate(made).peak_bytes.allocated / MIB
        measured = float(row["y_value_50"])
        name = f"{row['kernel_name']} {row['kernel_operation_mode']} {row['x_name']}={row['x_value']}"
        found.append({"name": name, "gpu": row["gpu_name"], "predicted": predicted, "measured": measured})
        off = (predicted - measured) / measured * 100
        print(f"{name:48} {row['gpu_name'][7:]:20} {predicted:12.4f} {measured:12.4f} MiB {off:+8.3f} %", flush=True)
    return found


def cpu(only: str) -> list[dict[str, float | str]]:
    """Every configuration of the zoo, run on this machine's CPU and predicted; peaks in MiB."""
    found: list[dict[str, float | str]] = []
    for name, build in CONFIGURATIONS.items():
        if only not in name:
            continue
        predicted = simulate(trace(build, steps=2, target="cpu")).peak_bytes.allocated / MIB
        measured = measured_peak_bytes(build, steps=2) / MIB
        found.append({"name": name, "gpu": "", "predicted": predicted, "measured": measured})
        off = (predicted - measured) / measured * 100
        print(f"{name:48} {predicted:12.4f} {measured:12.4f} MiB {off:+8.3f} %", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--liger", action="store_true", help="published peaks of operators and losses")
    parser.add_argument("--cpu", action="store_true", help="real runs on this machine's CPU")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = (liger(args.only) if args.liger else []) + (cpu(args.only) if args.cpu else [])
    errors = [abs(float(r["predicted"]) - float(r["measured"])) / float(r["measured"]) for r in rows]
    if errors:
        shares = " ".join(f"p{int(s * 100)} {percentile(errors, s) * 100:.3f} %" for s in (0.5, 0.95))
        print(f"{len(errors)} rows: {shares} max {max(errors) * 100:.3f} %")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
