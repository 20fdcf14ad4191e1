"""``brim rehearse``."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli import verdict
from brim.cli.loading import confirmed
from brim.cli.options import (
    SNAPSHOT,
    OutputFile,
    ProgramCommand,
    command,
    html_field,
    json_field,
    module_field,
    print_json,
    program_field,
    program_of,
    readable,
    write_html,
)
from brim.cli.trials import MOST_TRIALS, Trials
from brim.core.files import replacing
from brim.core.leak import LEAST_STEPS
from brim.core.options import option, option_group
from brim.errors import UsageError
from brim.processes import temporary_folder
from brim.rehearsal.rehearse import Request
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.cli.explain.answers import Explained
    from brim.device.environment import Environment
    from brim.estimation.bounds import Margin
    from brim.rehearsal.rehearse import Rehearsal

OUT_OF_MEMORY, FAILED = 3, 1


class _SnapshotFile(OutputFile):
    """A file, or one for each rank."""

    def further(self, path: Path, params: Mapping[str, Any]) -> Iterator[Path]:
        yield from (_of_rank(path, rank) for rank in params["ranks"])


@dataclass(frozen=True, kw_only=True)
class RehearseOptions:
    """The options of ``brim rehearse``."""

    request: Mapping[str, Any] = option_group(Request)
    vary: str | None = option(
        None,
        "Find the largest value of a program's option that fits; give the values in ascending order.",
        metavar="OPTION=V,V...",
    )
    what_if: tuple[str, ...] = option(
        (), "Replay under other allocator settings; best searches for them.", metavar="CONF"
    )
    trials: int = option(
        MOST_TRIALS,
        "If memory runs out, run the program again with fixes, at most N times, until it fits.",
        min=0,
        metavar="N",
    )
    snapshot: Path | None = option(
        None, "Write the recording to this file, in PyTorch's format (-rankN is added).", kind=_SnapshotFile(SNAPSHOT)
    )
    compiler: bool = option(False, "Also download Triton, which torch.compile needs, if it is not installed.")
    python: Path | None = option(None, "The Python to rehearse with. [default: this one]")
    yes: bool = option(False, "Download missing packages without asking.")
    html: Path | None = html_field()
    as_json: bool = json_field()
    module: str | None = module_field()
    arguments: tuple[str, ...] = program_field()


@command(RehearseOptions, cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
def rehearse(options: RehearseOptions) -> int:
    """Run an unchanged program on simulated GPUs: check whether it fits, show what uses the memory, test fixes.

    Options after SCRIPT (or -m MODULE) are the program's own. Memory is the same as on the GPU, but kernels do not
    compute: integers and small tensors are right, other numbers are made up. The program runs in a separate process
    until memory stops growing, and writes its files. Exit code 3: memory runs out (brim then runs the program again
    with fixes), or memory grows with every step.
    """
    from brim.allocator.config import AllocatorConfig
    from brim.cli.explain.snapshot import BEST
    from brim.device.environment import prepare
    from brim.rehearsal.rehearse import FOLDERS

    module, settings, vary = options.module, options.what_if, options.vary
    target, arguments = program_of(module, options.arguments)
    values = None if vary is None else _values(vary)
    kept = {"--html": options.html, "--snapshot": options.snapshot, "--what-if": settings}
    for flag in (name for name, path in kept.items() if path and vary is not None):
        raise UsageError(
            f"Cannot use --vary {vary} with {flag}.", "Varied rehearsals keep no recording.", "Rehearse one value."
        )
    for text in settings:
        if text != BEST:
            AllocatorConfig.parse(text)  # check now, before the run
    # As in ``brim estimate``; a program's own -- is given twice.
    arguments = arguments[1:] if arguments[:1] == ("--",) else arguments
    request = Request(target=target, arguments=arguments, is_module=module is not None, **options.request)
    environment = prepare(
        options.python, confirm=lambda what: options.yes or confirmed(what), compiler=options.compiler
    )
    with temporary_folder(FOLDERS) as scratch:
        if values is not None:
            return _vary(request, environment, scratch, *values, options.as_json)
        rehearsals = _run(request, environment, scratch)
        again = Trials(
            request,
            partial(_run_again, environment=environment),
            most=options.trials,
            report=lambda text: click.echo(text, err=True),
        )
        explained = [_explained(rehearsal, settings, again) for rehearsal in rehearsals]
        if options.as_json:
            print_json(_document(request, rehearsals, explained))
        else:
            for rehearsal, more in zip(rehearsals, explained, strict=True):
                for line in _lines(request, rehearsal, more):
                    click.echo(readable(line))
        if options.snapshot is not None:  # after printing: the disk may be full
            _keep(rehearsals, options.snapshot)
        if options.html is not None:
            _write_html(options.html, request, rehearsals, explained)
    return max(_exit_code(rehearsal) for rehearsal in rehearsals)


def _run(request: Request, environment: Environment, folder: Path) -> list[Rehearsal]:
    """Run the program with its output on stderr: stdout is the command's."""
    from brim.rehearsal.rehearse import rehearse_program

    return rehearse_program(
        request, environment, folder, output=sys.stderr, on_note=lambda text: click.echo(text, err=True)
    )


