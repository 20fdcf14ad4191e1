"""What ``brim generate`` and ``brim train`` tell of a run's two Timelines: as it was foreseen, and as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from brim.report.idle import attribute

if TYPE_CHECKING:
    from brim.core import Plan, Timeline
    from brim.report.html.page import Table, View

MOST_WAITS = 50


def compute_of(measured: Timeline, predicted: Timeline | None) -> dict[str, Any]:
    """Seconds in which compute worked and waited, and for what: measured, and as the plan foresees it."""
    runs = {"measured": measured} | ({} if predicted is None else {"predicted": predicted})
    made = {}
    for name, timeline in runs.items():
        found = attribute(timeline).to_json()
        made[name] = found | {"waits": found["waits"][:MOST_WAITS]}
    return made


def views_of(measured: Timeline, predicted: Timeline | None, plan: Plan) -> list[View]:
    """The measured run with the plan's lines, and the predicted one below it."""
    from brim.report.html.page import View

    views = [View(timeline=measured, plan=plan)]
    return views if predicted is None else [*views, View(timeline=predicted)]


def compute_tables(compute: Mapping[str, Mapping[str, Any]]) -> Sequence[Table]:
    """``compute_of`` as tables."""
    from brim.report.html.page import Table

    known = {name: found for name, found in compute.items() if found["computed"]}
    if not known:
        return []
    sums = tuple((name, found["wall_s"], found["busy_s"], found["idle_s"]) for name, found in known.items())
    waits = tuple(
        (name, one["label"], one["cause"], one["seconds"], one["count"])
        for name, found in known.items()
        for one in found["waits"]
    )
    made = [Table(title="Compute, measured and predicted", columns=("run", "all_s", "busy_s", "idle_s"), rows=sums)]
    columns = ("run", "waited for", "cause", "time_s", "times")
    return [*made, Table(title="What compute waited for", columns=columns, rows=waits)] if waits else made
