"""``brim rehearse``."""

from __future__ import annotations

import contextlib
import shutil
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli.options import BYTES, SNAPSHOT, OutputFile, html_option, json_option, print_json, readable, write_html
from brim.cli.run import ProgramCommand
from brim.core.replacing import replacing
from brim.errors import UsageError
from brim.processes import temporary_folder
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.cli.explain.answers import Explained
    from brim.rehearsal.environment import Environment
    from brim.rehearsal.rehearse import Rehearsal, Request

OUT_OF_MEMORY, FAILED = 3, 1
_MOST_READS = 8
_UNKNOWN = (
    "Numbers that were not computed were taken to be finite: no step was skipped for an overflow.",
    "Not known without the GPU: seconds, what the driver and NCCL take, memory that kernels' libraries load.",
)
_CUDNN = "Convolutions went through cuDNN, whose workspaces are not known and not counted."
_OTHERS = "Each process that uses CUDA has devices of its own here, where on real ones they would share them."
_RANKS = "Other ranks were taken to do the same as this one."


class _SnapshotFile(OutputFile):
    """One file, or one for each rank."""

    def further(self, path: Path, params: Mapping[str, Any]) -> Iterator[Path]:
        yield from (_of_rank(path, rank) for rank in _ranks(params["ranks"]))


@click.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
@click.option("--gpu", required=True, help='The GPU that is not there, as in "RTX 4090": a name of the catalog.')
@click.option("--gpus", type=int, default=1, show_default=True, help="How many of them.")
@click.option(
    "--rank",
    "ranks",
    metavar="R,R...",
    help="Run these ranks of a job of --gpus ranks, one process each; no other rank exists.",
)
@click.option("--vram", type=BYTES, help="Memory of each GPU. [default: the card's]")
@click.option(
    "--steps", type=int, help="End after so many optimizer steps. [default: when memory stops growing, 50 at most]"
)
@click.option(
    "--vary",
    metavar="OPTION=V,V...",
    help="An option of the program's with the values to try, least first: which is the largest that fits.",
)
@click.option(
    "--what-if", "settings", multiple=True, metavar="CONF", help="Replay under other allocator settings; or best."
)
@click.option(
    "--random-weights", is_flag=True, help="Make models that are not here from their configurations, untrained."
)
@click.option(
    "--snapshot", type=_SnapshotFile(SNAPSHOT), help="Keep the recording, in PyTorch's format (-rankN is added)."
)
@click.option("--python", type=click.Path(path_type=Path), help="The Python to rehearse with. [default: this one]")
@click.option("--yes", is_flag=True, help="Fetch PyTorch's CUDA build where there is none, without asking.")
@html_option
@json_option
@click.option("-m", "module", metavar="MODULE", is_flag=False, help="Run a module, as python -m does.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [ARGS]...")
def rehearse(
    ranks: str | None,
    vram: int | None,
    vary: str | None,
    settings: tuple[str, ...],
    snapshot: Path | None,
    python: Path | None,
    yes: bool,
    html: Path | None,
    as_json: bool,
    module: str | None,
    arguments: tuple[str, ...],
    **asked: Any,
) -> int:
    """Run a program unchanged on GPUs that are not there: does it fit, what takes the memory, what would help.

    Options after SCRIPT (or -m MODULE) are the program's own. Memory is as on the GPU, kernels compute nothing: whole
    numbers and small tensors are right, other numbers made up. The program runs in a process of its own until memory
    stops growing; what it writes to disk is written. Exit code 3: it runs out of memory.
    """
    from brim.allocator.config import AllocatorConfig
    from brim.cli.explain.snapshot import BEST
    from brim.rehearsal.environment import prepare
    from brim.rehearsal.rehearse import FOLDERS, Request

    if module is None and not arguments:
        raise click.UsageError("Name a script, or a module with -m.")
    values = None if vary is None else _values(vary)
    kept = {"--html": html, "--snapshot": snapshot, "--what-if": settings}
    for option in (name for name, given in kept.items() if given and vary is not None):
        raise UsageError(
            f"--vary {vary} was given with {option}.", "It keeps no recording.", "Rehearse one value then."
        )
    for text in settings:
        if text != BEST:
            AllocatorConfig.parse(text)  # now, and not when all has run
    target, rest = (arguments[0], arguments[1:]) if module is None else (module, arguments)
    if module is None and not Path(target).exists():
        raise click.UsageError(f"There is no file {target!r}.")
    request = Request(
        target=target,
        arguments=rest,
        is_module=module is not None,
        ranks=_ranks(ranks),
        memory_bytes=vram,
        **asked,
    )
    environment = prepare(python, confirm=lambda what: yes or _confirmed(what))
    with temporary_folder(FOLDERS) as scratch:
        if values is not None:
            return _vary(request, environment, scratch, *values, as_json)
        found = _run(request, environment, scratch)
        explained = [_explained(one, settings) for one in found]
        if as_json:
            print_json(_document(request, found, explained))
        else:
            for one, more in zip(found, explained, strict=True):
                for line in _lines(request, one, more):
                    click.echo(readable(line))
        if snapshot is not None:  # what was found is told, though a disk may be full
            _keep(found, snapshot)
        if html is not None:
            _write_html(html, request, found, explained)
    return max(_exit_code(one) for one in found)


