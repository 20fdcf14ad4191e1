"""``brim explain``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.cli.options import command, html_field, json_field, print_json, write_html
from brim.core.options import option
from brim.errors import UsageError

if TYPE_CHECKING:
    from brim.cli.explain.answers import Explained


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The options of ``brim explain``."""

    sources: tuple[Path, ...] = option(
        (), kind=click.Path(path_type=Path, allow_dash=True), argument=True, metavar="FILE..."
    )
    diff: bool = option(False, "Compare two files of the same kind: BEFORE AFTER.")
    what_if: tuple[str, ...] = option(
        (),
        'Allocator settings to replay a snapshot under, as in "expandable_segments:True". May be repeated; '
        '"best" searches for the setting that reserves the least memory.',
        metavar="CONF",
    )
    html: Path | None = html_field()
    as_json: bool = json_field()


@command(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Explain the memory of a run: why it ran out, what used it, what would help.

    FILE is a log with an out-of-memory message, a snapshot of torch.cuda.memory._dump_snapshot() or brim.watch (no
    code in it is run), a trace of PyTorch's profiler or a timeline of brim; brim recognizes the kind by the
    content. "-" reads from the standard input.
    """
    sources, settings = options.sources, options.what_if
    if options.diff:
        explained = _compared(sources, settings)
    elif len(sources) == 1:
        from brim.cli.explain.answers import explain as explain_file

        explained = explain_file(sources[0], settings)
    else:
        raise UsageError(f"Cannot explain {len(sources)} files.", todo="Give one, or --diff and two: BEFORE AFTER.")
    if options.html is not None:
        write_html(options.html, explained.plot())
    if options.as_json:
        print_json(explained.body)
        return
    click.echo(explained.summary())


def _compared(sources: tuple[Path, ...], settings: tuple[str, ...]) -> Explained:
    from brim.cli.explain import answers as explained
    from brim.cli.explain import source as explain_source

    if len(sources) != 2:
        raise UsageError(f"Cannot compare {len(sources)} files.", todo="Give two: BEFORE AFTER.")
    if settings:
        raise UsageError(
            "Cannot use --what-if with --diff.",
            "--diff compares two runs and replays neither.",
            "Give one snapshot and --what-if.",
        )
    if sources[0] == sources[1] == Path("-"):
        raise UsageError("Cannot compare the standard input with itself.", todo="Give at least one file.")
    with explain_source.opened(sources[0]) as before, explain_source.opened(sources[1]) as after:
        return explained.compared(before, after)
