"""Train a model that may be larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.options import (
    BUDGET,
    MODEL,
    RAM_HELP,
    VRAM_HELP,
    Command,
    Finite,
    device_option,
    html_option,
    json_option,
    print_json,
    write_html,
)
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.run.train.loop import Training
    from brim.run.train.report import EvaluationReport, StepReport


class _Disk(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``DIR``, ``DIR:200GiB`` or ``DIR:40%``, given to the command as (folder, amount or None)."""

    name = "folder[:bytes|:%]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        folder, _, amount = value.rpartition(":") if ":" in value else (value, "", "")
        limit = BUDGET.convert(amount, param, ctx) if amount else None
        if not Path(folder).is_dir():
            self.fail(f"{folder!r} is not a folder.", param, ctx)
        return folder, limit


class _AutoOr(click.ParamType):  # type: ignore[type-arg]
    """``auto``, given as None, or a whole number from ``least`` on."""

    def __init__(self, least: int) -> None:
        self._range = click.IntRange(min=least)
        self.name = "auto|number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value in (None, "auto") else self._range.convert(value, param, ctx)


_SEED = click.IntRange(-(2**63), 2**64 - 1)  # as torch.manual_seed


def _auto_choice(*values: str) -> click.Choice:  # type: ignore[type-arg]
    return click.Choice(["auto", *values])


