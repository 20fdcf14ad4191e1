"""Options that several commands share, such as amounts of memory, and their output: JSON alone on stdout."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from brim.core.files import identities
from brim.core.options import OptionField, build, option, option_fields
from brim.errors import UsageError
from brim.printable import printable
from brim.units import format_bytes, is_share, parse_bytes

T = TypeVar("T")


class _Text(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """An option whose value ``read`` makes of its text."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value)
        except UsageError as error:
            self.fail(" ".join(str(error).split("\n")), param, ctx)


def _bytes_or_share(value: Any) -> Any:
    """Bytes, or a share such as ``80%``, which the command gets as text, because the total is known later."""
    count = parse_bytes(value, 1)  # any total
    return value if is_share(value) else count


class _Model(click.ParamType):  # type: ignore[type-arg]
    """A model that must exist: checked before PyTorch is loaded, which takes seconds."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from brim.models.location import local

        local(value)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return paths(ctx, param, incomplete)


class _DescribedModel(_Model):
    """A model, or a configuration, or a name of the catalog."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from brim.estimation.hub import is_hub_id
        from brim.estimation.models import find_model
        from brim.models.location import expanded, local

        path = expanded(value)
        if path.is_dir():
            local(value)
        elif not path.exists() and ".py" not in value and not is_hub_id(value):  # the command asks the hub
            find_model(value)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from brim import catalog

        items = [CompletionItem(name) for name in catalog.model_names() if name.startswith(incomplete.lower())]
        return items or paths(ctx, param, incomplete)


class _Device(click.Choice):  # type: ignore[type-arg]
    """The device to compute on. One of several GPUs has its number; the command checks that it exists."""

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

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete short names, in one word as shells take them."""
        from brim import catalog

        cards = map(catalog.gpu, catalog.gpu_names())
        short = sorted({alias for card in cards for alias in card.aliases if " " not in alias})
        return [CompletionItem(alias) for alias in short if alias.startswith(incomplete.lower())]


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete names of files and folders."""
    return [CompletionItem(incomplete, type="file")]


# Kinds of files that brim writes, with their first bytes.
HTML = ("a page", (b"<!doctype html>",))
JSON = ("a JSON document", (b"{",))
SVG = ("an SVG picture", (b"<svg", b"<?xml"))
SETTINGS = ("settings by brim", (b"# by brim",))  # of another engine
SNAPSHOT = ("a memory snapshot", (b"\x80",))  # every pickle of protocol 2 or later begins so
_MOST_FIRST_BYTES = 64


