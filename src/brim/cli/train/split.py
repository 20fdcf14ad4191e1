"""``brim train`` under torchrun: each rank its part of the model, one log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.options import print_json
from brim.cli.split_options import under_torchrun
from brim.errors import UnsupportedError, UsageError
from brim.run.train.request import Request

# Option as the command line has it -> its value where it was not given.
SPLIT = {
    "zero": None, "offload_shards": False, "tp": None, "pp": None, "interleave": None, "zero_bubble": False,
    "sp": False, "ep": None, "cp": None, "timeout": None,
}  # fmt: skip


def asked_for(options: Mapping[str, Any]) -> bool:
    """Whether this run is one over ranks: torchrun has started it."""
    under = under_torchrun()
    split_options = [name for name, unset in SPLIT.items() if options[name] != unset]
    if split_options and not under:
        raise UsageError(
            f"--{split_options[0].replace('_', '-')} was given.",
            "It splits a training over ranks, and this process is alone.",
            "Run torchrun --nproc-per-node N --no-python brim train ..., or leave it out.",
        )  # fmt: skip
    return under


def run(training: Request, options: Mapping[str, Any], *, as_json: bool) -> None:
    """Train with the others; only rank 0 says anything."""
    if training.eval_data is not None or training.report_to is not None:
        option = "--eval-data" if training.eval_data is not None else "--report-to"
        raise UnsupportedError(
            f"Cannot use {option} under torchrun.",
            "It works in single-process trainings only, so far.",
            "Leave it out.",
        )
    from brim.run.ranks.request import TIMEOUT_S, SplitRequest
    from brim.run.ranks.train import train

    request = SplitRequest(
        training=training, zero=options["zero"] or 0, tp=options["tp"] or 1, pp=options["pp"] or 1,
        interleave=options["interleave"] or 1, sequence_parallel=options["sp"],
        offload_shards=options["offload_shards"], zero_bubble=options["zero_bubble"], ep=options["ep"] or 1,
        cp=options["cp"] or 1,
        timeout_s=options["timeout"] or TIMEOUT_S,
    )  # fmt: skip
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
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    if result.losses:
        console.print(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in {len(result.losses)} steps")
    click.echo(str(result.output))