def _ranks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise UsageError(f"--rank {text} was given.", "Ranks are whole numbers.", "As in: --rank 0,63") from error


def _confirmed(what: str) -> bool:
    click.echo(what, err=True)
    return sys.stdin.isatty() and click.confirm("Download it?", err=True)


def _run(request: Request, environment: Environment, folder: Path) -> list[Rehearsal]:
    """What the program prints goes to stderr: stdout is the command's."""
    from brim.rehearsal.rehearse import rehearse_program

    return rehearse_program(
        request, environment, folder, output=sys.stderr, told=lambda text: click.echo(text, err=True)
    )


def _exit_code(found: Rehearsal) -> int:
    return {None: FAILED, True: 0, False: OUT_OF_MEMORY}[found.fits]


def _keep(found: Sequence[Rehearsal], path: Path) -> None:
    for one in found:
        asked = f"A recording was to be written to {path}."
        if one.snapshot is None:
            raise UsageError(asked, "There is none: the program made no use of CUDA, or its process was ended.")
        try:
            with replacing(path if one.rank is None else _of_rank(path, one.rank)) as made:
                shutil.copyfile(one.snapshot, made)
        except OSError as error:
            raise UsageError(asked, f"{error.strerror}.", "Name another file.") from error


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_stem(f"{path.stem}-rank{rank}")


def _explained(found: Rehearsal, settings: tuple[str, ...]) -> Explained | None:
    from brim.cli.explain import answers as explained
    from brim.cli.explain import source as explain_source

    if found.snapshot is None:
        return None
    name = "rehearsal" if found.rank is None else f"rank {found.rank}"
    source = explain_source.Source(name=name, kind=explain_source.SNAPSHOT, path=found.snapshot)
    return explained.of_snapshot(source, settings)


def _headline(request: Request, found: Rehearsal) -> str:
    where = f"{request.gpus} x {request.gpu}" if request.gpus > 1 else request.gpu
    who = "" if found.rank is None else f"rank {found.rank} of {request.gpus}: "
    if found.fits is None and found.ended != "failed":
        return f"{who}Whether it fits on {where} is not known: {found.message}."
    return (
        who
        + {
            "finished": f"It fits on {where}: the program ran to its end.",
            "enough": f"It fits on {where}: memory {_growth(found)}.",
            "out of memory": f"It does not fit on {where}: it ran out of memory{_when(found)}.",
            "failed": f"The program failed: {found.message}",
        }[found.ended]
    )


def _growth(found: Rehearsal) -> str:
    if found.grew_until == found.steps:
        return f"still grew in step {found.steps}, where the rehearsal ended"
    return f"grew until step {found.grew_until}, and the rehearsal ended after step {found.steps}"


def _when(found: Rehearsal) -> str:
    return f" in step {found.steps + 1}"


