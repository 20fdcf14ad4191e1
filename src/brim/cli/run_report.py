"""The report of ``brim generate`` and ``brim train`` on a run's two Timelines, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from brim.cli import verdict
from brim.report.idle import attribute
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.console import Console
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


def print_promise(
    console: Console,
    plan: Plan,
    promised: Mapping[str, int],
    measured: Mapping[str, int],
    seconds: tuple[str, float | None],
    precision: tuple[str | None, str],
) -> None:
    """Print each tier's budget, promise and measured bytes, and the ``seconds`` of a step, with its name."""
    from rich.table import Table

    table = Table(title="promised and measured", title_justify="left")
    for column in ("", "budget", "promised", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    for tier, count in measured.items():
        cells = (plan.budget_bytes.get(tier), promised.get(tier, 0), count)
        table.add_row(tier.upper(), *("" if cell is None else format_bytes(cell) for cell in cells))
    step, measured_s = seconds
    shown = (format_seconds(each) if each else "-" for each in (plan.promise.step_s, measured_s))
    table.add_row(f"time per {step}", "", *shown)
    console.print(table)
    console.print(verdict.of_precision(*precision), highlight=False, soft_wrap=True)


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
