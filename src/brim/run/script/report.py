"""What ``brim run --report`` writes: what became of each model, and what memory did, as a page or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.core.replacing import write_text
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
            raise UsageError(f"The report was to be written to {path}.", f"{error}.", "Name another file.") from error
        return
    from brim.report.html.page import Table, View, write

    tables = [Table(title="Models", columns=(*_COLUMNS, "why"), rows=tuple(_row(one) for one in outcomes))]
    if unified is not None:
        rows = tuple(unified.statistics().items())
        tables.append(Table(title="Unified memory", columns=("what", "bytes"), rows=rows))
    views = [
        View(timeline=one.timeline, title=one.name, plan=one.plan) for one in outcomes if one.timeline is not None
    ]
    write(path, views, title="brim run", tables=tables)


def report(settings: Settings, outcomes: Sequence[Outcome], unified: Unified | None) -> dict[str, Any]:
    """The report as JSON values. Amounts are bytes by tier; ``held_bytes`` is what brim's pools held at most."""
    return {
        "mode": settings.mode,
        "device": settings.device,
        "models": [
            {
                "model": one.name,
                "task": one.task,
                "choice": one.choice,
                "why": one.why,
                "parameter_bytes": one.parameter_bytes,
                "budget_bytes": dict(one.budget_bytes),
                "untouched_bytes": dict(one.untouched_bytes),
                "promised_bytes": dict(one.promised_bytes),
                "held_bytes": {pool.tier: pool.peak_bytes for pool in one.pools},
                "techniques": {} if one.plan is None else _techniques(one),
            }
            for one in outcomes
        ],
        "unified": None if unified is None else unified.statistics(),
    }


def _techniques(outcome: Outcome) -> dict[str, dict[str, int]]:
    """How many blocks had which choice, by technique."""
    assert outcome.plan is not None
    made: dict[str, dict[str, int]] = {}
    for decision in outcome.plan.decisions:
        counts = made.setdefault(decision.technique, {})
        counts[decision.choice] = counts.get(decision.choice, 0) + 1
    return made


def _row(one: Outcome) -> tuple[str | int | None, ...]:
    tier = next(iter(one.untouched_bytes or one.budget_bytes), "")
    amounts = (one.budget_bytes, one.untouched_bytes, one.promised_bytes)
    return (one.name, one.task, one.choice, one.parameter_bytes, *(a.get(tier) for a in amounts), one.why)
