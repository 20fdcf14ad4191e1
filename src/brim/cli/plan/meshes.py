"""``brim plan --gpus``: the fastest splits of a training job over several GPUs."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.loading import MODELS, load
from brim.cli.options import print_json
from brim.core.options import words
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.units import format_bytes, format_seconds
from brim.version import __version__

if TYPE_CHECKING:
    from brim.estimation.ranks.estimate import ParallelEstimate
    from brim.estimation.ranks.split import Split
    from brim.planning.meshes.search import Mesh
    from brim.planning.ranks import Meshes
    from brim.requests.plan import MeshRequest


def show(request: MeshRequest, output: Path | None, as_json: bool) -> int | None:
    """Search, prove, print and write the best to ``output``, or print changes that fit. Return the exit code."""
    _check(request)
    started = time.perf_counter()
    load("brim.estimation.ranks.estimate", MODELS)
    with Console(stderr=True).status("Comparing meshes"):
        answer = _searched(request)
    if isinstance(answer, BudgetError):
        return _show_nearest(request, answer, as_json=as_json)
    took_s = time.perf_counter() - started
    if output is not None:
        _write(output, request, *answer.rows[0])
    if as_json:
        print_json(_document(request, answer, took_s))
    else:
        _print(request, answer, took_s)
    return None


def _searched(request: MeshRequest) -> Meshes | BudgetError:
    """The search's result, or the reason why nothing fits."""
    from brim.planning.ranks import fastest

    try:
        answer = fastest(request)
    except BudgetError as error:
        return error
    if answer.rows:
        return answer
    asked = f"Cannot split {request.model} over {request.gpus} {request.gpu}."
    return BudgetError(asked, f"{answer.none()}.", smallest_bytes=answer.least_bytes)


def _show_nearest(request: MeshRequest, refusal: BudgetError, *, as_json: bool) -> int:
    """Print the nearest settings that fit."""
    from brim.planning.ranks import assumed, smallest_fits
    from brim.planning.ranks_nearest import infeasible

    console = Console(highlight=False, soft_wrap=True)
    if not as_json:  # printed before the slower part
        why = " ".join(part for part in (refusal.asked, refusal.found) if part)
        console.print(f"Nothing fits. {why}")
        for text in assumed(request):
            console.print(f"assumed: {text}")
        if refusal.todo:
            console.print(refusal.todo)
    with Console(stderr=True).status("Searching for changes that fit"):
        answer = infeasible(request, refusal, smallest_fits)
    if as_json:
        print_json({
            "model": str(request.model), "gpus": request.gpus, "engine": request.engine or "torch",
            "assumed": assumed(request), "proposals": [],
            "infeasible": answer.to_json(),
        })  # fmt: skip
        return BudgetError.exit_code
    for change in answer.nearest:
        console.print(f"It fits with {change.change}: {change.command}")
    if not answer.nearest:
        console.print("No small change that fits was found.")
    return BudgetError.exit_code


def _write(path: Path, request: MeshRequest, mesh: Mesh, proof: ParallelEstimate) -> None:
    """Write a plan for ``torchrun ... --no-python brim train --plan``."""
    from brim.planning.ranks import engine_of
    from brim.run.ranks import plan as distributed_plan

    engine, precision = engine_of(mesh, request)
    plan = distributed_plan.SplitPlan(
        brim=__version__, model=str(request.model), gpu=str(request.gpu), engine=engine, precision=precision,
        sequence=request.seq, split=mesh.split, checkpointing=mesh.checkpointing, peak_bytes=proof.process_bytes,
        step_s=proof.step_s or mesh.step_s,
    )  # fmt: skip
    distributed_plan.write(path, plan)


def _check(request: MeshRequest) -> None:
    if request.task != "train":
        raise UnsupportedError(
            "Cannot use --gpus for generating.", "Only training can be split so far.", "Use --task train."
        )
    if not request.gpu:
        raise UsageError(
            "Cannot use --gpus without --gpu.", "The prediction depends on the GPU.", 'Add --gpu "A100 80GB".'
        )


