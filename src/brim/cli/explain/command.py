"""``brim explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.cli.options import TRACE, Command, OutputFile, html_option, json_option, print_json, readable, write_html
from brim.errors import UsageError

if TYPE_CHECKING:
    from brim.cli.explain.answers import Explained


@click.command(cls=Command)
@click.argument("sources", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE...", nargs=-1)
@click.option("--diff", "compared", is_flag=True, help="Compare two files of one kind: BEFORE AFTER.")
@click.option(
    "--what-if",
    "settings",
    multiple=True,
    metavar="CONF",
    help='Allocator settings to replay a snapshot under, as in "expandable_segments:True". May be repeated; '
    '"best" searches for the setting with which least is reserved.',
)
@click.option(
    "--perfetto",
    type=OutputFile(TRACE),
    help="Also write the run as a trace for ui.perfetto.dev.",
)
@html_option
@json_option
def explain(
    sources: tuple[Path, ...],
    compared: bool,
    settings: tuple[str, ...],
    perfetto: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Explain what memory did: why it ran out, what took it, what would help.

    FILE is a log with an out-of-memory message, a snapshot of torch.cuda.memory._dump_snapshot() or brim.watch
    (nothing in it is run), a trace of PyTorch's profiler, a report of Nsight Systems (sqlite) or a timeline of brim;
    its content tells which. "-" reads from the standard input.
    """
    if compared:
        found = _compared(sources, settings)
    elif len(sources) == 1:
        found = _one(sources[0], settings)
    else:
        raise UsageError(
            f"{len(sources)} files were to be explained.", todo="Give one, or --diff and two: BEFORE AFTER."
        )
    if perfetto is not None:
        _write_perfetto(perfetto, found)
    if html is not None:
        _write_html(html, found)
    if as_json:
        print_json(found.body)
        return
    for line in found.lines:
        click.echo(readable(line))  # names are of any origin, and a file is explained because it is not known


def _one(given: Path, settings: tuple[str, ...]) -> Explained:
    from brim.cli.explain import answers as explained
    from brim.cli.explain import source as explain_source

    with explain_source.opened(given) as source:
        if settings and source.kind != explain_source.SNAPSHOT:
            raise UsageError(
                f"--what-if was given for {source.name}.",
                "It holds no run that could be replayed.",
                "Give a memory snapshot.",
            )
        return explained.BY_KIND[source.kind](source, settings)


def _compared(sources: tuple[Path, ...], settings: tuple[str, ...]) -> Explained:
    from brim.cli.explain import diff as explain_diff
    from brim.cli.explain import source as explain_source

    if len(sources) != 2:
        raise UsageError(f"{len(sources)} files were to be compared.", todo="Give two: BEFORE AFTER.")
    if settings:
        raise UsageError(
            "--what-if was given with --diff.",
            "Two runs were to be compared, none replayed under other settings.",
            "Give one snapshot and --what-if.",
        )
    if sources[0] == sources[1] == Path("-"):
        raise UsageError("The standard input was to be compared with itself.", todo="Give at least one file.")
    with explain_source.opened(sources[0]) as before, explain_source.opened(sources[1]) as after:
        return explain_diff.compared(before, after)


def _write_perfetto(path: Path, found: Explained) -> None:
    from brim.report import perfetto

    if not found.views:
        raise UsageError(f"A trace was to be written to {path}.", "What was given holds no events, only a message.")
    perfetto.write(path, [timeline for _, timeline in found.views])


def _write_html(path: Path, found: Explained) -> None:
    from brim.report.html.page import Table, View

    views = [View(timeline=timeline, title=title) for title, timeline in found.views]
    tables = [Table(title=title, columns=columns, rows=rows) for title, columns, rows in found.tables]
    first, *rest = [*found.notes, ""]
    notes = [note for note in rest if note]
    write_html(path, views, title=found.title, verdict=first, tables=tables, notes=notes)