def _exit_code(rehearsal: Rehearsal) -> int:
    return {None: FAILED, True: 0, False: OUT_OF_MEMORY}[rehearsal.fits]


def _keep(rehearsals: Sequence[Rehearsal], path: Path) -> None:
    for rehearsal in rehearsals:
        asked = f"Cannot write a recording to {path}."
        if rehearsal.snapshot is None:
            raise UsageError(asked, "There is none: the program did not use CUDA, or its process was killed.")
        try:
            with replacing(path if rehearsal.rank is None else _of_rank(path, rehearsal.rank)) as partial:
                shutil.copyfile(rehearsal.snapshot, partial)
        except OSError as error:
            raise UsageError(asked, f"{error.strerror}.", "Name another file.") from error


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_stem(f"{path.stem}-rank{rank}")


def _run_again(request: Request, environment: Environment) -> list[Rehearsal]:
    """Run the program again without its output, which was printed the first time."""
    from brim.rehearsal.rehearse import FOLDERS, rehearse_program

    with temporary_folder(FOLDERS) as scratch, Path(os.devnull).open("w") as nowhere:
        return rehearse_program(request, environment, scratch, output=nowhere, errors=nowhere)


def _explained(rehearsal: Rehearsal, settings: tuple[str, ...], trials: Trials) -> Explained | None:
    from brim.cli.explain import answers as explained
    from brim.cli.explain import source as explain_source

    if rehearsal.snapshot is None:
        return None
    name = "rehearsal" if rehearsal.rank is None else f"rank {rehearsal.rank}"
    source = explain_source.Source(name=name, kind=explain_source.SNAPSHOT, path=rehearsal.snapshot)

    def revise(devices: list[dict[str, Any]]) -> None:
        for device in devices:
            if device["failed"] and rehearsal.fits is False:
                device["advice"] = trials.revised(device["advice"])

    return explained.of_snapshot(source, settings, leaks=rehearsal.leaks, revise=revise)


def _headline(request: Request, rehearsal: Rehearsal) -> str:
    where = f"{request.gpus} x {request.gpu}" if request.gpus > 1 else request.gpu
    who = "" if rehearsal.rank is None else f"rank {rehearsal.rank} of {request.gpus}: "
    if rehearsal.fits is None and rehearsal.ended != "failed":
        return f"{who}Whether it fits on {where} is not known: {rehearsal.message}."
    does_not_fit, leak = f"{who}It does not fit on {where}", rehearsal.leak
    if rehearsal.ended == "failed":
        return f"{who}The program failed: {rehearsal.message.partition(chr(10))[0]}"
    if rehearsal.ended == "out of memory":
        why = f": {verdict.of_leak(replace(leak, full_step=None))}" if leak is not None else ""
        return f"{does_not_fit}: it ran out of memory in step {rehearsal.steps + 1}{why}."
    if rehearsal.fits is False and leak is not None:
        ended = f" (the program ended after {leak.unit} {leak.steps:,})" if rehearsal.ended == "finished" else ""
        return f"{does_not_fit}: {verdict.of_leak(leak)}{ended}."
    ended = "the program ran to its end" if rehearsal.ended == "finished" else f"memory {_growth(rehearsal)}"
    return f"{who}It fits on {where}{_how_closely(request, rehearsal)}: {ended}."


