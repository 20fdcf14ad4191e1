"""``brim estimate --gpus``: memory of every rank, as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.loading import MODELS, load
from brim.cli.options import print_json
from brim.core.options import build
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.estimation.ranks.job import MegatronOptions
from brim.requests.plan import MeshRequest
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.estimate.options import EstimateOptions
    from brim.estimation.ranks.estimate import ParallelEstimate, Rank
    from brim.estimation.ranks.split import Split

_MOST_ROWS = 16


def report(options: EstimateOptions, split: Split) -> int | None:
    """Estimate and print. Return the exit code where it does not fit."""
    model, gpu, vram, settings = options.model, options.gpu, options.vram, dict(options.workload)
    del settings["batch"]
    for name in ("method", "new_tokens", "lora_rank", "lora_targets"):
        if settings.pop(name) is not None:
            raise UsageError(
                f"Cannot use --{name.replace('_', '-')} with --gpus.", "Only full training can be split so far."
            )
    load("brim.estimation.ranks.estimate", MODELS)
    _say_what_is_ruled_out(model, settings, split, gpu, vram)
    with Console(stderr=True).status("Predicting one rank of each kind"):
        from brim.estimation.ranks.estimate import estimate_ranks

        estimate = estimate_ranks(
            model, split, engine=options.engine or "torch", gpu=gpu, vram=vram, alloc_conf=options.alloc_conf,
            compiled=options.compiled, megatron=MegatronOptions(**options.megatron) if options.megatron else None,
            **settings,
        )  # fmt: skip
    if options.as_json:
        print_json(estimate.to_json())
    else:
        _print(estimate, _further(options, estimate))
    return BudgetError.exit_code if estimate.fits is False else None


def _say_what_is_ruled_out(
    model: str, settings: dict[str, Any], split: Split, gpu: str | None, vram: int | str | None
) -> None:
    """Report early if a simple division shows that no split fits; the full estimate follows."""
    from brim import catalog
    from brim.estimation.models import find_model
    from brim.estimation.ranks.sizes import shape_of
    from brim.estimation.simulation import place_of
    from brim.planning.meshes.search import Pieces
    from brim.planning.meshes.torch_engine import least_states

    room = place_of(gpu, vram).available_bytes
    adam = settings["optimizer"] in (None, "adam", "adamw") and settings["precision"] != "bf16"
    if room is None or gpu is None or split.offload_shards or not adam:
        return
    try:
        pieces = Pieces(shape_of(find_model(model)), catalog.gpu(gpu), settings["seq"] or 1)
    except UnsupportedError:  # its parameters are not known without a trace
        return
    least = least_states(pieces.parameters(), split.gpus)
    if least > room:
        click.echo(
            f"No split fits: weights, gradients and states take {format_bytes(least)} on each of {split.gpus} "
            f"GPUs, and one has {format_bytes(room)} for them. The prediction of this split follows.",
            err=True,
        )


def _further(options: EstimateOptions, estimate: ParallelEstimate) -> str:
    """The command that searches for splits that fit, where a GPU is given."""
    if options.gpu is None:
        return ""
    split, seq = estimate.split, estimate.workload.seq
    changed = {"task": "train", "vram": None, "gpus": split.gpus, "global_batch": split.global_batch}
    request = build(MeshRequest, vars(options) | changed | ({"seq": seq} if seq else {}))
    return f" To search splits that fit: {request.command()}"


def _print(estimate: ParallelEstimate, further: str) -> None:
    console = Console(highlight=False)
    where = f" on {estimate.gpu}" if estimate.gpu else ""
    console.print(f"{estimate.model}{where}: {estimate.workload.describe()}", soft_wrap=True)
    told = verdict.of_precision(estimate.workload.precision, estimate.precision_origin)
    console.print(told, soft_wrap=True)
    console.print(estimate.split.describe(), soft_wrap=True)
    _print_ranks(console, estimate)
    _print_breakdown(console, estimate)
    worst = estimate.worst
    told = f"worst rank: {_name(worst)}, {format_bytes(worst.peak_bytes.allocated)} allocated"
    console.print(f"{told}; the largest process takes {format_bytes(estimate.process_bytes)}")
    if worst.ram is not None:
        console.print(
            f"in RAM: {format_bytes(worst.ram.reserved)} for that rank, "
            f"{format_bytes(estimate.node_ram_bytes)} for all of a node", soft_wrap=True,
        )  # fmt: skip
    if estimate.fits is False:
        console.print(f"It does not fit.{further}", soft_wrap=True)
    _last_lines(console, estimate)


def _last_lines(console: Console, estimate: ParallelEstimate) -> None:
    if estimate.time is not None:
        time = estimate.time
        console.print(
            f"{format_seconds(time.step_s)} a step: {format_seconds(time.compute_s)} kernels, "
            f"{format_seconds(time.communication_s)} waiting for collectives"
            f"{' and shards' if estimate.split.offload_shards else ''}, {format_seconds(time.bubble_s)} "
            f"pipeline bubble, {format_seconds(time.once_s)} gradients, weights and optimizer",
            soft_wrap=True,
        )  # fmt: skip
    console.print(f"{estimate.flops:,} FLOP a step on all GPUs")
    if estimate.not_modelled:
        console.print(f"allocations not modelled: {', '.join(estimate.not_modelled)}")
    for note in estimate.notes:
        console.print(note, soft_wrap=True)


def _print_ranks(console: Console, estimate: ParallelEstimate) -> None:
    """Print a row for ranks that are alike, the worst first where there are many."""
    alike: dict[tuple[int, ...], list[Rank]] = {}
    for rank in estimate.ranks:
        sizes = _sizes(rank)
        alike.setdefault((rank.coordinates["pp"], *sizes), []).append(rank)
    groups = sorted(alike.values(), key=lambda ranks: ranks[0].rank)
    if len(groups) > _MOST_ROWS:
        groups = sorted(groups, key=lambda ranks: -ranks[0].peak_bytes.allocated)[:_MOST_ROWS]
    in_ram = ("in RAM",) if estimate.split.offload_shards else ()
    rows = []
    for ranks in groups:
        named = f"{ranks[0].rank}" if len(ranks) == 1 else f"{ranks[0].rank} to {ranks[-1].rank}"
        mark = " (worst)" if estimate.worst_rank in {rank.rank for rank in ranks} else ""
        rows.append((f"{named}{mark}", f"{ranks[0].coordinates['pp']}", *map(format_bytes, _sizes(ranks[0]))))
    if len(alike) > len(groups):
        rows.append((f"{len(alike) - len(groups)} other stages take less",))
    console.print_table(("ranks", "stage", "allocated", "reserved", "process", *in_ram), rows)


def _sizes(rank: Rank) -> tuple[int, ...]:
    peak = rank.peak_bytes
    return (peak.allocated, peak.reserved, peak.process, *([rank.ram.reserved] if rank.ram is not None else []))


def _print_breakdown(console: Console, estimate: ParallelEstimate) -> None:
    worst = estimate.worst
    total = max(worst.peak_bytes.process, 1)
    kept = worst.peak_bytes.process - sum(worst.breakdown.values())
    sizes = worst.breakdown | {"kept by the allocator, unused": kept}
    console.print_table((f"at the peak of rank {worst.rank}", "bytes", "share"), verdict.shares(sizes, total))


def _name(rank: Rank) -> str:
    return f"{rank.rank} ({', '.join(f'{axis} {place}' for axis, place in rank.coordinates.items())})"
