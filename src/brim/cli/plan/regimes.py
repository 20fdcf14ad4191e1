"""``brim plan --regimes``: ways to run models of 1 to 4 times the memory, as a table, a plot and an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.cli.options import print_json, write_html
from brim.core.replacing import write_text
from brim.errors import UsageError

if TYPE_CHECKING:
    from brim.run.plan.regimes import Regimes
    from brim.run.plan.request import Request


def show(request: Request, plot: Path | None, html: Path | None, as_json: bool) -> None:
    """Compare, and print or write what was found. ``plot`` is an SVG file."""
    from rich.console import Console

    from brim.run.plan.regimes import regimes
    from brim.run.plan.request import machine_of

    if request.task != "generate":
        raise UsageError(f"--regimes was given with --task {request.task}.", "It compares ways to generate.")
    request.check()
    with Console(stderr=True).status("Comparing ways to run it"):
        found = regimes(request, machine_of(request))
    if plot is not None:
        _write_plot(plot, found)
    if html is not None:
        _write_html(html, found)
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(found.table())
    console.print(found.answer(), markup=False)
    for assumed in found.assumed:
        console.print(f"assumed: {assumed}", markup=False)


def _write_plot(path: Path, found: Regimes) -> None:
    try:
        write_text(path, found.svg())
    except OSError as error:
        raise UsageError(f"A plot was to be written to {path}.", f"{error}.", "Name another file.") from error
    click.echo(f"plot: {path}", err=True)


def _write_html(path: Path, found: Regimes) -> None:
    from brim.report.html.page import Table

    columns = ("times the memory", *(f"{way}_s" for way in found.ways))
    tokens = tuple((point.ratio, *(point.token_s[way] for way in found.ways)) for point in found.points)
    prompts = tuple((point.ratio, *(point.prompt_s[way] for way in found.ways)) for point in found.points)
    crossings = tuple((one.ratio, one.first, one.second) for one in found.crossings)
    tables = [
        Table(title="Time per token", columns=columns, rows=tokens),
        Table(title="Time per prompt", columns=columns, rows=prompts),
        Table(title="Where they cross", columns=("from", "instead of", "faster is"), rows=crossings),
        Table(title="What was assumed", columns=("of the machine",), rows=tuple((text,) for text in found.assumed)),
    ]
    title = f"{found.model} on {found.hardware}: ways to generate"
    write_html(path, [], title=title, tables=[table for table in tables if table.rows], notes=[found.answer()])
