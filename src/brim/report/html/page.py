"""Reports as single HTML files without network access. No text in them can run."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from brim.core import Plan, Timeline
from brim.core.files import replacing
from brim.errors import UsageError
from brim.report.html.data import Detail, view_data
from brim.report.html.packing import plain, script_json

MOST_BYTES = 10_000_000  # of a page: small enough for mail
Cell = str | int | float | bool | None

_SCRIPTS = (
    "format.js", "unpack.js", "model.js", "theme.js", "chart.js", "chart_draw.js", "lanes.js", "map.js", "tables.js",
    "card.js", "main.js",
)  # fmt: skip
_STYLES = ("theme.css", "page.css")
MOST_ROWS = 1_000  # of a table, as tables.js shows it
_LARGE_EVENTS = 1_000_000  # a run as long as this fills most of a page
_LEAST_EVENTS = 1_000  # with less detail around a peak the page is useless


@dataclass(frozen=True, kw_only=True)
class View:
    """A timeline with its title ("before"; "": the timeline's own name).

    The promise and the budget of ``plan`` are drawn as lines, its decisions are listed. ``phases`` are stretches of
    the run, marked above its picture: name and number of the first event, in order.
    """

    timeline: Timeline
    title: str = ""
    plan: Plan | None = None
    phases: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows for people; ``note`` is a sentence under the title.

    Of more than ``MOST_ROWS`` the first are shown, or with ``spread`` evenly spaced ones, the first and the last
    among them; the note then says so.
    Columns named ``bytes``, ``..._bytes``, ``..._s`` or ``..._share`` are shown with units and without that end.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    spread: bool = False


def write(path: str | Path, document: str) -> int:
    """Write a page and return its bytes. Raises UsageError if the file cannot be written."""
    data = document.encode()
    try:
        with replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise UsageError(f"Cannot write the report to {path}.", f"{error}.", "Name another file.") from error
    return len(data)


def page(
    views: Sequence[View],
    *,
    title: str,
    verdict: str = "",
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
    one_axis: bool = False,
) -> str:
    """Return a page of at most ``MOST_BYTES`` for any number of events.

    ``views`` stand below each other on one scale of bytes: predicted and measured, before and after, several devices.
    ``one_axis``: their times count from the same moment, so they are drawn, zoomed and moved together.
    ``verdict`` is the first sentence, ``notes`` are paragraphs below it. Texts may be of any origin.
    """
    listed = [*(table for view in views for table in _view_tables(view, several=len(views) > 1)), *tables]
    rest = {
        "title": plain(title),
        "verdict": plain(verdict),
        "notes": [plain(note) for note in notes],
        "tables": _tables_data(listed),
        "one_axis": one_axis,
    }
    detail = Detail()
    large = sum(len(view.timeline) > _LARGE_EVENTS for view in views)
    for _ in range(max(large - 1, 0).bit_length()):  # several would not fit
        detail = detail.less()
    while True:
        data = script_json(
            rest | {"views": [view_data(v.timeline, _title(v), v.plan, detail, v.phases) for v in views]}
        )
        document = _document(plain(title), data)
        if len(document.encode()) <= MOST_BYTES or detail.exact_events < _LEAST_EVENTS:
            return document
        detail = detail.less()


def _title(view: View) -> str:
    return view.title or f"{view.timeline.name} ({'measured' if view.timeline.measured else 'predicted'})"


def _document(title: str, data: str) -> str:
    """Style and script are allowed by their digests; everything else that could load or run is forbidden."""
    style = "\n".join(_asset(name) for name in _STYLES)
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<main id="page"><noscript>This report draws itself: allow scripts for this file.</noscript></main>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _asset(name: str) -> str:
    return resources.files("brim.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _view_tables(view: View, *, several: bool) -> list[Table]:
    """Return tables of the plan's decisions and settings, and of the timeline's facts."""
    tables, of = [], f": {_title(view)}" if several else ""
    if view.plan is not None:
        plan = view.plan
        rows = tuple((d.technique, d.block, d.choice, d.bytes) for d in plan.decisions)
        if rows:
            columns = ("technique", "block", "choice", "held_bytes")
            note = f"For {plan.task} on {plan.hardware}."
            tables.append(Table(title=f"Decisions{of}", columns=columns, rows=rows, note=note))
        if plan.settings:
            settings = tuple(plan.settings.items())
            tables.append(Table(title=f"Settings{of}", columns=("setting", "value"), rows=settings))
    facts = tuple(sorted(view.timeline.facts.items()))
    if facts:
        tables.append(Table(title=f"Facts{of}", columns=("fact", "value"), rows=facts))
    return tables


def _tables_data(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return all tables in at most half of a page's bytes, with fewer rows if needed."""
    most = MOST_ROWS
    while True:
        shown = [_table_data(table, most) for table in tables]
        if most == 1 or len(script_json(shown)) <= MOST_BYTES // 2:
            return shown
        most = max(most // 2, 1)


def _table_data(table: Table, most: int) -> dict[str, Any]:
    count, rows, left_out = len(table.rows), table.rows, ""
    if count > most and table.spread:
        rows = tuple(rows[number * (count - 1) // max(most - 1, 1)] for number in range(most))
        left_out = f"{most:,} of {count:,}, evenly spread."
    elif count > most:
        rows = rows[:most]
        left_out = f"The first {most:,} of {count:,}."
    return {
        "title": plain(table.title),
        "note": f"{plain(table.note)} {left_out}".strip(),
        "columns": [plain(column) for column in table.columns],
        "rows": [[_cell(cell) for cell in row] for row in rows],
    }


def _cell(cell: Cell) -> Cell:
    """Return infinities and NaN, which JSON does not have, as text."""
    if cell is None or isinstance(cell, bool | int):
        return cell
    if isinstance(cell, float):
        return cell if abs(cell) < float("inf") else str(cell)  # false for NaN too
    return plain(str(cell))
