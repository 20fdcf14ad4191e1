"""Runs on a real GPU against what brim predicts for them: allocated, reserved, process, seconds, and a safe bound.

    python bench/gpu_truth.py             predict, measure, append to measurements/gpu_truth.jsonl, compare
    python bench/gpu_truth.py --predict   compare what is recorded there; needs no GPU
    python bench/gpu_truth.py --dry-run   the whole path on the CPU with tiny models; nothing is kept

Predictions are made first, in processes that see no GPU. Then every family runs in one fresh process, case by case:
peaks after a few steps, the median of three timed steps, and the same case again with memory capped at the predicted
upper bound. ``position`` 0 is a fresh process; later ones have more kernels loaded, so their context is larger. Cases
that the time limit leaves no room for are not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from _gpu_zoo import CASES, FAMILIES, Case, has_eight_bits
from accuracy.table import summary

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "measurements" / "gpu_truth.jsonl"
QUANTITIES = ("allocated", "reserved", "process", "step_s")
_FAMILY_LIMIT_S = 240.0
_WIDTH = 150  # of the table: a case and its error in one line

Record = dict[str, Any]


def main() -> None:
    options = _options()
    if options.predict:
        records = read(options.output)
        show(records, predictions_of(records))
        return
    names = [name for name in CASES if re.search(options.only, name)]
    families = [family for family in FAMILIES if any(CASES[name].family == family for name in names)]
    end_s = time.monotonic() + options.limit_s
    capability = _capability(options)
    predicted = _predict_all(families, names, capability, options)
    records: list[Record] = []
    for family in families:
        left_s = min(end_s - time.monotonic(), _FAMILY_LIMIT_S)
        if left_s > 0:
            made = _work("measure", family, names, options, {"predicted": predicted, "limit_s": left_s})
            records += made
            if not options.dry_run:
                append(options.output, made)
    show(records, predicted)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="only compare what is recorded")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--only", default="", help="a regular expression of case names")
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--jobs", type=int, default=max(min((os.cpu_count() or 2) // 2, 8), 1))
    parser.add_argument("--output", type=Path, default=RECORDS)
    return parser.parse_args()


def _capability(options: argparse.Namespace) -> tuple[int, int]:
    if options.dry_run:
        return 8, 0
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA GPU here. Use --predict for recorded runs, or --dry-run.")
    return torch.cuda.get_device_capability(0)


# -- workers --------------------------------------------------------------------------------------------------------


def _predict_all(
    families: list[str], names: list[str], capability: tuple[int, int], options: argparse.Namespace
) -> dict[str, Record]:
    request = {"capability": list(capability), "device": "" if options.dry_run else _device_name()}
    with ThreadPoolExecutor(options.jobs) as pool:
        made = pool.map(lambda family: _work("predict", family, names, options, request), families)
        return {record["case"]["name"]: record for part in made for record in part}


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def _work(
    what: str, family: str, names: list[str], options: argparse.Namespace, request: dict[str, Any]
) -> list[Record]:
    """One worker's records. A worker that fails is told and leaves what it wrote before."""
    cases = [CASES[name] for name in names if CASES[name].family == family]
    if not has_eight_bits() and not options.dry_run:
        cases = [case for case in cases if case.optimizer != "adamw8bit"]
    if options.dry_run:
        cases = [case.tiny() for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "records.jsonl"
        document = request | {"what": what, "cases": [asdict(case) for case in cases], "result": str(result),
                              "device_type": "cpu" if options.dry_run else "cuda"}  # fmt: skip
        asked = Path(folder) / "request.json"
        asked.write_text(json.dumps(document))
        environment = dict(os.environ)
        if what == "predict":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, str(HERE / "_gpu_truth_worker.py"), str(asked)], env=environment)
        if done.returncode:
            print(f"{what} {family}: the worker ended with {done.returncode}", file=sys.stderr)
        return read(result)


def predictions_of(records: list[Record]) -> dict[str, Record]:
    """Predict recorded runs again, here, by what the records say of themselves."""
    from _gpu_truth_worker import predict

    made = {}
    for record in records:
        case = Case.of(record["case"])
        made[case.name] = predict(case, tuple(record["capability"]), record["device"])
    return made


def read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def append(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        for record in records:
            handle.write(json.dumps(record) + "\n")


# -- comparison -----------------------------------------------------------------------------------------------------


def errors(records: list[Record], predicted: dict[str, Record]) -> dict[str, list[tuple[str, float]]]:
    """Relative errors of the prediction by quantity, with the case's name; what was not measured is left out."""
    found: dict[str, list[tuple[str, float]]] = {quantity: [] for quantity in QUANTITIES}
    for record in records:
        name = record["case"]["name"]
        if record.get("error") or name not in predicted or predicted[name].get("error"):
            continue
        for quantity in QUANTITIES:
            measured, guess = record["measured"].get(quantity), predicted[name]["predicted"].get(quantity)
            if measured and guess:
                found[quantity].append((name, guess / measured - 1))
    return found


def capped(records: list[Record]) -> dict[str, Any]:
    """How many runs failed at the predicted upper bound, and how far above the measured process it lies."""
    tried = [record["capped"] for record in records if record.get("capped")]
    slack = sorted(one["slack"] for one in tried if one.get("slack") is not None)
    failed = [one for one in tried if not one["ok"]]
    return {"runs": len(tried), "failed": len(failed), "median_slack": slack[len(slack) // 2] if slack else None}


def show(records: list[Record], predicted: dict[str, Record]) -> None:
    console = Console(width=_WIDTH)
    found = errors(records, predicted)
    by_case = {quantity: dict(rows) for quantity, rows in found.items()}
    table = Table(title="predicted / measured - 1", title_justify="left")
    for column in ("case", *QUANTITIES, "capped", "note"):
        table.add_column(column, justify="left" if column in ("case", "note") else "right")
    for record in records:
        name = record["case"]["name"]
        note = record.get("error") or predicted.get(name, {}).get("error")
        cells = [f"{by_case[q][name]:+.2%}" if name in by_case[q] else "" for q in QUANTITIES]
        cap = record.get("capped")
        table.add_row(name, *cells, "" if not cap else "ok" if cap["ok"] else "failed", (note or "")[:80])
    console.print(table)
    totals = Table(title=f"{len(records)} runs", title_justify="left")
    for column in ("quantity", "rows", "median", "p95", "max"):
        totals.add_column(column, justify="right")
    for quantity, rows in found.items():
        if rows:
            told = summary([error for _, error in rows])
            totals.add_row(quantity, str(told["rows"]), *(f"{told[key]:.3%}" for key in ("median", "p95", "max")))
    console.print(totals)
    console.print(f"capped at the upper bound: {capped(records)}")


if __name__ == "__main__":
    main()
