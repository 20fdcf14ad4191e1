"""``brim train`` under torchrun: each rank trains its part of the model, one log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.options import print_json
from brim.cli.split_options import under_torchrun
from brim.core.options import option_fields
from brim.errors import UnsupportedError, UsageError
from brim.requests.train import RankOptions, Request


def asked_for(ranks: Mapping[str, Any]) -> bool:
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


def run(training: Request, ranks: Mapping[str, Any], *, as_json: bool) -> None:
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
