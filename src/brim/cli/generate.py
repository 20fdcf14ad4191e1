"""Generate text with a model that may be larger than memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from brim.cli.options import BYTES, device_option, html_option, json_option, print_json, write_html
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.run.generation import Generation


@click.command()
@click.argument("model")
@click.option("--prompt", required=True, help="What to go on from; put into the chat template where there is one.")
@click.option("--vram", type=BYTES, help="Budget of the compute device, such as 8GiB; default: 90 % of what is free.")
@click.option("--ram", type=BYTES, help="Budget of host memory; default: 90 % of what is free.")
@device_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--chat/--no-chat", default=None, help="Use the chat template or not; default: where there is one.")
@click.option("--verify", is_flag=True, help="First compare a hub download with its SHA-256: reads all of it.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model. Off by default.")
@html_option
@json_option
def generate(model: str, html: Path | None, as_json: bool, **options: Any) -> None:
    """Generate text with a model that may be larger than memory.

    MODEL is a Hugging Face folder, a .gguf file, or a hub id where there is a network.
    """
    from brim.cli.run_report import compute_of
    from brim.run.generation import Request
    from brim.run.generation import generate as run

    request = Request(model=model, **options)
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

        result = run(request, on_stage=on_stage, on_text=on_text)
    compute = compute_of(result.timeline, result.predicted)
    if html is not None:
        _write_html(html, result, compute)
    if as_json:
        print_json(result.to_json() | {"compute": compute})
        return
    sys.stdout.write("\n")
    _summary(result, progress)


def _write_html(path: Path, result: Generation, compute: Mapping[str, Any]) -> None:
    from brim.cli.run_report import compute_tables, views_of
    from brim.report.html import Table

    plan = result.plan
    promised, measured = result.promised_bytes, result.measured_bytes
    rows = tuple(
        (tier.upper(), plan.budget_bytes[tier], promised[tier], measured[tier]) for tier in plan.budget_bytes
    )
    memory = Table(
        title="Memory, promised and measured",
        columns=("tier", "budget_bytes", "promised_bytes", "measured_bytes"),
        rows=rows,
        note="Measured is the whole process; the picture shows what brim's pools held.",
    )
    time = Table(
        title="Time per token",
        columns=("promised_s", "measured_s", "eta"),
        rows=((plan.promise.step_s, result.s_per_token, result.eta),),
        note="Eta is the least time that this machine's probe allows, over the time that was taken.",
    )
    views = views_of(result.timeline, result.predicted, plan)
    tables = [memory, time, *compute_tables(compute)]
    write_html(path, views, title=f"{plan.model}: {plan.task}", tables=tables, one_axis=True)


def _summary(result: Generation, console: Console) -> None:
    table = Table(title="promised and measured", title_justify="left")
    for column in ("", "budget", "promised", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    plan = result.plan
    for tier in plan.budget_bytes:
        cells = (plan.budget_bytes[tier], result.promised_bytes[tier], result.measured_bytes[tier])
        table.add_row(tier.upper(), *(format_bytes(count) for count in cells))
    measured_s = "-" if result.s_per_token is None else format_seconds(result.s_per_token)
    table.add_row("time per token", "", format_seconds(plan.promise.step_s), measured_s)
    console.print(table)
    resident = sum(d.bytes for d in plan.decisions if d.choice == "resident")
    streamed = sum(d.bytes for d in plan.decisions if d.choice != "resident")
    eta = "" if result.eta is None else f"; eta {result.eta:.2f} of what this machine's probe allows"
    console.print(
        f"{format_bytes(resident)} of blocks resident, {format_bytes(streamed)} streamed; "
        f"limited by {plan.promise.limited_by or 'compute'}{eta}"
    )
