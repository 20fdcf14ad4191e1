"""What several commands share: amounts of memory as options, and JSON alone on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from brim.errors import UsageError
from brim.units import format_bytes, is_share, parse_bytes

if TYPE_CHECKING:
    from brim.report.html import Table, View

F = TypeVar("F", bound=Callable[..., Any])


class _Bytes(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``8GiB``, ``512MB`` or plain bytes, given to the command as a number of bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except UsageError as error:
            self.fail(" ".join(str(error).split("\n")), param, ctx)


class _Budget(_Bytes):
    """The same, or a share such as ``80%``, given to the command as it is written: of what is known later."""

    name = "bytes|%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            whole = parse_bytes(value, _ANY)
        except UsageError as error:
            self.fail(" ".join(str(error).split("\n")), param, ctx)
        return value if is_share(value) else whole


class _Model(click.ParamType):  # type: ignore[type-arg]
    """A model that has to be there: said before PyTorch is loaded, which takes seconds."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from brim.run.location import local

        local(value)
        return str(value)


class _DescribedModel(_Model):
    """The same where a configuration will do, or a name of the catalog."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from brim.estimation.models import find_model
        from brim.run.location import expanded, local

        path = expanded(value)
        if path.is_dir():
            local(value)
        elif not path.exists() and ".py" not in value:
            find_model(value)
        return str(value)


class OutputFile(click.Path):
    """A file in a folder that exists: said at once, not after a run of hours."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not Path(path).parent.is_dir():
            self.fail(f"'{Path(path).parent}' is not a folder.", param, ctx)
        return path


MODEL, DESCRIBED_MODEL = _Model(), _DescribedModel()
_ANY = 1  # a whole to try a share on
VRAM_HELP = "Budget of the compute device: 8GiB, or 80% of all it has.  [default: 90 % of what is free]"
RAM_HELP = "Budget of host memory: 8GiB, or 80% of all there is.  [default: 90 % of what is free]"
BYTES, BUDGET = _Bytes(), _Budget()


def json_option(command: F) -> F:
    """``--json``, given to the command as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(command)


def html_option(command: F) -> F:
    """``--html``, given to the command as ``html``: None, or where ``write_html`` is to write."""
    text = "Also write a report with pictures: one file, no network."
    return click.option("--html", type=OutputFile(), help=text)(command)


def device_option(command: F) -> F:
    """``--device``, given to the command as ``device``."""
    choice = click.Choice(["auto", "cuda", "cpu"])
    text = "Where to compute; auto takes CUDA where torch sees it."
    return click.option("--device", type=choice, default="auto", show_default=True, help=text)(command)


def readable(text: str) -> str:
    """``text`` with nothing in it that a terminal would obey or could not show, line ends included."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def write_html(
    path: Path,
    views: Sequence[View],
    *,
    title: str,
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
    one_axis: bool = False,
) -> None:
    """Write the report and say so on stderr."""
    from brim.report.html import write

    size = write(path, views, title=title, tables=tables, notes=notes, one_axis=one_axis)
    click.echo(f"report: {path} ({format_bytes(size)})", err=True)