def _what() -> list[Callable[..., Any]]:
    """The data, the budget and the course of the training."""
    return [
        click.option("--data", required=True, type=click.Path(path_type=Path), help="JSONL, JSON or plain text."),
        click.option(
            "--eval-data", type=click.Path(path_type=Path), help="Data whose loss is reported, not trained on."
        ),
        click.option(
            "--eval-every",
            type=click.IntRange(min=1),
            help="Steps from one evaluation to the next.  [default: at the end]",
        ),
        click.option(
            "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Where the model goes."
        ),
        click.option("--method", type=click.Choice(["full", "lora"]), default="full", show_default=True),
        click.option("--vram", type=BUDGET, help=VRAM_HELP),
        click.option("--ram", type=BUDGET, help=RAM_HELP),
        click.option(
            "--disk",
            type=_Disk(),
            help="Folder, and at most how much of it (:50GiB, :40% of what is free), for what memory cannot hold.",
        ),
        device_option,
        click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences a step."),
        click.option("--micro-batch", type=_AutoOr(1), default="auto", help="Sequences at once.  [default: auto]"),
        click.option("--seq", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens a sequence."),
        click.option("--steps", type=click.IntRange(min=1), help="How many steps; default: as --epochs says."),
        click.option("--epochs", type=click.IntRange(min=1), help="How often through the data.  [default: 1]"),
        click.option("--lr", type=Finite(min=0), default=2e-5, show_default=True),
        click.option(
            "--warmup", type=click.IntRange(min=0), default=0, help="Steps over which lr grows to its value."
        ),
        click.option("--schedule", type=click.Choice(["constant", "cosine"]), default="constant", show_default=True),
        click.option("--clip-norm", type=Finite(min=0, min_open=True), help="Largest norm of all gradients."),
    ]


def _how() -> list[Callable[..., Any]]:
    """Techniques, which the planner chooses where they are not given, and what is kept."""
    return [
        click.option("--optimizer", default="adamw", show_default=True),
        click.option("--precision", default="auto", show_default=True),
        click.option(
            "--checkpointing", type=_auto_choice("none", "selective", "full"), default="auto", show_default=True
        ),
        click.option(
            "--offload-activations", type=_AutoOr(0), default="auto", help="Of how many blocks.  [default: auto]"
        ),
        click.option(
            "--offload-optimizer", type=_auto_choice("none", "ram", "disk"), default="auto", show_default=True
        ),
        click.option("--stream-weights", type=_auto_choice("off"), default="auto", show_default=True),
        click.option(
            "--plan", type=click.Path(path_type=Path, dir_okay=False), help="Run this plan of `brim plan --output`."
        ),
        click.option("--save-every", type=click.IntRange(min=1), help="Steps from one checkpoint to the next."),
        click.option(
            "--report-to",
            type=click.Choice(["none", "tensorboard", "wandb"]),
            multiple=True,
            help="Who hears of every step; may be given twice.  [default: tensorboard where it is installed]",
        ),
        click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output."),
        click.option(
            "--change-settings",
            is_flag=True,
            help="With --resume: let --lr, --clip-norm and others differ.",
        ),
        click.option(
            "--overwrite", is_flag=True, help="Take the place of the model, or of the training, that is in --output."
        ),
        click.option("--allow-non-finite", is_flag=True, help="Go on with, and save, what is not finite (NaN, inf)."),
        click.option("--seed", type=_SEED, default=0, show_default=True, help="Of data order, adapters and dropout."),
        click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
    ]


def _ranks() -> list[Callable[..., Any]]:
    """How torchrun's ranks share the model."""
    return [
        click.option("--zero", type=click.IntRange(0, 3), help="Under torchrun: stage of ZeRO.  [default: 0]"),
        click.option(
            "--offload-shards", is_flag=True, help="With --zero: keep what it splits in RAM, and step there."
        ),
        click.option("--tp", type=click.IntRange(min=1), help="Under torchrun: ranks that split each matrix."),
        click.option("--pp", type=click.IntRange(min=1), help="Under torchrun: pipeline stages."),
        click.option("--interleave", type=click.IntRange(min=1), help="Pieces of the model on each pipeline rank."),
        click.option(
            "--zero-bubble", is_flag=True, help="With --pp: gradients of weights where a pipeline rank would wait."
        ),
        click.option(
            "--ep", type=click.IntRange(min=1), help="Under torchrun: data-parallel ranks that share experts."
        ),
        click.option("--cp", type=click.IntRange(min=1), help="Under torchrun: ranks that share a sequence."),
        click.option("--sp", is_flag=True, help="With --tp: split the sequence too, between the matrices."),
        click.option("--timeout", type=Finite(min=1), help="Seconds to wait for a rank.  [default: 600]"),
    ]


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Everything but MODEL, in the order of the help."""
    for option in reversed([*_what(), *_how(), *_ranks(), html_option, json_option]):
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@_options
def train(
    model: str, html: Path | None, as_json: bool, disk: tuple[str, int | str | None] | None, **options: Any
) -> int:
    """Train a model that may be larger than memory.

    MODEL is a Hugging Face folder, a .gguf file, or a hub id where there is a network. `auto` is the planner's
    choice, a value is an order. The data is JSONL (or a .json list) with `messages` (chat template, loss on the
    answers), alpaca's `instruction` and `output`, ShareGPT's `conversations` or `text`; or plain text, which is
    packed.
    """
    from brim.cli.run_report import compute_of
    from brim.cli.train import split as train_split
    from brim.run.train.loop import Request
    from brim.run.train.loop import train as run

    over_ranks = train_split.asked_for(options)
    split = {name: options.pop(name) for name in train_split.SPLIT}
    folder, limit = disk or (None, None)
    request = Request(model=model, disk_folder=folder, disk=limit, **_resolved(options))
    if over_ranks:
        train_split.run(request, split, as_json=as_json)
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
            foresee=html is not None,
        )
    compute = compute_of(result.timeline, result.predicted)
    if html is not None:
        _write_html(html, result, compute)
    if as_json:
        print_json(result.to_json() | {"compute": compute})
    else:
        _summary(result, console)
        click.echo(str(result.output))
    return verdict.of_exceeded(result.plan.exceeded(result.measured_bytes), console)


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    """The words of the command line as Request has them: None where the planner chooses."""
    resolved = dict(options)
    resolved["precision"] = None if resolved["precision"] == "auto" else resolved["precision"]
    resolved["checkpointing"] = None if resolved["checkpointing"] == "auto" else resolved["checkpointing"]
    offload = resolved["offload_optimizer"]
    resolved["offload_optimizer"] = {"auto": None, "none": "keep"}.get(offload, offload)
    resolved["report_to"] = resolved["report_to"] or None
    resolved["stream_weights"] = None if resolved["stream_weights"] == "auto" else False
    return resolved


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
    from brim.planning.strategy.choice import PRECISION

    table = Table(title="promised and measured", title_justify="left")
    for column in ("", "budget", "promised", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    for tier, measured in result.measured_bytes.items():
        budget = result.plan.budget_bytes.get(tier)
        cells = (budget, result.promised_bytes.get(tier, 0), measured)
        table.add_row(tier.upper(), *("" if count is None else format_bytes(count) for count in cells))
    table.add_row("time per step", "", format_seconds(result.plan.promise.step_s), format_seconds(result.step_s))
    console.print(table)
    told = verdict.of_precision(result.plan.choices(PRECISION)[""], result.precision_origin)
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    if result.losses:
        console.print(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in {len(result.losses)} steps")
    if result.evaluations:
        console.print(result.evaluations[-1].line(), highlight=False)
