"""Train a model that may be larger than memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.options import command, html_field, json_field, print_json, write_html
from brim.cli.split_options import under_torchrun
from brim.core.options import build, option_fields, option_group
from brim.errors import UnsupportedError, UsageError
from brim.requests.train import RankOptions, Request

if TYPE_CHECKING:
    from brim.run.train.report import EvaluationReport, StepReport
    from brim.run.train.request import Training


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Request):
    """The options of ``brim train``: a request, its ranks, and its report's form."""

    ranks: Mapping[str, Any] = option_group(RankOptions, only_given=True)
    html: Path | None = html_field()
    as_json: bool = json_field()


@command(TrainOptions)
def train(options: TrainOptions) -> int:
    """Train a model that may be larger than memory.

    MODEL is a Hugging Face folder, a .gguf file, or a hub id if there is a network. With `auto` the planner chooses;
    other values are used as given. The data is JSONL (or a .json list) with `messages` (chat template, loss on the
    answers), alpaca's `instruction` and `output`, ShareGPT's `conversations` or `text`; or plain text, which is
    packed.
    """
    from brim.cli.run_report import compute_of
    from brim.run.train.loop import train as run

    over_ranks = _over_ranks(options.ranks)
    room: Any = options.disk or (None, None)
    request = build(Request, vars(options) | {"disk_folder": room[0], "disk": room[1]})
    if over_ranks:
        _train_over_ranks(request, options.ranks, as_json=options.as_json)
        return 0
    console = Console(stderr=True)
    with console.status("starting", spinner="dots") as status:

        def on_step(report: StepReport) -> None:
            status.line(report.line())

        def on_note(text: str) -> None:
            console.print(text, highlight=False)

        def on_evaluation(report: EvaluationReport) -> None:
            console.print(report.line(), highlight=False)

        result = run(
            request,
            on_stage=status.update,
            on_step=on_step,
            on_note=on_note,
            on_evaluation=on_evaluation,
            foresee=options.html is not None,
        )
    compute = compute_of(result.timeline, result.predicted)
    if options.html is not None:
        _write_html(options.html, result, compute)
    if options.as_json:
        print_json(result.to_json() | {"compute": compute})
    else:
        _summary(result, console)
        click.echo(str(result.output))
    return verdict.of_exceeded(result.plan, result.measured_bytes, console)


def _write_html(path: Path, result: Training, compute: Mapping[str, Any]) -> None:
    from brim.cli.run_report import compute_tables, memory_table, views_of
    from brim.report.html.page import Table, page

    memory = memory_table(result.timeline, result.plan.budget_bytes, result.promised_bytes, result.measured_bytes)
    time = Table(
        title="Time per step",
        columns=("promised_s", "measured_s"),
        rows=((result.plan.promise.step_s, result.step_s),),
    )
    losses = Table(title="Loss", columns=("step", "loss"), rows=tuple(enumerate(result.losses, 1)), spread=True)
    evaluated = Table(
        title="Evaluation",
        columns=("step", "loss"),
        rows=tuple((evaluation.step, evaluation.loss) for evaluation in result.evaluations),
    )
    views = views_of(result.timeline, result.predicted, result.plan)
    title = f"{result.plan.model}: {result.plan.task}"
    tables = [memory, time, *compute_tables(compute), losses, *([evaluated] if result.evaluations else [])]
    write_html(path, page(views, title=title, tables=tables, notes=result.notes, one_axis=True))


def _summary(result: Training, console: Console) -> None:
    from brim.cli.run_report import print_promise
    from brim.planning.strategy.choice import PRECISION

    precision = result.plan.choices(PRECISION)[""], result.precision_origin
    seconds = "step", result.step_s
    print_promise(console, result.plan, result.promised_bytes, result.measured_bytes, seconds, precision)
    if result.losses:
        console.print(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in {len(result.losses)} steps")
    if result.evaluations:
        console.print(result.evaluations[-1].line(), highlight=False)


def _over_ranks(ranks: Mapping[str, Any]) -> bool:
    """Return whether torchrun started this process. Raises UsageError for given options ``ranks`` without it."""
    under = under_torchrun()
    if ranks and not under:
        flag = next(field.flag for field in option_fields(RankOptions) if field.name in ranks)
        raise UsageError(
            f"{flag} was given.",
            "It splits a training over ranks, and this process is alone.",
            "Run torchrun --nproc-per-node N --no-python brim train ..., or leave it out.",
        )
    return under


def _train_over_ranks(training: Request, ranks: Mapping[str, Any], *, as_json: bool) -> None:
    """Train with the other ranks; only rank 0 prints."""
    if training.eval_data is not None or training.report_to is not None:
        option = "--eval-data" if training.eval_data is not None else "--report-to"
        raise UnsupportedError(
            f"Cannot use {option} under torchrun.",
            "It works in single-process trainings only, so far.",
            "Leave it out.",
        )
    from brim.run.ranks.request import SplitRequest
    from brim.run.ranks.train import train

    request = SplitRequest(training=training, **ranks)
    console = Console(stderr=True)
    result = train(
        request,
        on_step=lambda report: console.print(report.line(), highlight=False, soft_wrap=True),
        on_note=lambda text: console.print(text, highlight=False, soft_wrap=True),
    )
    if result is None:
        return
    if as_json:
        print_json(result.to_json())
        return
    told = verdict.of_precision(result.precision, result.precision_origin)
    console.print(told, highlight=False, soft_wrap=True)
    if result.losses:
        console.print(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in {len(result.losses)} steps")
    click.echo(str(result.output))
