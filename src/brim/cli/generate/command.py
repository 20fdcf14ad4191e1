"""Generate text with a model that may be larger than memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.table import Table

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.generate import chat as generate_chat
from brim.cli.generate import split as generate_split
from brim.cli.generate.options import GenerateOptions
from brim.cli.loading import MODELS, load, loading_bar
from brim.cli.options import command, print_json, write_html
from brim.core.options import build
from brim.errors import UsageError
from brim.requests.generate import Request
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.run.generate.request import Figures


@command(GenerateOptions)
def generate(options: GenerateOptions) -> int | None:
    """Generate text with a model that may be larger than memory.

    MODEL is a Hugging Face folder, a .gguf file, or a hub id if there is a network.

    Decoding is greedy, unless --temperature, --top-p or --top-k is given. Then tokens are sampled, and the model's
    generation config has the other settings. Without a prompt, on a terminal, a conversation begins: Ctrl-C stops an
    answer, Ctrl-D ends the conversation.

    With --prompts, the answers are printed in the order of the prompts. With --json, each answer is one JSON object
    on a line, and the last line is a summary.
    """
    prompt, prompts = options.prompt, options.prompts
    if prompt is not None and prompts is not None:
        raise click.UsageError("Give either --prompt or --prompts.")
    talks = prompt is None and prompts is None
    if talks and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("Give --prompt (- is stdin) or --prompts; a conversation needs a terminal.")
    if options.context is not None and not talks:
        raise click.UsageError("--context is for conversations, without --prompt and --prompts.")
    source = click.get_current_context().get_parameter_source("batch")
    if prompts is None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--batch is for --prompts.")
    options.sampling.check()
    if prompt == "-":
        options = replace(options, prompt=_of_stdin())
    if generate_split.over_ranks(options):
        if prompt is None or options.html is not None:
            raise click.UsageError("Conversations, --prompts and --html do not work on several ranks.")
        return generate_split.run(options)
    if talks:
        if options.as_json or options.html is not None:
            raise click.UsageError("--json and --html take a --prompt or --prompts.")
        generate_chat.run(build(Request, vars(options)), options.context)
        return None
    return _generate_one(options) if prompts is None else _generate_many(options, prompts)


def _of_stdin() -> str:
    """The standard input without its last line end. Raises UsageError where it is empty or no UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            "Cannot read the prompt from stdin.", f"It is not UTF-8: {error.reason}, at byte {error.start}."
        ) from error
    if not text.strip():
        raise UsageError("Cannot read the prompt from stdin.", "It is empty.", "Give at least one word.")
    return text.removesuffix("\n").removesuffix("\r")


def _generate_one(options: GenerateOptions) -> int:
    load("brim.run.generate.request", MODELS)
    from brim.cli.run_report import compute_of
    from brim.run.generate.request import generate as run

    request, as_json = build(Request, vars(options)), options.as_json
    progress = Console(stderr=True)
    with progress.status("starting", spinner="dots") as status:

        def on_stage(stage: str) -> None:
            status.update(stage)
            if stage == "generating" and not as_json:
                status.stop()  # the text itself shows the progress from here on

        def on_text(text: str) -> None:
            if not as_json:
                sys.stdout.write(text)
                sys.stdout.flush()

        result = run(request, on_stage=on_stage, on_loaded=loading_bar(status, enabled=not as_json), on_text=on_text)
    compute = compute_of(result.timeline, result.predicted)
    if options.html is not None:
        _write_html(options.html, result, compute)
    if as_json:
        print_json(result.to_json() | {"compute": compute})
    else:
        sys.stdout.write("\n")
        _summary(result, progress)
    return verdict.of_exceeded(result.plan.exceeded(result.measured_bytes), progress)


def _generate_many(options: GenerateOptions, path: Path) -> int:
    load("brim.run.generate.request", MODELS)
    from brim.cli.run_report import compute_of
    from brim.run.generate.inputs import read_prompts
    from brim.run.generate.request import Answer, generate_many

    request = build(Request, vars(options) | {"prompt": read_prompts(path)})
    as_json = options.as_json
    progress = Console(stderr=True)
    with progress.status("starting", spinner="dots") as status:

        def on_stage(stage: str) -> None:
            status.update(stage)
            status.start()

        def on_answer(answer: Answer) -> None:
            status.stop()  # ends before the answer is printed below it
            if as_json:
                line = json.dumps(answer.to_json())
            else:
                line = f"[{answer.index + 1}] {answer.prompt}\n{answer.text}\n"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        loading = loading_bar(status, enabled=not as_json)
        result = generate_many(request, on_stage=on_stage, on_loaded=loading, on_answer=on_answer)
    compute = compute_of(result.timeline, result.predicted)
    if options.html is not None:
        _write_html(options.html, result, compute)
    if as_json:
        sys.stdout.write(json.dumps({"summary": result.to_json() | {"compute": compute}}) + "\n")
    else:
        _summary(result, progress)
        progress.print(
            f"{result.tokens} tokens in {format_seconds(result.seconds)}: {result.tokens_per_s:.4g} tokens/s, "
            f"{result.batch} sequences at once"
        )
    return verdict.of_exceeded(result.plan.exceeded(result.measured_bytes), progress)


def _write_html(path: Path, result: Figures, compute: Mapping[str, Any]) -> None:
    from brim.cli.run_report import compute_tables, memory_table, views_of
    from brim.report.html.page import Table, page

    plan = result.plan
    measured = {tier: result.measured_bytes[tier] for tier in plan.budget_bytes if tier in result.promised_bytes}
    memory = memory_table(result.timeline, plan.budget_bytes, result.promised_bytes, measured)
    time = Table(
        title="Time per token",
        columns=("promised_s", "measured_s", "eta"),
        rows=((plan.promise.step_s, result.s_per_token, result.eta),),
        note="Eta is the least time that this machine's probe allows, over the time that was taken.",
    )
    views = views_of(result.timeline, result.predicted, plan)
    tables = [memory, time, *compute_tables(compute)]
    write_html(path, page(views, title=f"{plan.model}: {plan.task}", tables=tables, one_axis=True))


def _summary(result: Figures, console: Console) -> None:
    table = Table(title="promised and measured", title_justify="left")
    for column in ("", "budget", "promised", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    plan = result.plan
    for tier in (tier for tier in plan.budget_bytes if tier in result.promised_bytes):
        cells = (plan.budget_bytes[tier], result.promised_bytes[tier], result.measured_bytes[tier])
        table.add_row(tier.upper(), *(format_bytes(count) for count in cells))
    measured_s = "-" if result.s_per_token is None else format_seconds(result.s_per_token)
    table.add_row("time per token", "", format_seconds(plan.promise.step_s), measured_s)
    console.print(table)
    told = verdict.of_precision(*result.precision)
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    blocks = [d for d in plan.decisions if d.technique == "weight_streaming"]
    resident = sum(d.bytes for d in blocks if d.choice == "resident")
    streamed = sum(d.bytes for d in blocks if d.choice != "resident")
    eta = "" if result.eta is None else f"; eta {result.eta:.2f} of what this machine's probe allows"
    console.print(
        f"{format_bytes(resident)} of blocks resident, {format_bytes(streamed)} streamed; "
        f"limited by {plan.promise.limited_by or 'compute'}{eta}"
    )
