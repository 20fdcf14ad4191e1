"""Generate text with a model that may be larger than memory: on this device, over several ranks, or as a talk."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.loading import MODELS, load, loading_bar
from brim.cli.options import command, html_field, json_field, print_json, write_html
from brim.cli.split_options import under_torchrun
from brim.core.options import build, option, words
from brim.errors import UsageError
from brim.requests.generate import Request
from brim.requests.train import TIMEOUT_S
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.run.generate.request import Figures

_PROMPT = "> "
_HINT = "Ctrl-C stops an answer, Ctrl-D ends."


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Request):
    """The options of ``brim generate``: a request, its ranks, and its report's form."""

    prompts: Path | None = option(
        None,
        "A file with one prompt per line, or .jsonl with objects that have a prompt. Blank lines are skipped.",
        kind="existing_file",
        after="prompt",
    )
    context: int | None = option(
        None, "Maximum number of tokens of a conversation.  [default: 4096, or the model's]", min=2, after="stop"
    )
    gpus: int | None = option(None, "Split the model over this number of GPUs or CPU processes.", min=1)
    split: Literal["layers", "tensors"] | None = option(
        None, "With --gpus: split layers, or tensors.  [default: layers]"
    )
    timeout: float | None = option(None, "With --gpus: seconds to wait for a rank.  [default: 600]", min=1)
    html: Path | None = html_field()
    as_json: bool = json_field()


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
    if _over_ranks(options):
        if prompt is None or options.html is not None:
            raise click.UsageError("Conversations, --prompts and --html do not work on several ranks.")
        return _over_all_ranks(options)
    if talks:
        if options.as_json or options.html is not None:
            raise click.UsageError("--json and --html take a --prompt or --prompts.")
        _converse(build(Request, vars(options)), options.context)
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
                _write(text)

        result = run(request, on_stage=on_stage, on_loaded=loading_bar(status, enabled=not as_json), on_text=on_text)
    compute = compute_of(result.timeline, result.predicted)
    if options.html is not None:
        _write_html(options.html, result, compute)
    if as_json:
        print_json(result.to_json() | {"compute": compute})
    else:
        sys.stdout.write("\n")
        _summary(result, progress)
    return verdict.of_exceeded(result.plan, result.measured_bytes, progress)


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
            _write(line + "\n")

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
    return verdict.of_exceeded(result.plan, result.measured_bytes, progress)


def _write_html(path: Path, result: Figures, compute: Mapping[str, Any]) -> None:
    from brim.cli.run_report import compute_tables, memory_table, views_of
    from brim.report.html.page import Table, page

    plan = result.plan
    memory = memory_table(result.timeline, plan.budget_bytes, result.promised_bytes, _measured(result))
    time = Table(
        title="Time per token",
        columns=("promised_s", "measured_s", "eta"),
        rows=((plan.promise.step_s, result.s_per_token, result.eta),),
        note="Eta is the least time that this machine's rates allow, divided by the measured time.",
    )
    views = views_of(result.timeline, result.predicted, plan)
    tables = [memory, time, *compute_tables(compute)]
    write_html(path, page(views, title=f"{plan.model}: {plan.task}", tables=tables, one_axis=True))


def _measured(result: Figures) -> dict[str, int]:
    """The measured bytes of the tiers with a budget and a promise."""
    tiers = (tier for tier in result.plan.budget_bytes if tier in result.promised_bytes)
    return {tier: result.measured_bytes[tier] for tier in tiers}


def _summary(result: Figures, console: Console) -> None:
    from brim.cli.run_report import print_promise

    plan, seconds = result.plan, ("token", result.s_per_token)
    print_promise(console, plan, result.promised_bytes, _measured(result), seconds, result.precision)
    blocks = [d for d in plan.decisions if d.technique == "weight_streaming"]
    resident = sum(d.bytes for d in blocks if d.choice == "resident")
    streamed = sum(d.bytes for d in blocks if d.choice != "resident")
    eta = "" if result.eta is None else f"; eta {result.eta:.2f} of the speed that this machine's rates allow"
    console.print(
        f"{format_bytes(resident)} of blocks resident, {format_bytes(streamed)} streamed; "
        f"limited by {plan.promise.limited_by or 'compute'}{eta}"
    )


