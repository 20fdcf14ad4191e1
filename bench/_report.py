"""From rounds to medians, eta and ratios; the table of streaming.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from _harness import Spread
from brim.units import format_bytes

MEASURED = ("load_s", "cold_s", "steady_s", "token_s")
COUNTED = ("load_read_bytes", "cold_read_bytes", "steady_read_bytes", "token_read_bytes", "cached_before_bytes")
PEAKS = ("peak_rss_growth_bytes", "peak_anonymous_growth_bytes")
_reference: dict[str, torch.Tensor] = {}


def compare_logits(label: str, file: Path) -> dict[str, Any]:
    """Against the reference's, which runs first in every round. allclose with the tolerance of float32 kernels."""
    logits = load_file(file)["logits"].clone()
    reference = _reference.setdefault("logits", logits)
    return {
        "logits_equal": torch.equal(logits, reference),
        "logits_close": torch.allclose(logits, reference, rtol=1e-3, atol=1e-3),
        "logits_largest_difference": float((logits - reference).abs().max()),
    }


def summarize(
    rounds: list[dict[str, dict[str, Any]]], missing: dict[str, str], weights_bytes: int, budgets: dict[str, int]
) -> dict[str, Any]:
    """Medians over the rounds, with eta and how many times as long as brim each took."""
    rate = Spread.of([r["raw"]["read_bytes_per_s"] for r in rounds]).median
    whole = [r["resident"] for r in rounds if "steady_s" in r["resident"]]
    compute_s = Spread.of([w["steady_s"] for w in whole]).median if whole else 0.0
    rows = {}
    for label in rounds[0]:
        if label == "raw":
            continue
        documents = [r[label] for r in rounds if "cold_s" in r[label]]
        problems = [r[label]["problem"] for r in rounds if "problem" in r[label]]
        rows[label] = _row(documents, problems, weights_bytes, budgets[label], rate, compute_s)
    rows |= {label: {"problem": reason} for label, reason in missing.items()}
    _add_ratios(rows)
    bound = {"read_bytes_per_s": rate, "compute_s": compute_s, "raw_read_s": weights_bytes / rate}
    return {"bound": bound, "contenders": rows, "rounds": rounds}


def _row(
    documents: list[dict[str, Any]],
    problems: list[str],
    weights_bytes: int,
    budget_bytes: int,
    rate: float,
    compute_s: float,
) -> dict[str, Any]:
    row: dict[str, Any] = {"budget_bytes": budget_bytes, "rounds": len(documents)}
    if problems:
        row |= {"problem": problems[0], "failed_rounds": len(problems)}
    if not documents:
        return row
    for key in MEASURED:
        if key in documents[0]:
            row[key] = vars(Spread.of([d[key] for d in documents]))
    row |= {key: Spread.of([d[key] for d in documents]).median for key in COUNTED if key in documents[0]}
    row |= {key: max(d[key] for d in documents) for key in PEAKS}
    row |= {key: all(d[key] for d in documents) for key in ("logits_equal", "logits_close")}
    row["limited"] = documents[0]["limited"]
    # What it did not read again it held; the stricter bound allows for all of the budget to hold weights.
    resident_bytes = max(0, weights_bytes - row["steady_read_bytes"])
    for name, resident in (("eta", min(resident_bytes, budget_bytes)), ("eta_of_budget", budget_bytes)):
        bound_s = max(compute_s, (weights_bytes - resident) / rate)
        row |= {f"{name}_bound_s": bound_s, name: bound_s / row["steady_s"]["median"]}
        row[f"{name}_cold"] = bound_s / row["cold_s"]["median"]
    return row


def _add_ratios(rows: dict[str, dict[str, Any]]) -> None:
    own = rows.get("brim_load", {})
    for row in rows.values():
        for key in ("cold_s", "steady_s", "token_s"):
            if key in row and key in own:
                row[f"{key}_over_brim"] = row[key]["median"] / own[key]["median"]


def show(document: dict[str, Any]) -> None:
    """The table on stdout."""
    console = Console(width=150)
    bound = document["bound"]
    console.print(
        f"T_compute {bound['compute_s']:.2f} s; raw read {bound['read_bytes_per_s'] / 1e9:.2f} GB/s, "
        f"all weights {bound['raw_read_s']:.2f} s"
    )
    columns = (
        "contender",
        "load s",
        "cold s",
        "steady s",
        "token s",
        "/ brim",
        "read a forward",
        "RSS growth",
        "anonymous",
        "eta",
        "eta of budget",
        "logits",
    )
    table = Table(*columns, padding=(0, 0))
    for label, row in document["contenders"].items():
        table.add_row(*_cells(label, row))
    console.print(table)


def _cells(label: str, row: dict[str, Any]) -> list[str]:
    if "steady_s" not in row:
        return [label, row.get("problem", "did not run")]
    ratio = f"{row['steady_s_over_brim']:.2f}" if "steady_s_over_brim" in row else "-"
    same = "equal" if row["logits_equal"] else "close" if row["logits_close"] else "DIFFERENT"
    return [
        label,
        f"{row['load_s']['median']:.2f}",
        f"{row['cold_s']['median']:.2f}",
        f"{row['steady_s']['median']:.2f} ({row['steady_s']['least']:.2f}-{row['steady_s']['most']:.2f})",
        f"{row['token_s']['median']:.2f}" if "token_s" in row else "-",
        ratio,
        format_bytes(row["steady_read_bytes"]),
        format_bytes(row["peak_rss_growth_bytes"]),
        format_bytes(row["peak_anonymous_growth_bytes"]),
        f"{row['eta']:.2f}",
        f"{row['eta_of_budget']:.2f}",
        same,
    ]