def _how_closely(request: Request, rehearsal: Rehearsal) -> str:
    """Describe how close to full memory a fitting program came; "" if the safe upper bound fits too."""
    over_bytes = _upper_bound_bytes(request, rehearsal) - rehearsal.memory_bytes
    flushes = max((device.cache_flushes for device in rehearsal.devices), default=0)
    parts = [f"though the safe upper bound is {format_bytes(over_bytes)} above the memory"] if over_bytes > 0 else []
    if flushes:
        times = "once" if flushes == 1 else f"{flushes:,} times"
        parts.append(f"{'and' if parts else 'though'} the allocator had to return its cache {times}")
    return f", {' '.join(parts)}" if parts else ""


def _upper_bound_bytes(request: Request, rehearsal: Rehearsal) -> int:
    """A safe bound of the process's memory, on the GPU where it is largest."""
    return max((device.process_bytes for device in rehearsal.devices), default=0) + _margin(request).bytes


def _margin(request: Request) -> Margin:
    from brim.estimation.bounds import context_margin
    from brim.estimation.simulation import place_of

    return context_margin(place_of(request.gpu, request.memory_bytes))


def _growth(rehearsal: Rehearsal) -> str:
    if rehearsal.grew_until == rehearsal.steps:
        still = f"still grew in step {rehearsal.steps}, where the rehearsal ended"
        if rehearsal.steps < LEAST_STEPS or rehearsal.leaks:
            return still
        return f"{still}, because of larger inputs or fragmentation: no step leaves memory in use"
    return f"grew until step {rehearsal.grew_until}, and the rehearsal ended after step {rehearsal.steps}"


def _lines(request: Request, rehearsal: Rehearsal, explained: Explained | None) -> list[str]:
    from brim.rehearsal.remedies import remedy

    lines = [_headline(request, rehearsal)]
    if rehearsal.ended == "out of memory":
        lines += [f"  {line}" for line in rehearsal.message.splitlines()]
    if rehearsal.ended == "failed":
        lines += [f"  {line}" for line in rehearsal.message.splitlines()[1:] if line.strip()]
        lines += [f"  {line}" for line in [remedy(rehearsal.message)] if line]
    lines += [f"  {line}" for line in _facts(request, rehearsal)]
    if explained is not None:
        lines += explained.lines
    return lines + [f"note: {note}" for note in verdict.notes_of(rehearsal)]


def _facts(request: Request, rehearsal: Rehearsal) -> list[str]:
    lines = [
        f"device {device.device}: {format_bytes(device.allocated_bytes)} allocated, "
        f"{format_bytes(device.reserved_bytes)} reserved, {format_bytes(device.process_bytes)} taken by the process "
        f"at the peak, of {format_bytes(rehearsal.memory_bytes)}"
        for device in rehearsal.devices
    ]
    if rehearsal.devices:
        context = format_bytes(rehearsal.context_bytes)
        lines.append(f"of that {context} are the CUDA context of each process ({rehearsal.context_source})")
        if (margin := _margin(request)).bytes:
            bound = format_bytes(_upper_bound_bytes(request, rehearsal))
            lines.append(f"safe upper bound: {bound}, as {margin.why}")
    elif rehearsal.torch or rehearsal.ended == "finished":
        lines.append(
            "The program did not use CUDA." if not rehearsal.other_processes else "Its own process did not use CUDA."
        )
    if rehearsal.attention:
        kinds = ", ".join(f"{name} {times:,} times" for name, times in sorted(rehearsal.attention.items()))
        lines.append(f"attention kernels: {kinds}")
    lines += [f"  {name}: {times:,} launches" for name, times in sorted(rehearsal.kernels.items())]
    if decisions := verdict.decisions_of(rehearsal):
        lines += [decisions[0], *(f"  {line}" for line in decisions[1:])]
    ram = f" and {format_bytes(rehearsal.host_peak_bytes)} of RAM" if rehearsal.host_peak_bytes else ""
    lines.append(f"the rehearsal took {rehearsal.seconds:.0f} s{ram}")
    return lines