def _command(request: MeshRequest, mesh: Mesh) -> str:
    from brim.planning.ranks import engine_of

    engine, precision = engine_of(mesh, request)
    line = ["brim", "estimate", str(request.model), *words(mesh.split, without=("dp",)), "--gpu", str(request.gpu)]
    line += ["--seq", str(request.seq), "--checkpointing", mesh.checkpointing, "--engine", engine]
    return shlex.join([*line, *(["--precision", precision] if engine == "torch" else [])])


def _document(request: MeshRequest, answer: Meshes, took_s: float) -> dict[str, Any]:
    from brim.planning.ranks import assumed

    proposals = []
    for mesh, proof in answer.rows:
        document = proof.to_json()
        document.pop("ranks")
        proposals.append(document | {
            "interleave": mesh.split.interleave, "zero": mesh.split.zero, "micro_batch": mesh.split.micro_batch,
            "global_batch": mesh.split.global_batch, "sequence_parallel": mesh.split.sequence_parallel,
            "checkpointing": mesh.checkpointing, "stage_layers": list(mesh.split.stage_layers),
            "offload_shards": mesh.split.offload_shards, "zero_bubble": mesh.split.zero_bubble,
            "command": _command(request, mesh),
        })  # fmt: skip
    return {
        "model": str(request.model), "gpus": request.gpus, "meshes": answer.looked_at, "traced": answer.traced,
        "least_bytes": answer.least_bytes, "assumed": assumed(request), "proposals": proposals, "took_s": took_s,
    }  # fmt: skip


def _size(split: Split, axis: str) -> str:
    """The size along ``axis`` for the table; a zero-bubble pipeline's is marked."""
    return f"{split.interleave}{' zb' * split.zero_bubble}" if axis == "v" else str(split.size(axis))


def _print(request: MeshRequest, answer: Meshes, took_s: float) -> None:
    from brim.planning.ranks import assumed

    rows = answer.rows
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{request.model}: train on {request.gpus} {request.gpu}, {request.seq:,} tokens")
    console.print(verdict.of_precision(rows[0][1].workload.precision, rows[0][1].precision_origin))
    for text in assumed(request):
        console.print(f"assumed: {text}")
    in_ram = any(mesh.split.offload_shards for mesh, _ in rows)
    ram = ["RAM of a node"] if in_ram else []
    axes = ["tp", "pp", "v", *(axis for axis in ("cp", "ep") if any(mesh.split.size(axis) > 1 for mesh, _ in rows))]
    axes += ["dp", *(["zero"] if len({mesh.split.zero for mesh, _ in rows}) > 1 else [])]
    columns = ["", *axes, "micro", "recompute", "worst rank", *ram, "s/step", "tokens/s"]
    lines = []
    for number, (mesh, proof) in enumerate(rows, 1):
        step_s = proof.step_s or mesh.step_s
        tokens = mesh.split.global_batch * request.seq / step_s
        split = mesh.split
        lines.append((
            str(number), *(_size(split, axis) for axis in axes),
            f"{split.micro_batches:,}x{split.micro_batch}", mesh.checkpointing,
            format_bytes(proof.process_bytes), *([format_bytes(proof.node_ram_bytes)] if in_ram else []),
            format_seconds(step_s), f"{tokens:,.0f}",
        ))  # fmt: skip
    console.print_table(columns, lines, first="right")
    if in_ram:
        console.print("No split fits on the GPUs alone: these keep ZeRO-3's shards in RAM.")
    halves = ", zb: zero-bubble" if any(mesh.split.zero_bubble for mesh, _ in rows) else ""
    console.print(f"v: model chunks a rank{halves}; micro: micro-batches a step, and sequences in each")
    console.print(f"To predict every rank of the first: {_command(request, rows[0][0])}")
    for note in rows[0][1].notes:
        console.print(note)
    console.print(f"compared {answer.looked_at:,} meshes in {format_seconds(took_s)}, {answer.traced} of them traced")
