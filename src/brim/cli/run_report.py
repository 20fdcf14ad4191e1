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
    compute = {}
    for name, timeline in runs.items():
        idle = attribute(timeline).to_json()
        compute[name] = idle | {"waits": idle["waits"][:MOST_WAITS]}
    return compute


def views_of(measured: Timeline, predicted: Timeline | None, plan: Plan) -> list[View]:
    """The measured run with the plan's lines, and the predicted one below it."""
    from brim.report.html.page import View

    views = [View(timeline=measured, plan=plan)]
    return views if predicted is None else [*views, View(timeline=predicted)]


def compute_tables(compute: Mapping[str, Mapping[str, Any]]) -> Sequence[Table]:
    """``compute_of`` as tables."""
    from brim.report.html.page import Table

    computed = {name: idle for name, idle in compute.items() if idle["computed"]}
    if not computed:
        return []
    sums = tuple((name, idle["wall_s"], idle["busy_s"], idle["idle_s"]) for name, idle in computed.items())
    waits = tuple(
        (name, wait["label"], wait["cause"], wait["seconds"], wait["count"])
        for name, idle in computed.items()
        for wait in idle["waits"]
    )
    tables = [Table(title="Compute, measured and predicted", columns=("run", "all_s", "busy_s", "idle_s"), rows=sums)]
    columns = ("run", "waited for", "cause", "time_s", "times")
    return [*tables, Table(title="What compute waited for", columns=columns, rows=waits)] if waits else tables
