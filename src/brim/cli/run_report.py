"""The report of ``brim generate`` and ``brim train`` on a run's two Timelines, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from brim.report.idle import attribute

if TYPE_CHECKING:
    from brim.core import Plan, Timeline
    from brim.report.html.page import Table, View

MOST_WAITS = 50


def compute_of(measured: Timeline, predicted: Timeline | None) -> dict[str, Any]:
    """Return the seconds of computing and waiting, measured and predicted."""
    runs = {"measured": measured} | ({} if predicted is None else {"predicted": predicted})
    compute = {}
    for name, timeline in runs.items():
        idle = attribute(timeline).to_json()
        compute[name] = idle | {"waits": idle["waits"][:MOST_WAITS]}
    return compute


def views_of(measured: Timeline, predicted: Timeline | None, plan: Plan) -> list[View]:
    """Return views of the measured run with the plan's lines, and of the predicted one."""
    from brim.report.html.page import View

    views = [View(timeline=measured, plan=plan)]
    return views if predicted is None else [*views, View(timeline=predicted)]


def memory_table(
    timeline: Timeline, budget: Mapping[str, int], promised: Mapping[str, int], measured: Mapping[str, int]
) -> Table:
    """Return each tier's budget, promise and measured bytes, and the part of these in brim's pools."""
    from brim.report.html.page import Table

    rows = []
    for tier, count in measured.items():
        pools = timeline.peak_bytes(tier)
        rows.append((tier.upper(), budget.get(tier), promised.get(tier), count, pools, max(count - pools, 0)))
    return Table(
        title="Memory, promised and measured",
        columns=("tier", "budget_bytes", "promised_bytes", "measured_bytes", "pools_bytes", "beside_bytes"),
        rows=tuple(rows),
        note="Promised and measured are peaks of the whole process. Pools is the peak of brim's memory pools, as in "
        "the chart; beside is the rest of the measured peak: the program, its libraries, and freed memory that the "
        "heap keeps.",
    )


def compute_tables(compute: Mapping[str, Mapping[str, Any]]) -> Sequence[Table]:
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
    return [*tables, Table(title="Causes of waiting", columns=columns, rows=waits)] if waits else tables
