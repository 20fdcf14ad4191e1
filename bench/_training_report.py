"""From rounds to medians, equal memory and equal speed; the table of training.py."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from _harness import Spread
from brim.units import format_bytes
from peers.training import training_contender

EQUAL_SPEED = 0.97  # of the tokens/s: the same program twice differs by more than 1 %
CLOSE = 1e-4  # relative, of losses computed in pieces
REFERENCE = "train_plain"
Rounds = list[dict[str, dict[str, Any]]]


def summarize(rounds: Rounds, missing: dict[str, str], budgets: dict[str, int], tokens: int) -> dict[str, Any]:
    """A row per contender and budget, and per peer what brim does at its memory and at its speed."""
    rows: dict[str, dict[str, Any]] = {}
    for label in rounds[0]:
        good = [found[label] for found in rounds if "losses" in found[label]]
        problems = [found[label]["problem"] for found in rounds if "problem" in found[label]]
        rows[label] = {"rounds": len(good), **({"problem": problems[0]} if problems else {})}
        if budgets[label]:
            rows[label]["budget_bytes"] = budgets[label]
        if good:
            rows[label] |= _row(good, tokens, rounds[0][REFERENCE])
    rows |= {label: {"problem": reason} for label, reason in missing.items()}
    return {
        "benchmark": "training_cpu",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tokens_per_step": tokens,
        "rows": rows,
        "brim_against": {label: against(rows, label) for label in rows if "brim" not in label},
    }


def _row(good: list[dict[str, Any]], tokens: int, reference: dict[str, Any]) -> dict[str, Any]:
    """The first step of each run makes the states and is not timed."""
    speeds = [tokens / Spread.of(found["step_s"][1:]).median for found in good]
    wanted = reference["losses"]
    return {
        "tokens_per_s": vars(Spread.of(speeds)),
        "peak_growth_bytes": max(found["peak_growth_bytes"] for found in good),
        "limited": good[0]["limited"],
        "losses": good[0]["losses"],
        "losses_equal": all(found["losses"] == wanted for found in good),
        "losses_largest_difference": max(
            abs(one - other) / abs(other)
            for found in good
            for one, other in zip(found["losses"], wanted, strict=True)
        ),
        "parameters_equal": all(found["parameters"] == reference["parameters"] for found in good),
        "facts": good[0]["facts"],
    }


def against(rows: dict[str, dict[str, Any]], peer: str) -> dict[str, Any]:
    """brim's best tokens/s over the peer's within the peer's memory; brim's least peak at the peer's speed."""
    if "tokens_per_s" not in rows[peer]:
        return {}
    speed, peak_bytes = rows[peer]["tokens_per_s"]["median"], rows[peer]["peak_growth_bytes"]
    found: dict[str, Any] = {}
    for name in ("train_brim", "train_brim_fit"):
        own = [row for label, row in rows.items() if label.startswith(f"{name} ") and "tokens_per_s" in row]
        within = [row["tokens_per_s"]["median"] for row in own if row["peak_growth_bytes"] <= peak_bytes]
        as_fast = [row["peak_growth_bytes"] for row in own if row["tokens_per_s"]["median"] >= EQUAL_SPEED * speed]
        if within:
            found[f"{name}_speed_at_equal_memory"] = max(within) / speed
        if as_fast:
            found[f"{name}_bytes_at_equal_speed"] = min(as_fast)
            found[f"{name}_memory_at_equal_speed"] = min(as_fast) / peak_bytes
    return found


def wrong(document: dict[str, Any]) -> list[str]:
    """Contenders whose losses, or parameters, are not what they must be."""
    found = []
    for label, row in document["rows"].items():
        if "losses" not in row:
            continue
        exact = training_contender(label.split()[0]).LOSSLESS and row["facts"].get("exact", True)
        if row["losses_largest_difference"] > CLOSE:
            found.append(f"{label} by {row['losses_largest_difference']:.1e}")
        elif exact and "brim" in label and not (row["losses_equal"] and row["parameters_equal"]):
            found.append(f"{label}: not bit for bit")
    return found


def show(document: dict[str, Any]) -> None:
    """The table on stdout."""
    console = Console(width=150)
    table = Table(
        "contender", "tokens/s", "peak RSS growth", "budget", "losses", "parameters", "plan", padding=(0, 0)
    )
    for label, row in document["rows"].items():
        table.add_row(*_cells(label, row))
    console.print(table)
    for peer, found in document["brim_against"].items():
        for name in ("train_brim", "train_brim_fit"):
            speed, memory = (
                found.get(f"{name}_{what}") for what in ("speed_at_equal_memory", "memory_at_equal_speed")
            )
            if speed is not None or memory is not None:
                console.print(
                    f"{training_contender(name).TITLE} against {training_contender(peer).TITLE}: "
                    f"{_times(speed)} the tokens/s at equal memory, {_times(memory)} the memory at equal speed"
                )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def _cells(label: str, row: dict[str, Any]) -> list[str]:
    if "tokens_per_s" not in row:
        return [label, row.get("problem", "did not run")]
    name, _, budget = label.partition(" ")
    speed = row["tokens_per_s"]
    largest = row["losses_largest_difference"]
    return [
        f"{training_contender(name).TITLE} {budget}".rstrip(),
        f"{speed['median']:.0f} ({speed['least']:.0f}-{speed['most']:.0f})",
        format_bytes(row["peak_growth_bytes"]),
        format_bytes(row["budget_bytes"]) if "budget_bytes" in row else "-",
        "equal" if row["losses_equal"] else f"differ {largest:.1e}",
        "equal" if row["parameters_equal"] else "differ",
        _plan(row["facts"]),
    ]


def _plan(facts: dict[str, Any]) -> str:
    """What brim chose, in a few words."""
    choice, settings = facts.get("choice", {}), facts.get("settings", {})
    words = [f"states on {place}" for place in choice.get("optimizer_offload", ()) if place != "keep"]
    words += [f"{'/'.join(choice['checkpointing'])} checkpointing"] if "checkpointing" in choice else []
    words += [f"micro-batch {settings['micro_batch']}"] if settings else []
    words += ["loss in pieces"] if settings.get("chunk_tokens") else []
    words += ["update in backward"] if settings.get("update_in_backward") else []
    words += ["weights streamed"] if set(choice.get("weight_streaming", [])) - {"resident"} else []
    return ", ".join(words)