def _lines(request: Request, found: Rehearsal, explained: Explained | None) -> list[str]:
    lines = [_headline(request, found)]
    if found.ended == "out of memory":
        lines += [f"  {line}" for line in found.message.splitlines()]
    lines += [f"  {line}" for line in _facts(found)]
    if explained is not None:
        lines += explained.lines
    return lines + [f"note: {note}" for note in notes_of(found)]


def _facts(found: Rehearsal) -> list[str]:
    lines = [
        f"device {one.device}: {format_bytes(one.allocated_bytes)} allocated, {format_bytes(one.reserved_bytes)} "
        f"reserved, {format_bytes(one.process_bytes)} taken by the process at the peak, of "
        f"{format_bytes(found.memory_bytes)}"
        for one in found.devices
    ]
    if found.devices:
        context = format_bytes(found.context_bytes)
        lines.append(f"of that {context} are the CUDA context of each process ({found.context_source})")
    elif found.torch or found.ended == "finished":
        lines.append(
            "The program did not use CUDA." if not found.other_processes else "Its own process did not use CUDA."
        )
    if found.attention:
        kinds = ", ".join(f"{name} {times:,} times" for name, times in sorted(found.attention.items()))
        lines.append(f"attention took: {kinds}")
    lines += [f"  {name}: {times:,} launches" for name, times in sorted(found.kernels.items())]
    decided = [one for one in found.reads if one["decides"]]
    if decided:
        lines.append(
            "decided by made-up numbers:"
            if len(decided) == 1
            else f"decided by made-up numbers, in {len(decided)} places:"
        )
        lines += [f"  {_read(one)}" for one in decided[:_MOST_READS]]
    ram = f" and {format_bytes(found.host_peak_bytes)} of RAM" if found.host_peak_bytes else ""
    lines.append(f"the rehearsal took {found.seconds:.0f} s{ram}")
    return lines


def _read(one: dict[str, Any]) -> str:
    where = f"{one['file']}:{one['line']}" if one["file"] else "in a backward pass"
    return f"{where}: {one['source']}  ({one['what']}, {one['times']:,} times)"


def notes_of(found: Rehearsal) -> list[str]:
    """What was assumed, and what cannot be known."""
    notes = [_OTHERS] if found.other_processes else []
    if found.ran_out and found.fits is not False:
        times = "once" if found.ran_out == 1 else f"{found.ran_out} times"
        notes.append(f"Memory ran out {times}, and the program went on.")
    notes += [_CUDNN] if found.uses_cudnn else []
    notes += [_RANKS] if found.rank is not None else []
    if found.left_bytes:
        notes.append(
            f"{format_bytes(found.left_bytes)} of weights that the program made on the CPU were left zero: so they "
            "take no RAM here."
        )
    if found.not_computed:
        notes.append(f"Not computed for want of a CPU kernel: {', '.join(found.not_computed)}.")
    return [*notes, *_UNKNOWN] if found.devices else notes


def _document(request: Request, found: Sequence[Rehearsal], explained: Sequence[Explained | None]) -> dict[str, Any]:
    from dataclasses import asdict

    def one(rehearsal: Rehearsal, more: Explained | None) -> dict[str, Any]:
        body = asdict(rehearsal) | {"fits": rehearsal.fits, "notes": notes_of(rehearsal)}
        del body["snapshot"]
        return body | {"memory": None if more is None else more.body["devices"]}

    return {
        "program": request.target,
        "arguments": list(request.arguments),
        "gpu": request.gpu,
        "gpus": request.gpus,
        "processes": [one(*pair) for pair in zip(found, explained, strict=True)],
    }


