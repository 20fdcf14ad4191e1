"""Predicted against measured: one row per run, and how far off they are as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. ``rivals``: other estimators' relative errors by name; ``seconds``: what the prediction took."""

    name: str
    predicted_bytes: float
    measured_bytes: float
    seconds: float = 0.0
    rivals: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def remembered(predict: Callable[[dict[str, str]], Row], path: Path) -> Callable[[dict[str, str]], Row]:
    """``predict``, with what it found written to the file at once, and read from there where it was found before."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {json.dumps(found["of"]): Row(**found["row"]) for found in map(json.loads, lines)}

    def once(of: dict[str, str]) -> Row:
        key = json.dumps(of)
        if key not in known:
            known[key] = predict(of)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": of, "row": asdict(known[key])}) + "\n")
        return known[key]

    return once


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"rows": len(sizes), "median": median(sizes), "p95": quantile(sizes, 0.95), "max": max(sizes)}


def document(title: str, rows: Sequence[Row]) -> dict[str, Any]:
    rivals = sorted({name for row in rows for name in row.rivals})
    return {
        "source": title,
        "summary": summary([row.error for row in rows]),
        "rivals": {name: summary([r.rivals[name] for r in rows if name in r.rivals]) for name in rivals},
        "rows": [asdict(row) | {"error": row.error} for row in rows],
    }


def show(title: str, rows: Sequence[Row], console: Console) -> None:
    made = document(title, rows)
    table = Table(title=title, title_justify="left")
    notes = list(dict.fromkeys(name for row in rows for name in row.notes))
    for column in ("run", "predicted MiB", "measured MiB", "error", *notes, *made["rivals"], "s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        table.add_row(
            row.name, f"{row.predicted_bytes / MIB:,.0f}", f"{row.measured_bytes / MIB:,.0f}", f"{row.error:+.2%}",
            *(f"{row.notes[n]:,.1f}" if n in row.notes else "" for n in notes),
            *(f"{row.rivals[n]:+.1%}" if n in row.rivals else "" for n in made["rivals"]),
            f"{row.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    for name, figures in {"brim": made["summary"], **made["rivals"]}.items():
        console.print(
            f"{name:>12}: {figures['rows']} rows, median {figures['median']:.2%}, p95 {figures['p95']:.2%}, "
            f"max {figures['max']:.2%}"
        )
