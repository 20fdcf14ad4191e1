"""Report of ``brim run --report``: the outcome for each model and the memory over time, as a page or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.core.files import write_text
from brim.errors import UsageError

if TYPE_CHECKING:
    from brim.run.script.outcome import Outcome
    from brim.run.script.settings import Settings
    from brim.run.script.unified import Unified

_COLUMNS = ("model", "task", "choice", "parameter_bytes", "budget_bytes", "untouched_bytes", "promised_bytes")


def write_report(path: Path, settings: Settings, outcomes: Sequence[Outcome], unified: Unified | None) -> None:
    """Write ``path``: JSON for ``.json``, else a page. Raises UsageError where it cannot be written."""
    document = report(settings, outcomes, unified)
    if path.suffix == ".json":
        try:
            write_text(path, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"Cannot write the report to {path}.", f"{error}.", "Name another file.") from error
        return
    from brim.report.html.page import Table, View, page, write

    tables = [Table(title="Models", columns=(*_COLUMNS, "why"), rows=tuple(_row(outcome) for outcome in outcomes))]
    if unified is not None:
        rows = tuple(unified.statistics().items())
        tables.append(Table(title="Unified memory", columns=("what", "bytes"), rows=rows))
    views = [
        View(timeline=outcome.timeline, title=outcome.name, plan=outcome.plan)
        for outcome in outcomes
        if outcome.timeline is not None
    ]
    write(path, page(views, title="brim run", tables=tables))


def report(settings: Settings, outcomes: Sequence[Outcome], unified: Unified | None) -> dict[str, Any]:
    """The report as JSON values. Amounts are bytes by tier; ``held_bytes`` is the peak of brim's pools."""
    return {
        "mode": settings.mode,
        "device": settings.device,
        "models": [
            {
                "model": outcome.name,
                "task": outcome.task,
                "choice": outcome.choice,
                "why": outcome.why,
                "parameter_bytes": outcome.parameter_bytes,
                "budget_bytes": dict(outcome.budget_bytes),
                "untouched_bytes": dict(outcome.untouched_bytes),
                "promised_bytes": dict(outcome.promised_bytes),
                "held_bytes": {pool.tier: pool.peak_bytes for pool in outcome.pools},
                "techniques": {} if outcome.plan is None else _techniques(outcome),
            }
            for outcome in outcomes
        ],
        "unified": None if unified is None else unified.statistics(),
    }


def _techniques(outcome: Outcome) -> dict[str, dict[str, int]]:
    """Number of blocks per choice, by technique."""
    assert outcome.plan is not None
    counts_by_technique: dict[str, dict[str, int]] = {}
    for decision in outcome.plan.decisions:
        counts = counts_by_technique.setdefault(decision.technique, {})
        counts[decision.choice] = counts.get(decision.choice, 0) + 1
    return counts_by_technique


def _row(outcome: Outcome) -> tuple[str | int | None, ...]:
    tier = next(iter(outcome.untouched_bytes or outcome.budget_bytes), "")
    amounts = (outcome.budget_bytes, outcome.untouched_bytes, outcome.promised_bytes)
    return (
        outcome.name,
        outcome.task,
        outcome.choice,
        outcome.parameter_bytes,
        *(a.get(tier) for a in amounts),
        outcome.why,
    )