def _document(
    request: Request, rehearsals: Sequence[Rehearsal], explained: Sequence[Explained | None]
) -> dict[str, Any]:
    from dataclasses import asdict

    def process(rehearsal: Rehearsal, more: Explained | None) -> dict[str, Any]:
        body = asdict(rehearsal) | {"fits": rehearsal.fits, "notes": verdict.notes_of(rehearsal)}
        del body["snapshot"]
        body["upper_bound_bytes"] = _upper_bound_bytes(request, rehearsal)
        return body | {"memory": None if more is None else more.body["devices"]}

    return {
        "program": request.target,
        "arguments": list(request.arguments),
        "gpu": request.gpu,
        "gpus": request.gpus,
        "processes": [process(*pair) for pair in zip(rehearsals, explained, strict=True)],
    }


def _write_html(
    path: Path, request: Request, rehearsals: Sequence[Rehearsal], explained: Sequence[Explained | None]
) -> None:
    from brim.report.html.page import Table, View, page

    views, tables, notes = [], [], []
    for rehearsal, more in zip(rehearsals, explained, strict=True):
        name = "" if rehearsal.rank is None else f"rank {rehearsal.rank}, "
        notes += [*_facts(request, rehearsal), *verdict.notes_of(rehearsal)]
        if more is not None:
            views += [View(timeline=timeline, title=f"{name}{title}") for title, timeline in more.views]
            tables += [Table(title=f"{name}{title}", columns=heads, rows=rows) for title, heads, rows in more.tables]
            notes += more.notes
    title = f"{request.target} on {request.gpu}, rehearsed"
    first = " ".join(_headline(request, rehearsal) for rehearsal in rehearsals)
    write_html(path, page(views, title=title, verdict=first, tables=tables, notes=notes))


def _values(vary: str) -> tuple[str, list[str]]:
    """The option and its values."""
    option, _, text = vary.partition("=")
    values = text.split(",")
    asked, like = f"--vary {vary} was given.", "Example: --vary batch=1,2,4,8"
    if not option or not all(values):
        raise UsageError(asked, "It has no values." if option else "It has no option.", like)
    if len(set(values)) < len(values):
        raise UsageError(asked, "A value is repeated.", like)
    numbers: list[float] = []
    with contextlib.suppress(ValueError):  # values may be words
        numbers = [float(value) for value in values]
    if numbers not in (sorted(numbers), sorted(numbers, reverse=True)):
        raise UsageError(asked, "Its values are not in order.", f"Give them in ascending order of memory. {like}")
    return option, values


def _vary(
    request: Request, environment: Environment, folder: Path, option: str, values: Sequence[str], as_json: bool
) -> int:
    """Print the largest value that fits, found by bisection."""
    tried: dict[str, list[Rehearsal]] = {}

    def fits(value: str) -> bool:
        arguments = with_option(request.arguments, option, value)
        tried[value] = _run(replace(request, arguments=arguments), environment, folder)
        failed = next((rehearsal for rehearsal in tried[value] if rehearsal.fits is None), None)
        if failed is not None:
            raise UsageError(
                f"Cannot rehearse the program with {' '.join(arguments)}.", f"It failed: {failed.message}"
            )
        fitting = all(rehearsal.fits for rehearsal in tried[value])
        click.echo(f"{option}={value}: {'fits' if fitting else 'does not fit'}", err=True)
        return fitting

    largest = largest_that_fits(values, fits)
    rows: list[dict[str, Any]] = [
        {
            "value": value,
            "fits": all(rehearsal.fits for rehearsal in rehearsals),
            **{
                name: max((getattr(d, name) for rehearsal in rehearsals for d in rehearsal.devices), default=0)
                for name in ("reserved_bytes", "process_bytes")
            },
        }
        for value, rehearsals in sorted(tried.items(), key=lambda item: values.index(item[0]))
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
    """The last of ``values`` for which ``fits``, if no value after one that does not fit does. None: none fits."""
    count = bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else None


def with_option(arguments: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """A program's arguments with one option set to ``value``: in its place where it is given, else at the end.

    ``option`` may be given with its dashes (``-b``) or without (``batch``: ``--batch``; an argument ``batch=`` as
    Hydra has it keeps its form).
    """
    name = option if option.startswith("-") else f"--{option}"
    changed = list(arguments)
    for at, word in enumerate(changed):
        if word.startswith(f"{option}="):
            changed[at] = f"{option}={value}"
            return tuple(changed)
        if word.startswith(f"{name}="):
            changed[at] = f"{name}={value}"
            return tuple(changed)
        if word == name and at + 1 < len(changed):
            changed[at + 1] = value
            return tuple(changed)
    return (*changed, name, value)