def _write_html(
    path: Path, request: Request, found: Sequence[Rehearsal], explained: Sequence[Explained | None]
) -> None:
    from brim.report.html.page import Table, View

    views, tables, notes = [], [], []
    for one, more in zip(found, explained, strict=True):
        name = "" if one.rank is None else f"rank {one.rank}, "
        notes += [*_facts(one), *notes_of(one)]
        if more is not None:
            views += [View(timeline=timeline, title=f"{name}{title}") for title, timeline in more.views]
            tables += [Table(title=f"{name}{title}", columns=heads, rows=rows) for title, heads, rows in more.tables]
            notes += more.notes
    title, verdict = (
        f"{request.target} on {request.gpu}, rehearsed",
        " ".join(_headline(request, one) for one in found),
    )
    write_html(path, views, title=title, verdict=verdict, tables=tables, notes=notes)


def _values(vary: str) -> tuple[str, list[str]]:
    """The option and its values."""
    option, _, text = vary.partition("=")
    values = text.split(",")
    asked, like = f"--vary {vary} was given.", "As in: --vary batch=1,2,4,8"
    if not option or not all(values):
        raise UsageError(asked, "It names no values." if option else "It names no option.", like)
    if len(set(values)) < len(values):
        raise UsageError(asked, "A value comes twice.", like)
    numbers: list[float] = []
    with contextlib.suppress(ValueError):  # values may be words
        numbers = [float(value) for value in values]
    if numbers not in (sorted(numbers), sorted(numbers, reverse=True)):
        raise UsageError(asked, "Its values are in no order.", f"What takes least comes first. {like}")
    return option, values


def _vary(
    request: Request, environment: Environment, folder: Path, option: str, values: Sequence[str], as_json: bool
) -> int:
    """The largest of the values that fits: between one that does and one that does not, the middle is tried."""
    tried: dict[str, list[Rehearsal]] = {}

    def fits(value: str) -> bool:
        given = with_option(request.arguments, option, value)
        tried[value] = _run(replace(request, arguments=given), environment, folder)
        failed = next((one for one in tried[value] if one.fits is None), None)
        if failed is not None:
            raise UsageError(f"The program was rehearsed with {' '.join(given)}.", f"It failed: {failed.message}")
        click.echo(
            f"{option}={value}: {'fits' if all(one.fits for one in tried[value]) else 'does not fit'}", err=True
        )
        return all(one.fits for one in tried[value])

    largest = largest_that_fits(values, fits)
    rows: list[dict[str, Any]] = [
        {
            "value": value,
            "fits": all(one.fits for one in found),
            "reserved_bytes": max((d.reserved_bytes for one in found for d in one.devices), default=0),
            "process_bytes": max((d.process_bytes for one in found for d in one.devices), default=0),
        }
        for value, found in sorted(tried.items(), key=lambda item: values.index(item[0]))
    ]
    if as_json:
        print_json({"program": request.target, "option": option, "largest": largest, "tried": rows})
    else:
        for row in rows:
            verdict = "fits" if row["fits"] else "does not fit"
            click.echo(
                f"{option}={row['value']}: {verdict}, {format_bytes(row['reserved_bytes'])} reserved, "
                f"{format_bytes(row['process_bytes'])} taken by the process"
            )
        none = f"None of {', '.join(values)} fits on {request.gpu}."
        click.echo(none if largest is None else f"The largest that fits on {request.gpu}: {option}={largest}")
    return OUT_OF_MEMORY if largest is None else 0


def largest_that_fits(values: Sequence[str], fits: Callable[[str], bool]) -> str | None:
    """The last of ``values`` for which ``fits``, where no value after one that does not fit does. None: not one."""
    count = bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else None


def with_option(arguments: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """A program's arguments with one option set to ``value``: in its place where it is given, else at the end.

    ``option`` may be given with its dashes (``-b``) or without (``batch``: ``--batch``; an argument ``batch=`` as
    Hydra has it keeps its form).
    """
    name = option if option.startswith("-") else f"--{option}"
    made = list(arguments)
    for at, word in enumerate(made):
        if word.startswith(f"{option}="):
            made[at] = f"{option}={value}"
            return tuple(made)
        if word.startswith(f"{name}="):
            made[at] = f"{name}={value}"
            return tuple(made)
        if word == name and at + 1 < len(made):
            made[at + 1] = value
            return tuple(made)
    return (*made, name, value)
