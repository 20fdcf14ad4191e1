"""``brim estimate``."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from brim.cli import verdict
from brim.cli.estimate.options import EstimateOptions
from brim.cli.estimate.program import environment_for, rehearsed
from brim.cli.loading import MODELS, load
from brim.cli.options import Command, command, print_json, write_html
from brim.cli.split_options import split_of
from brim.core.options import build
from brim.errors import BudgetError, UsageError
from brim.estimation.workload import Workload
from brim.requests.plan import PRECISIONS_OF
from brim.requests.plan import Request as PlanRequest
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.console import Console
    from brim.estimation.alternatives import Alternative
    from brim.estimation.estimate import Estimate, Study
    from brim.estimation.growth import Growth
    from brim.report.html.page import View

_MOST_MODULES = 12
_GARBAGE_EVERY = 100_000  # objects: traces have millions and no cycles, and visiting them took a quarter of the time
_BESIDE_PROGRAM = ("--alloc-conf", "--gpu", "--html", "--json", "--vram", "-h", "--help")  # also after it
_PROCESS = "with {} of CUDA context, as nvidia-smi counts"


class _Command(Command):
    """Parse a program's own arguments after its name, with those of our options that a program does not decide."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = args[: args.index("--") if "--" in args else None]
        at = self._program_at(words)
        if at is not None:
            ours, own = self._split_words(words[at + 1 :])
            if own:
                click.echo(f"Arguments of the program: {shlex.join(own)}", err=True)
            args = [*words[: at + 1], *ours, "--", *own, *args[len(words) + 1 :]]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(map(is_program, words)):
                raise click.UsageError(
                    f"{error.format_message()} Options of the program go after its name.", ctx
                ) from error
            raise

    def _program_at(self, words: list[str]) -> int | None:
        """The position of a program's name; None where MODEL is missing or no program."""
        at = 0
        while at < len(words) and words[at].startswith("-"):
            at += 2 if self._takes_value(words[at]) else 1
        return at if at < len(words) and is_program(words[at]) else None

    def _split_words(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Split the words after a program into our options and the program's own arguments."""
        ours: list[str] = []
        own: list[str] = []
        at = 0
        while at < len(words):
            is_ours = words[at].partition("=")[0] in _BESIDE_PROGRAM
            end = at + (2 if is_ours and self._takes_value(words[at]) else 1)
            (ours if is_ours else own).extend(words[at:end])
            at = end
        return ours, own

    def _takes_value(self, word: str) -> bool:
        return any(word in option.opts and not option.is_flag for option in self.params
                   if isinstance(option, click.Option))  # fmt: skip


def is_program(model: str) -> bool:
    """Return whether MODEL is a program to be run unchanged: a Python file without a function's name."""
    return model.endswith(".py")


@command(EstimateOptions, cls=_Command)
def estimate(options: EstimateOptions) -> int | None:
    """Predict the memory and the time of a training or generation step, without a GPU.

    MODEL is a hub id (org/name or org/name@revision), a name of the catalog, a folder with a config.json, a
    config.json, file.py:function, or an unchanged program (train.py). Of a model of the hub, the configuration and
    the headers of its weights are fetched, some kilobytes, unless the hub's cache has them. The function returns a
    step to trace, or a pair of a model and its inputs.

    brim rehearses a program, as brim rehearse does: it runs the program with PyTorch's CUDA build on a simulated GPU.
    Files that the program writes are kept. A program needs --gpu. ARGS are the program's own arguments: all words
    after it except --gpu, --vram, --alloc-conf, --html and --json. After -- all words are ARGS.

    Exit code 3: the step does not fit; the answer names settings that fit.
    """
    if is_program(options.model):
        _refuse_beside_program(options.model)
        return _report_program(options)
    if options.arguments:
        arguments = " ".join(options.arguments)
        raise UsageError(f"{arguments} was given beside {options.model}.", "Only programs take arguments.")
    split = split_of(options.split, options.engine, options.megatron, batch=options.workload["batch"])
    if split:
        if options.html is not None:
            raise UsageError("Cannot use --gpus with --html.", "It applies to one GPU only.")
        from brim.cli.estimate import ranks as estimate_ranks

        return estimate_ranks.report(options, split)
    if options.compiled:
        raise UsageError(
            "Cannot use --compile without --gpus.",
            "Blocks are compiled in predictions of ranks only.",
            "Give --gpus 1.",
        )
    return _report(options)


def _refuse_beside_program(model: str) -> None:
    """Raise UsageError for a missing file, and for options that would change the program's step."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and parameter.opts[0] not in _BESIDE_PROGRAM
        and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given for {model}.",
            "The program itself sets this.",
            f"Give the program's options after its name, for example: brim estimate {model} {given[0]} ...",
        )
    if not Path(model).is_file():
        raise UsageError(f"Cannot run {model}.", "There is no such file.")


def _report_program(options: EstimateOptions) -> int | None:
    from brim.estimation.simulation import place_of
    from brim.report.html.page import View

    place = place_of(options.gpu, options.vram)
    environment = environment_for(place)
    click.echo("By rehearsal: the program really runs, and the files that it writes are kept.", err=True)
    estimate, timeline = rehearsed(options.model, options.arguments, place, options.alloc_conf, environment)
    if options.html is not None:
        _write_page(options.html, [] if timeline is None else [View(timeline=timeline)], estimate)
    if options.as_json:
        print_json(estimate.to_json() | {"fits_with": []})  # a program has its own settings
    else:
        print_estimate(estimate)
    return _exit_code(estimate)


def _exit_code(estimate: Estimate) -> int | None:
    return BudgetError.exit_code if estimate.fits is False else None


def _report(options: EstimateOptions) -> int | None:
    from brim.cli.console import Console
    from brim.device.kernels import begin
    from brim.estimation.simulation import capability_of, place_of

    workload = Workload(**options.workload)
    place = place_of(options.gpu, options.vram)
    begin(capability_of(place))  # beside the imports
    load("brim.estimation.estimate")
    gc.set_threshold(_GARBAGE_EVERY)
    from brim.estimation.alternatives import alternatives
    from brim.estimation.estimate import Study, hardware_of
    from brim.estimation.models import find_model

    with redirect_stdout(sys.stderr):  # what the user's file prints is not the answer
        source = find_model(options.model)
    if source.library == "transformers":
        load(MODELS)
    with Console(stderr=True).status("Tracing one step on fake tensors") as status, redirect_stdout(sys.stderr):
        study = Study(source, workload, place, hardware_of(options.gpu), options.alloc_conf)
        estimate = study.estimate()
        status.update("Solving for other sizes")
        growth = None if options.as_json and estimate.fits is not False else study.growth()
        others: Sequence[Alternative] = ()
        if growth is not None and estimate.fits is False:
            status.update("Looking for settings that fit")
            others = alternatives(study, estimate.at_peak_bytes["parameters"], growth.largest_batch)
    if options.html is not None:
        _write_html(options.html, study, estimate, growth, others)
    if options.as_json:
        print_json(estimate.to_json() | {"fits_with": [other.to_json() for other in others]})
    else:
        assert growth
        print_estimate(estimate, growth, others, _plan_command(options, estimate))
    return _exit_code(estimate)


def _plan_command(options: EstimateOptions, estimate: Estimate) -> str:
    """The command that plans the same workload."""
    task, sizes = estimate.workload.task, {"batch": estimate.workload.batch, "seq": estimate.workload.seq}
    given = {name: value for name, value in {**options.workload, **sizes}.items() if value}
    if given.get("precision") not in PRECISIONS_OF[task]:
        given["precision"] = None
    return build(PlanRequest, vars(options) | given).command()


def _write_html(
    path: Path, study: Study, estimate: Estimate, growth: Growth | None, others: Sequence[Alternative]
) -> None:
    """Write the memory on this GPU; for a step that does not fit, also the memory that it would need."""
    import dataclasses

    from brim.estimation.simulation import phases, simulate
    from brim.report.html.page import View

    here = simulate(study.trace, study.place, study.alloc_conf)
    views = [View(timeline=here, phases=phases(study.trace, here))]
    if estimate.fits is False:
        rest = simulate(study.trace, dataclasses.replace(study.place, total_bytes=None), study.alloc_conf)
        title = f"{estimate.model} (predicted with unlimited memory)"
        views.append(View(timeline=rest, title=title, phases=phases(study.trace, rest)))
    _write_page(path, views, estimate, growth, others)


def _write_page(
    path: Path,
    views: list[View],
    estimate: Estimate,
    growth: Growth | None = None,
    others: Sequence[Alternative] = (),
) -> None:
    from brim.report.html.page import Table, page

    rows = tuple((name.lstrip(), size, what) for name, size, what in _peaks(estimate))
    table = Table(title="Peak", columns=("peak", "bytes", "what"), rows=rows)
    fitting = Table(
        title="It fits with",
        columns=("options", "bytes"),
        rows=tuple((other.options, other.process_bytes) for other in others),
    )
    failed = [estimate.out_of_memory] if estimate.out_of_memory else []
    told = Table(
        title="What was assumed",
        columns=("note",),
        rows=tuple((note,) for note in (*estimate.notes, estimate.program)),
    )
    sentence = verdict.of_estimate(estimate, estimate.total_bytes, growth.largest_batch if growth else None)
    notes = [estimate.settings, *failed]
    if estimate.precision_origin:
        notes.insert(1, verdict.of_precision(estimate.workload.precision, estimate.precision_origin))
    write_html(
        path,
        page(
            views,
            title=estimate.title,
            verdict=sentence,
            tables=[table, *[fitting] * bool(others), told],
            notes=notes,
        ),
    )


def print_estimate(
    estimate: Estimate,
    growth: Growth | None = None,
    others: Sequence[Alternative] = (),
    command: str = "",
) -> None:
    from dataclasses import asdict

    from brim.cli.console import Console
    from brim.cli.explain.text import of_leak
    from brim.estimation.growth import NOTHING

    console, growth = Console(highlight=False), growth or NOTHING
    sentence = verdict.of_estimate(estimate, estimate.total_bytes, growth.largest_batch)
    console.print(sentence, soft_wrap=True, style="bold")
    console.print(estimate.describe(), soft_wrap=True)
    if estimate.precision_origin:
        console.print(verdict.of_precision(estimate.workload.precision, estimate.precision_origin), soft_wrap=True)
    for line in of_leak(asdict(estimate.leak)) if estimate.leak else ():
        console.print(line, soft_wrap=True)
    if estimate.out_of_memory:
        console.print(estimate.out_of_memory)
        _print_others(console, estimate, others, command)
    _print_tables(console, estimate, growth)
    _last_lines(console, estimate, growth)


def _print_others(console: Console, estimate: Estimate, others: Sequence[Alternative], plan: str) -> None:
    """Print settings that fit, or the command ``plan`` for a wider search."""
    if others:
        rows = ((other.options, format_bytes(other.process_bytes)) for other in others)
        console.print_table(("it fits with", "process"), rows)
    elif not estimate.is_program:
        console.print("No small change of these settings fits. To search plans that offload and stream, run")
        console.print(plan, soft_wrap=True)


def _peaks(estimate: Estimate) -> list[tuple[str, int, str]]:
    """Return the rows of the table of peaks: name, bytes and explanation."""
    peak = estimate.peak_bytes
    return [
        ("allocated", peak.allocated, "tensors, as torch.cuda.max_memory_allocated counts them"),
        ("reserved", peak.reserved, "memory that the allocator has taken for them"),
        ("process", peak.process, _PROCESS.format(format_bytes(estimate.context_bytes))),
        *((f"  + {margin.name}", margin.bytes, margin.why) for margin in estimate.margins),
        ("safe upper bound", estimate.upper_bound_bytes, ""),
    ]


def _print_tables(console: Console, estimate: Estimate, growth: Growth) -> None:
    from brim.estimation.breakdown import folded

    peaks = ((name, format_bytes(size), what) for name, size, what in _peaks(estimate))
    console.print_table(("peak", "bytes", ""), peaks)
    sizes = {name: size for name, size in estimate.at_peak_bytes.items() if name != "context"}
    sizes["allocator's rounding"] = estimate.rounding_bytes
    console.print_table(
        ("at the peak", "bytes", "share"), verdict.shares(sizes, max(estimate.peak_bytes.allocated, 1))
    )
    modules = list(folded(estimate.per_module).items())
    shown, rest = modules[:_MOST_MODULES], [row for _, row in modules[_MOST_MODULES:]]
    if rest:
        size, count = (sum(column) for column in zip(*rest, strict=True))
        shown.append(("all others", (size, count)))
    rows = ((name, format_bytes(size), f"{count}") for name, (size, count) in shown)
    console.print_table(("module", "bytes at the peak", "modules"), rows)
    for name, points in (("batch", growth.batches), ("seq", growth.lengths)):
        if points:
            grown = (
                (
                    f"{getattr(point, name):,}",
                    *map(format_bytes, (point.allocated_bytes, point.reserved_bytes, point.process_bytes)),
                    "" if point.fits else "does not fit",
                )
                for point in points
            )
            console.print_table((name, "allocated", "reserved", "process", ""), grown)


def _last_lines(console: Console, estimate: Estimate, growth: Growth) -> None:
    if growth.largest_batch is not None:
        console.print(f"largest batch that fits: {growth.largest_batch:,}")
    elif growth.why_not:
        console.print(f"other batches are not solved: {growth.why_not}")
    time = f", {format_seconds(estimate.step_s)} by roofline" if estimate.step_s is not None else ""
    if estimate.flops is not None:
        console.print(f"{estimate.flops:,} FLOP a step{time}")
    if estimate.not_modelled:
        console.print(f"allocations not modelled: {', '.join(estimate.not_modelled)}")
    for note in (*estimate.notes, estimate.program):
        console.print(note, soft_wrap=True)
