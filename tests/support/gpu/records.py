"""Records of runs on real GPUs (``bench/gpu_truth.py`` makes them), and predictions of the same cases beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from support.accuracy.table import summary
from support.gpu.runs import Record, predict
from support.gpu.zoo import Case

RECORDS = Path(__file__).resolve().parents[3] / "measurements" / "gpu_truth.jsonl"
QUANTITIES = ("allocated", "reserved", "process", "step_s")
_WIDTH = 150  # of the table: a case and its error in one line


def predictions_of(records: list[Record]) -> dict[str, Record]:
    """Predict recorded runs again, here, by what the records say of themselves."""
    made = {}
    for record in records:
        if record.get("error"):  # of a crash only the case is recorded
            continue
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
    convolutional = {record["case"]["name"] for record in records if record["case"]["family"] == "cnn"}
    totals = Table(title=f"{len(records)} runs", title_justify="left")
    for column in ("of", "quantity", "rows", "within 0.01 %", "median", "p95", "max"):
        totals.add_column(column, justify="right")
    for of, counts in (("all", lambda name: True), ("convolutional networks", convolutional.__contains__),
                       ("others", lambda name: name not in convolutional)):  # fmt: skip
        for quantity, rows in found.items():
            if errors_of := [error for name, error in rows if counts(name)]:
                told = summary(errors_of)
                exact = sum(abs(error) <= 1e-4 for error in errors_of)
                totals.add_row(of, quantity, str(told["rows"]), str(exact),
                               *(f"{told[key]:.3%}" for key in ("median", "p95", "max")))  # fmt: skip
    console.print(totals)
    console.print(f"capped at the upper bound: {capped(records)}")