# -- a conversation, line by line


def _converse(request: Request, context: int | None) -> None:
    """Ask and answer until the end of the input."""
    from brim.run.generate.request import Turn, chat

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    last: Turn | None = None
    with contextlib.ExitStack() as stack:
        with console.status("starting", spinner="dots") as status:
            loading = loading_bar(status)
            talk = stack.enter_context(chat(request, context=context, on_stage=status.update, on_loaded=loading))
        console.print(f"{request.model}, {talk.context:,} tokens of context. {_HINT}")
        console.print(verdict.of_precision(*talk.precision))
        for text in _messages(console):
            with _interrupts() as stopped:
                try:
                    last = talk.answer(text, _write, stopped=stopped)
                except UsageError as error:
                    console.print(f"Error: {error}")
                    continue
            _write("\n")
            if last.forgotten:
                console.print(f"(the oldest {last.forgotten} messages are left out: they do not fit)")
    if last is not None and last.s_per_token is not None:
        console.print(f"{format_seconds(last.s_per_token)} per token")


def _messages(console: Console) -> Iterator[str]:
    """Yield typed lines, without blank ones; an interrupt discards the current line."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # which gives ``input`` its line editing and history
    while True:
        try:
            text = input(_PROMPT)
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\n{_HINT}")
            continue
        except UnicodeDecodeError as error:
            console.print(f"\nThat is not text: {error.reason}.")
            continue
        if text.strip():
            yield text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _interrupts() -> Iterator[Any]:
    """Yield a function that tells if an interrupt has come: the first ends the answer between two tokens, a second
    raises KeyboardInterrupt."""
    came = False

    def note(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


# -- over several ranks: each runs its part of the model, rank 0 prints the text


def _over_ranks(options: GenerateOptions) -> bool:
    """Return whether this generation runs over ranks. Raises UsageError where its options contradict each other."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if under_torchrun():
        if options.gpus not in (None, world):
            raise UsageError(
                f"Cannot use --gpus {options.gpus}.",
                f"torchrun has started {world} ranks.",
                "Leave out one of the two.",
            )
        return True
    alone = options.gpus in (None, 1)
    for name in ("split", "timeout"):
        if alone and getattr(options, name) is not None:
            raise UsageError(f"--{name} was given.", "It needs several ranks.", "Give --gpus 2, or leave it out.")
    return not alone


def _over_all_ranks(options: GenerateOptions) -> int | None:
    """Generate with the other ranks, or start them all; return the exit code if not 0. Only rank 0 prints."""
    from brim.run.ranks.generate import RanksRequest, generate

    as_json = options.as_json
    request = RanksRequest(
        generation=build(Request, vars(options)), split=options.split or "layers",
        timeout_s=options.timeout or TIMEOUT_S,
    )  # fmt: skip
    if not under_torchrun():
        request.check()
        return _started(options, options.gpus or 1)

    def on_text(text: str) -> None:
        if not as_json:
            _write(text)

    result = generate(request, on_text=on_text)
    if result is None:
        return None
    if as_json:
        print_json(result.to_json())
        return None
    sys.stdout.write("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(verdict.of_precision(*result.precision))
    weights = ", ".join(format_bytes(count) for count in result.weights_bytes)
    took = "" if result.s_per_token is None else f"; {format_seconds(result.s_per_token)} per token"
    console.print(f"{result.split} split: {weights} of weights on ranks 0 to {len(result.weights_bytes) - 1}{took}")
    return None


def _started(options: GenerateOptions, gpus: int) -> int | None:
    """Start the ranks as ``torchrun --nproc-per-node GPUS --no-python brim generate`` would."""
    import torch

    from brim.run.ranks.group import start

    there = torch.cuda.device_count()
    if there and there < gpus:
        raise UsageError(
            f"--gpus {gpus} was given.", f"This machine has {there}.",
            f"Give --gpus {there}, or start the ranks of several machines by torchrun --no-python brim generate ...",
        )  # fmt: skip
    return start(gpus, ["generate", *words(options)]) or None