class OutputFile(click.Path):
    """A file in an existing folder: a new one, or one of the ``kinds`` that are written there. Other files are
    refused, because they were named by mistake. Checked before the run."""

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
        """Files beside ``path`` that may be written too, if they exist or are given."""
        yield from ()

    def _is_own(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                first = file.read(_MOST_FIRST_BYTES)
        except OSError:  # it may be writable and not readable
            return False
        return not first or any(first.lower().startswith(begin.lower()) for _, many in self._kinds for begin in many)


class Command(click.Command):
    """A command that never writes to a file that it reads, whatever its name (links, mounts, ``..``), nor two results
    to one file."""

    def invoke(self, ctx: click.Context) -> Any:
        read, written = identities(self._inputs(ctx)), set[Path]()
        for parameter, path in self._outputs(ctx):
            asked = f"{parameter.opts[0]} {path} was given."
            for same in (read[identity] for identity in identities([path]) if identity in read):
                raise UsageError(asked, f"It is {same}, which is an input.", "Name another file.")
            if path.resolve() in written:
                raise UsageError(asked, "Another result is written there too.", "Name another file.")
            written.add(path.resolve())
        return super().invoke(ctx)

    def _outputs(self, ctx: click.Context) -> Iterator[tuple[click.Parameter, Path]]:
        """Yield output files by option, without pipes and devices."""
        for parameter in self.params:
            path = ctx.params.get(parameter.name or "")
            if not isinstance(parameter.type, OutputFile) or path is None or (path.exists() and not path.is_file()):
                continue
            yield parameter, path
            for other in parameter.type.further(path, ctx.params):
                yield parameter, parameter.type.convert(other, parameter, ctx)

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


class ProgramCommand(Command):
    """Options end with the script's name, or with ``-m MODULE``, as they do for python."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {opt for p in self.params if isinstance(p, click.Option) and p.is_flag for opt in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            word = args[at]
            if word.startswith("-m"):
                end = at + (2 if word == "-m" else 1)
                if end > len(args):
                    raise click.BadOptionUsage("module", "Option '-m' requires an argument.", ctx)
                return super().parse_args(ctx, [*args[:end], "--", *args[end:]])
            alone = "=" in word or word in flags or word in ctx.help_option_names
            at += 1 if alone or word == "--" else 2
        return super().parse_args(ctx, args)


class Finite(click.FloatRange):
    """A number within the range, not NaN."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class _NumberOr(click.ParamType):  # type: ignore[type-arg]
    """A whole number, or one of ``words``, which stand for values."""

    def __init__(self, words: Mapping[str, Any], least: float | None) -> None:
        self._words, self._range = words, click.IntRange(min=None if least is None else int(least))
        self.name = "|".join([*words, "number"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        for word, meaning in self._words.items():
            if value == word or (value is not None and value == meaning):
                return meaning
        return self._range.convert(value, param, ctx)


class _Room(click.ParamType):  # type: ignore[type-arg]
    """``DIR``, ``DIR:200GiB`` or ``DIR:40%``; the command gets (folder, amount or None)."""

    name = "folder[:bytes|:%]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        folder, _, amount = value.rpartition(":") if ":" in value else (value, "", "")
        limit = BUDGET.convert(amount, param, ctx) if amount else None
        if not Path(folder).is_dir():
            self.fail(f"{folder!r} is not a folder.", param, ctx)
        return folder, limit


class _Word(click.Choice):  # type: ignore[type-arg]
    """A choice of ``words``, which stand for values."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        super().__init__(list(words))
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._words[super().convert(value, param, ctx)]


class _ProgramWord(click.types.UnprocessedParamType):
    """A word of a program's command line."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return paths(ctx, param, incomplete)


class _Numbers(click.ParamType):  # type: ignore[type-arg]
    """``1,2,4``: whole numbers from ``least`` on. Raises UsageError with ``rule`` for anything else."""

    name = "text"

    def __init__(self, rule: str, todo: str = "", *, least: int = 0) -> None:
        self._rule, self._todo, self._least = rule, todo, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() and int(part) >= self._least for part in parts):
            flag = param.opts[0] if param is not None else ""
            raise UsageError(f"{flag} {value} was given.", self._rule, self._todo)
        return tuple(map(int, parts))


BUDGET = _Text("bytes|%", _bytes_or_share)
# Types of the command line by ``Option.kind``.
_KINDS: dict[str, Any] = {
    "bytes": _Text("bytes", parse_bytes),
    "described_model": _DescribedModel(),
    "device": _Device("cuda", "xpu", "npu"),
    "existing_file": click.Path(path_type=Path, dir_okay=False, exists=True),
    "file": click.Path(path_type=Path, dir_okay=False),
    "gpu": _Gpu(),
    "gpu_counts": _Numbers("It must be numbers of GPUs, as in 1,2,4,8.", least=1),
    "html": OutputFile(HTML),
    "layers": _Numbers("It must be numbers of layers, as in 9,9,8,6."),
    "model": _Model(),
    "names": _Text(
        "names", lambda names: names if isinstance(names, tuple) else tuple(map(str.strip, names.split(",")))
    ),
    "new_folder": click.Path(path_type=Path, file_okay=False),
    "program": _ProgramWord(),
    "program_device": _Device("cuda"),
    "ranks": _Numbers("Ranks are whole numbers.", "Example: --rank 0,63"),
    "report": OutputFile(HTML, JSON),
    "room": _Room(),
}


def command(
    request: type[T], *, cls: type[Command] = Command, **settings: Any
) -> Callable[[Callable[[T], Any]], click.Command]:
    """Make a command of a function that takes a ``request``; the fields of that dataclass become options."""

    def decorate(function: Callable[[T], Any]) -> click.Command:
        @functools.wraps(function)
        def callback(**values: Any) -> Any:
            return function(build(request, {**values, **dict(_groups(request, values))}))

        return click.command(cls=cls, params=[*_parameters(request)], **settings)(callback)

    return decorate


def _groups(request: type, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of ``request`` that are groups, with the values of their options."""
    for field in option_fields(request):
        if group := field.option.group:
            settings = {each.name: values[each.name] for each in option_fields(group)}
            if field.option.only_given:
                settings = {name: value for name, value in settings.items() if value is not None}
            yield field.name, build(group, settings) if field.type == group else settings


def _parameters(request: type, *, only_given: bool = False) -> Iterator[click.Parameter]:
    for field in option_fields(request):
        if field.option.group is not None:
            yield from _parameters(field.option.group, only_given=field.option.only_given)
        elif field.option.argument:
            yield _argument(field)
        else:
            yield _option(field, only_given=only_given)


def _argument(field: OptionField) -> click.Argument:
    return click.Argument(
        [field.name], type=_type(field), nargs=-1 if field.several else 1,
        required=field.required and not field.several, metavar=field.option.metavar,
    )  # fmt: skip


def _option(field: OptionField, *, only_given: bool) -> click.Option:
    """``only_given``: None where the option is not given, whatever the field's default."""
    option, default = field.option, None if only_given or field.required else field.default
    if field.type is bool and not option.words:
        flag: dict[str, Any] = {"is_flag": True}
        if field.flags[-1].startswith("--no-"):
            flag = {"flag_value": False, "type": bool}
        return click.Option([*field.flags, field.name], default=default, help=option.help or None, **flag)
    default = next((word for word, meaning in option.words.items() if meaning == default), default)
    several = field.several and not option.kind
    settings: dict[str, Any] = {"multiple": several, "required": field.required and not only_given}
    if default is not None:
        settings |= {"default": default, "show_default": default not in ("", ())}
    elif several:
        settings["callback"] = lambda context, parameter, values: values or None
    return click.Option(
        [*field.flags, field.name], type=_type(field), metavar=option.metavar, help=option.help or None, **settings
    )


def _type(field: OptionField) -> Any:
    hint, option = field.entry, field.option
    if option.kind:
        return _KINDS[option.kind] if isinstance(option.kind, str) else option.kind
    if option.words and int in (hint, *get_args(hint)):
        return _NumberOr(option.words, option.min)
    if option.words:
        return _Text("text", lambda value: option.words.get(value, value)) if option.names else _Word(option.words)
    if field.choices:
        return click.Choice(field.choices)
    if hint is int and option.min is not None:
        return click.IntRange(int(option.min), None if option.max is None else int(option.max))
    if hint is float and option.min is not None:
        return Finite(min=option.min, min_open=option.above)
    if hint == str | int:
        return BUDGET
    if Path in (hint, *get_args(hint)):
        return click.Path(path_type=Path)
    return str if str in get_args(hint) else hint


def html_field() -> Any:
    """``--html``: the path of the report, or None."""
    return option(None, kind="html", help="Also write a report with charts: one file that needs no network.")


def json_field() -> Any:
    """``--json``, as the field ``as_json``."""
    return option(False, flags=("--json",), help="Print one JSON document and nothing else.")


def module_field() -> Any:
    """``-m MODULE``."""
    return option(None, "Run a module, as python -m does.", flags=("-m",), metavar="MODULE")


def program_field() -> Any:
    """The script and its arguments; with ``-m`` arguments alone."""
    return option((), kind="program", argument=True, metavar="[SCRIPT] [ARGS]...")


def program_of(module: str | None, words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The program and its arguments. Raises click's UsageError where there is none."""
    if module is not None:
        return module, words
    if not words:
        raise click.UsageError("Name a script, or a module with -m.")
    if not Path(words[0]).exists():
        raise click.UsageError(f"There is no file {words[0]!r}.")
    return words[0], words[1:]


def readable(text: str) -> str:
    """Return ``text`` without characters that control a terminal, including line ends."""
    return printable(text, one_line=True)


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))


def write_html(path: Path, document: str) -> None:
    """Write the report and say so on stderr."""
    from brim.report.html.page import write

    click.echo(f"report: {path} ({format_bytes(write(path, document))})", err=True)
