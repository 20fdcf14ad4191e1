"""What several commands share: amounts of memory as options, and JSON alone on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from brim.core.files import identities
from brim.errors import UsageError
from brim.printable import printable
from brim.units import format_bytes, is_share, parse_bytes

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
        from brim.models.location import local

        local(value)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return paths(ctx, param, incomplete)


class _DescribedModel(_Model):
    """The same where a configuration will do, or a name of the catalog."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from brim.estimation.models import find_model
        from brim.models.location import expanded, local

        path = expanded(value)
        if path.is_dir():
            local(value)
        elif not path.exists() and ".py" not in value:
            find_model(value)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from brim import catalog

        items = [CompletionItem(name) for name in catalog.model_names() if name.startswith(incomplete.lower())]
        return items or paths(ctx, param, incomplete)


class _Device(click.Choice):  # type: ignore[type-arg]
    """Where to compute. Of several GPUs one by its number; whether it is there is for the command to say."""

    def __init__(self, *accelerators: str) -> None:
        super().__init__(["auto", *accelerators, "cpu"])
        self._accelerators = accelerators

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        kind, colon, number = str(value).partition(":")
        if kind in self._accelerators and colon and number.isascii() and number.isdigit():
            return f"{kind}:{int(number)}"
        return super().convert(value, param, ctx)


class _Gpu(click.ParamType):  # type: ignore[type-arg]
    """The name of a GPU, which the command itself looks up."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Short names, in one word as shells take them."""
        from brim import catalog

        cards = map(catalog.gpu, catalog.gpu_names())
        short = sorted({alias for card in cards for alias in card.aliases if " " not in alias})
        return [CompletionItem(alias) for alias in short if alias.startswith(incomplete.lower())]


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completed by the shell, as names of files and folders."""
    return [CompletionItem(incomplete, type="file")]


# Kinds of files that brim writes, each with what such a file begins with.
HTML = ("a page", (b"<!doctype html>",))
JSON = ("a JSON document", (b"{",))
SVG = ("an SVG picture", (b"<svg", b"<?xml"))
SNAPSHOT = ("a memory snapshot", (b"\x80",))  # every pickle of protocol 2 or later begins so
TRACE = ("a trace for Perfetto", (b'{"displayTimeUnit": "ms", "traceEvents"', b"\x1f\x8b"))  # gzip's first bytes
_MOST_FIRST_BYTES = 64


class OutputFile(click.Path):
    """A file in a folder that exists, new or of the ``kinds`` that are written there: said at once, not after a run
    of hours. What else is there was named by mistake, and stays."""

    def __init__(self, *kinds: tuple[str, tuple[bytes, ...]]) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)
        self._kinds = kinds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
        if not path.parent.is_dir():
            self.fail(f"'{path.parent}' is not a folder.", param, ctx)
        if path.is_file() and not self._is_own(path):
            kinds = " or ".join(name for name, _ in self._kinds)
            self.fail(f"'{path}' is there already, and is not {kinds}. Name another file, or delete it.", param, ctx)
        return path

    def further(self, path: Path, params: Mapping[str, Any]) -> Iterator[Path]:
        """Files beside ``path`` that may be written too, as far as they are there or were given as well."""
        yield from ()

    def _is_own(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                first = file.read(_MOST_FIRST_BYTES)
        except OSError:  # it may be written and not read
            return False
        return not first or any(first.lower().startswith(begin.lower()) for _, many in self._kinds for begin in many)


class Command(click.Command):
    """A command that writes to none of the files that it reads, whatever their names (links, mounts, ``..``), and no
    two results to one file."""

    def invoke(self, ctx: click.Context) -> Any:
        read, written = identities(self._inputs(ctx)), set[Path]()
        for option, path in self._outputs(ctx):
            asked = f"{option.opts[0]} {path} was given."
            for same in (read[identity] for identity in identities([path]) if identity in read):
                raise UsageError(asked, f"It is {same}, which is an input.", "Name another file.")
            if path.resolve() in written:
                raise UsageError(asked, "Another result is written there too.", "Name another file.")
            written.add(path.resolve())
        return super().invoke(ctx)

    def _outputs(self, ctx: click.Context) -> Iterator[tuple[click.Parameter, Path]]:
        """Files by option; a pipe or a device takes what comes."""
        for option in self.params:
            path = ctx.params.get(option.name or "")
            if not isinstance(option.type, OutputFile) or path is None or (path.exists() and not path.is_file()):
                continue
            yield option, path
            for other in option.type.further(path, ctx.params):
                yield option, option.type.convert(other, option, ctx)

    def _inputs(self, ctx: click.Context) -> Iterator[Path]:
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if isinstance(param.type, OutputFile):
                continue
            for entry in value if isinstance(value, tuple) else (value,):
                if isinstance(entry, Path):
                    yield entry
                elif isinstance(entry, str) and isinstance(param, click.Argument):  # MODEL, or file.py:function
                    yield from (Path(entry).expanduser(), Path(entry.partition(":")[0]))


class Finite(click.FloatRange):
    """A number that is one, within the range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


MODEL, DESCRIBED_MODEL, GPU = _Model(), _DescribedModel(), _Gpu()
_ANY = 1  # a whole to try a share on
VRAM_HELP = "Budget of the compute device: 8GiB, or 80% of all it has.  [default: 90 % of what is free]"
RAM_HELP = "Budget of host memory: 8GiB, or 80% of all there is.  [default: 90 % of what is free]"
BYTES, BUDGET = _Bytes(), _Budget()
DEVICE, PROGRAM_DEVICE = _Device("cuda", "xpu", "npu"), _Device("cuda")


def json_option(command: F) -> F:
    """``--json``, given to the command as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(command)


def html_option(command: F) -> F:
    """``--html``, given to the command as ``html``: None, or where ``write_html`` is to write."""
    text = "Also write a report with pictures: one file, no network."
    return click.option("--html", type=OutputFile(HTML), help=text)(command)


def device_option(command: F) -> F:
    """``--device``, given to the command as ``device``."""
    text = "Where to compute; auto takes CUDA where torch sees it, cuda:1 is one of several GPUs."
    return click.option("--device", type=DEVICE, default="auto", show_default=True, help=text)(command)


def readable(text: str) -> str:
    """``text`` with nothing in it that a terminal would obey, line ends included."""
    return printable(text, one_line=True)


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def write_html(path: Path, document: str) -> None:
    """Write the report and say so on stderr."""
    from brim.report.html.page import write

    click.echo(f"report: {path} ({format_bytes(write(path, document))})", err=True)
