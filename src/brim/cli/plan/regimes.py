"""``brim plan --regimes``: ways to run models of 1 to 4 times the memory, as a table, a plot and an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.cli.console import Console
from brim.cli.options import print_json, write_html
from brim.core.files import write_text
from brim.errors import UsageError

if TYPE_CHECKING:
    from brim.planning.regimes import Regimes
    from brim.planning.request import Request


def show(request: Request, plot: Path | None, html: Path | None, as_json: bool) -> None:
    """Compare, and print or write the answer. ``plot`` is an SVG file."""
    from brim.planning.regimes import regimes
    from brim.planning.request import machine_of

    if request.task != "generate":
        raise UsageError(f"Cannot use --regimes with --task {request.task}.", "It compares ways to generate.")
    request.check()
    with Console(stderr=True).status("Comparing ways to run it"):
        answer = regimes(request, machine_of(request))
    if plot is not None:
        _write_plot(plot, answer)
    if html is not None:
        _write_html(html, answer)
    if as_json:
        print_json(answer.to_json())
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(answer.table())
    console.print(answer.answer())
    for assumed in answer.assumed:
        console.print(f"assumed: {assumed}")


def _write_plot(path: Path, answer: Regimes) -> None:
    try:
        write_text(path, answer.svg())
    except OSError as error:
        raise UsageError(f"Cannot write a plot to {path}.", f"{error}.", "Name another file.") from error
    click.echo(f"plot: {path}", err=True)


def _write_html(path: Path, answer: Regimes) -> None:
    from brim.report.html.page import Table, page

    columns = ("times the memory", *(f"{way}_s" for way in answer.ways))
    tokens = tuple((point.ratio, *(point.token_s[way] for way in answer.ways)) for point in answer.points)
    prompts = tuple((point.ratio, *(point.prompt_s[way] for way in answer.ways)) for point in answer.points)
    crossings = tuple((crossing.ratio, crossing.first, crossing.second) for crossing in answer.crossings)
    tables = [
        Table(title="Time per token", columns=columns, rows=tokens),
        Table(title="Time per prompt", columns=columns, rows=prompts),
        Table(title="Where they cross", columns=("from", "instead of", "faster is"), rows=crossings),
        Table(title="What was assumed", columns=("of the machine",), rows=tuple((text,) for text in answer.assumed)),
    ]
    title = f"{answer.model} on {answer.hardware}: ways to generate"
    write_html(path, page([], title=title, tables=[table for table in tables if table.rows], notes=[answer.answer()]))
