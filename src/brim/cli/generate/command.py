"""Generate text with a model that may be larger than memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.generate import chat as generate_chat
from brim.cli.generate import split as generate_split
from brim.cli.loading import MODELS, load, loading_bar
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
from brim.errors import UsageError
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.run.generate.request import Figures


class _AutoOr(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``auto``, or a whole number from 1 on."""

    name = "auto or number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = str(value).isascii() and str(value).isdigit()
        if value != "auto" and not (number and int(value) >= 1):
            self.fail(f"{value!r} is neither auto nor a number from 1 on.", param, ctx)
        return int(value) if number else value


_AUTO_OR = _AutoOr()


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.option(
    "--prompt", help="What to go on from; put into the chat template where there is one. - reads it from stdin."
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file with one prompt per line, or .jsonl with objects that have a prompt. Blank lines are skipped.",
)
@click.option("--batch", type=_AUTO_OR, help="Of --prompts, how many go through the model together; auto: as fit.")
@click.option(
    "--prefill-chunk",
    type=_AUTO_OR,
    default="auto",
    show_default=True,
    help="Tokens of a prompt that go through the model at once; auto: all, or as many as fit.",
)
@click.option("--vram", type=BUDGET, help=VRAM_HELP)
@click.option("--ram", type=BUDGET, help=RAM_HELP)
@device_option
@click.option("--precision", help="fp32, bf16, fp16, int8, int4 or fp8; converted once. Default: as stored.")
@click.option("--plan", type=click.Path(path_type=Path), help="Run exactly the plan in this file of brim plan.")
@click.option(
    "--host-compute/--no-host-compute",
    default=True,
    help="Let the processor compute blocks where that is faster; its last bits are others than the GPU's.  "
    "[default: it may]",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--system", help="What the chat template puts before the prompt, or a conversation.")
@click.option(
    "--temperature", type=float, help="Draw tokens: below 1 the likelier ones more often. 0: take the likeliest."
)
@click.option("--top-p", type=float, help="Draw from the likeliest tokens that make up this probability.")
@click.option("--top-k", type=int, help="Draw from so many of the likeliest tokens.")
@click.option(
    "--seed", type=int, help="Of what is drawn: the same seed, the same text.  [default: another each time]"
)
@click.option("--stop", multiple=True, help="End an answer before this text. May be given several times.")
@click.option(
    "--context", type=click.IntRange(min=2), help="Tokens of a conversation.  [default: 4096, or the model's]"
)
@click.option("--chat/--no-chat", default=None, help="Use the chat template or not; default: where there is one.")
@click.option("--verify", is_flag=True, help="First compare a hub download with its SHA-256: reads all of it.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model. Off by default.")
@click.option("--gpus", type=click.IntRange(min=1), help="Split the model over so many GPUs, or CPU processes.")
@click.option("--split", type=click.Choice(["layers", "tensors"]), help="What --gpus split.  [default: layers]")
@click.option("--timeout", type=Finite(min=1), help="With --gpus: seconds to wait for a rank.  [default: 600]")
@html_option
@json_option
def generate(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    context: int | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> int | None:
    """Generate text with a model that may be larger than memory.

    MODEL is a Hugging Face folder, a .gguf file, or a hub id where there is a network.

    The likeliest token is taken, unless --temperature, --top-p or --top-k is given: then tokens are drawn, and what
    is left out is as the model's generation config has it. Without a prompt, on a terminal, a conversation begins:
    Ctrl-C stops an answer, Ctrl-D ends.

    With --prompts, the answers are printed in the order of the prompts as they come; with --json one JSON object per
    line, and at last one with a summary.
    """
    if prompt is not None and prompts is not None:
        raise click.UsageError("Give either --prompt or --prompts.")
    talks = prompt is None and prompts is None
    if talks and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("Give --prompt (- is stdin) or --prompts; a conversation takes a terminal.")
    if context is not None and not talks:
        raise click.UsageError("--context is for conversations, without --prompt and --prompts.")
    if prompts is None and options["batch"] is not None:
        raise click.UsageError("--batch is for --prompts.")
    options["batch"] = options["batch"] or "auto"
    options["sampling"] = _sampling(options)
    if prompt == "-":
        prompt = _of_stdin()
    split = {name: options.pop(name) for name in generate_split.SPLIT}
    if generate_split.asked_for(split):
        if prompt is None or html is not None:
            raise click.UsageError("Conversations, --prompts and --html do not work on several ranks.")
        return generate_split.run(model, prompt, split, options, as_json=as_json)
    if talks:
        if as_json or html is not None:
            raise click.UsageError("--json and --html take a --prompt or --prompts.")
        generate_chat.run(model, context, options)
        return None
    if prompts is not None:
        return _many(model, prompts, html, as_json, options)
    assert prompt is not None
    return _one(model, prompt, html, as_json, options)


def _sampling(options: dict[str, Any]) -> Any:
    """Checked before PyTorch is imported. Raises UsageError."""
    from brim.run.generate.sampling import Sampling

    sampling = Sampling(**{name: options.pop(name) for name in ("temperature", "top_p", "top_k", "seed")})
    sampling.check()
    return sampling


def _of_stdin() -> str:
    """All of the standard input, but for the last line end. Raises UsageError where it is empty or no UTF-8."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            "Cannot read the prompt from stdin.", f"It is not UTF-8: {error.reason}, at byte {error.start}."
        ) from error
    if not text.strip():
        raise UsageError("Cannot read the prompt from stdin.", "It is empty.", "Give at least one word.")
    return text.removesuffix("\n").removesuffix("\r")


def _one(model: str, prompt: str, html: Path | None, as_json: bool, options: dict[str, Any]) -> int:
    load("brim.run.generate.request", MODELS)
    from brim.cli.run_report import compute_of
    from brim.run.generate.request import Request
    from brim.run.generate.request import generate as run

    request = Request(model=model, prompt=prompt, **options)
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

        result = run(request, on_stage=on_stage, on_loaded=loading_bar(status, told=not as_json), on_text=on_text)
    compute = compute_of(result.timeline, result.predicted)
    if html is not None:
        _write_html(html, result, compute)
    if as_json:
        print_json(result.to_json() | {"compute": compute})
    else:
        sys.stdout.write("\n")
        _summary(result, progress)
    return verdict.of_exceeded(result.plan.exceeded(result.measured_bytes), progress)


def _many(model: str, path: Path, html: Path | None, as_json: bool, options: dict[str, Any]) -> int:
    load("brim.run.generate.request", MODELS)
    from brim.cli.run_report import compute_of
    from brim.run.generate.inputs import read_prompts
    from brim.run.generate.request import Answer, Request, generate_many

    request = Request(model=model, prompt=read_prompts(path), **options)
    progress = Console(stderr=True)
    with progress.status("starting", spinner="dots") as status:

        def on_stage(stage: str) -> None:
            status.update(stage)
            status.start()

        def on_answer(answer: Answer) -> None:
            status.stop()  # what is printed now is not to be mixed with it
            if as_json:
                line = json.dumps(answer.to_json())
            else:
                line = f"[{answer.index + 1}] {answer.prompt}\n{answer.text}\n"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        loading = loading_bar(status, told=not as_json)
        result = generate_many(request, on_stage=on_stage, on_loaded=loading, on_answer=on_answer)
    compute = compute_of(result.timeline, result.predicted)
    if html is not None:
        _write_html(html, result, compute)
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
