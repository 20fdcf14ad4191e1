"""What a grid of measured plans says of the planner; the table of planner.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from brim.units import format_bytes, format_seconds

NOISE = 0.05  # by so much the same plan differs between two runs
Row = dict[str, Any]


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """A line per cell and budget, and the errors over all plans that ran."""
    ran = [row for row in rows if not row["problem"]]
    chosen = [row for row in ran if row["kind"] == "chosen"]
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in ran if row["predicted_s"]]
    over = [
        f"{row['cell']} {row['label']}: {tier}"
        for row in chosen
        for tier, limit in row["budget_bytes"].items()
        if row["measured_bytes"].get(tier, 0) > limit
    ]
    lines = [_line(row, ran) for row in chosen]
    return {
        "benchmark": "planner",
        "points": len(ran),
        "cells": len({row["cell"] for row in ran}),
        "problems": [f"{row['cell']} {row['label']}: {row['problem']}" for row in rows if row["problem"]],
        "error_median": statistics.median(errors) if errors else None,
        "error_max": max(errors, default=None),
        "over_budget": over,
        "slower_than_best_max": max((line["slower_than_best"] for line in lines), default=None),
        "slower_than_simple": [line["cell"] for line in lines if (line["slower_than_simple"] or 0.0) > NOISE],
        "rows": lines,
    }


def rivals(rows: Sequence[Row]) -> set[str]:
    """The labels of one cell's plans by which its choices are judged, and of those themselves."""
    ran = [row for row in rows if not row["problem"]]
    found = set()
    for chosen in (row for row in ran if row["kind"] == "chosen"):
        inside = [row for row in _inside(chosen, ran) if row["kind"] != "chosen"]
        best = [min(inside, key=lambda row: row["measured_s"])] if inside else []
        found |= {row["label"] for row in (chosen, *best, *_simple(inside))}
    return found


def _inside(chosen: Row, ran: Sequence[Row]) -> list[Row]:
    """The plans of its cell that were measured to stay in its budget."""
    return [row for row in ran if row["cell"] == chosen["cell"] and _fits(row, chosen["budget_bytes"])]


def _simple(inside: Sequence[Row]) -> list[Row]:
    """The fastest simple one, where there is any."""
    return sorted((row for row in inside if row["kind"] == "simple"), key=lambda row: row["measured_s"])[:1]


def _line(chosen: Row, ran: Sequence[Row]) -> dict[str, Any]:
    """The planner's choice beside the best plans of its cell that were measured to stay in its budget."""
    inside = _inside(chosen, ran)
    best = min([*inside, chosen], key=lambda row: row["measured_s"])
    simple = next(iter(_simple(inside)), None)
    return {
        "cell": chosen["cell"],
        "budget_bytes": chosen["budget_bytes"],
        "measured_bytes": chosen["measured_bytes"],
        "predicted_s": chosen["predicted_s"],
        "measured_s": chosen["measured_s"],
        "best": best["label"],
        "best_s": best["measured_s"],
        "slower_than_best": chosen["measured_s"] / best["measured_s"] - 1,
        "simple": simple["label"] if simple else None,
        "slower_than_simple": chosen["measured_s"] / simple["measured_s"] - 1 if simple else None,
        "compared": len(inside),
    }


def _fits(row: Row, budget_bytes: dict[str, int]) -> bool:
    return all(row["measured_bytes"].get(tier, 0) <= limit for tier, limit in budget_bytes.items())


def show(document: dict[str, Any]) -> None:
    console = Console(highlight=False, width=150)
    table = Table(title="the planner's choice and the best plan measured")
    for column in ("cell", "budget", "held", "predicted", "measured", "best", "which", "slower", "than simple"):
        table.add_column(column, justify="left" if column in ("cell", "which") else "right")
    for line in document["rows"]:
        simple = line["slower_than_simple"]
        table.add_row(
            line["cell"],
            _bytes(line["budget_bytes"]),
            _bytes({tier: line["measured_bytes"].get(tier, 0) for tier in line["budget_bytes"]}),
            format_seconds(line["predicted_s"]),
            format_seconds(line["measured_s"]),
            format_seconds(line["best_s"]),
            line["best"],
            f"{line['slower_than_best']:.1%}",
            "-" if simple is None else f"{simple:.1%}",
        )
    console.print(table)
    console.print(f"{document['points']} plans measured in {document['cells']} cells")
    if document["error_median"] is not None:
        console.print(
            f"predicted seconds: median error {document['error_median']:.1%}, largest {document['error_max']:.1%}"
        )
    slower = [f"{cell}: its choice is slower than a simple plan" for cell in document["slower_than_simple"]]
    for text in (*document["over_budget"], *slower, *document["problems"]):
        console.print(f"wrong: {text}", markup=False)


def _bytes(amounts: dict[str, int]) -> str:
    return " + ".join(format_bytes(count) for count in amounts.values())
