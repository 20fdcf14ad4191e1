"""``brim plan --gpus``, ``--compare-gpus`` and ``--for``: splits, GPUs, engines."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.loading import MODELS, load
from brim.cli.options import print_json
from brim.core.files import write_text
from brim.core.options import build, words
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.requests.plan import MeshRequest
from brim.units import format_bytes, format_seconds
from brim.version import __version__

if TYPE_CHECKING:
    from brim.cli.plan.options import PlanOptions
    from brim.estimation.ranks.estimate import ParallelEstimate
    from brim.planning.meshes.search import Mesh
    from brim.planning.ranks import Meshes


_TOKENS = 1_000_000_000  # trained for the GPU-hours and the cost
_HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result for a number of GPUs. ``step_s`` None: nothing fits; ``summary`` has the reason. ``offload``: RAM or
    disk has a part of it. ``peak_bytes``: of each GPU, and of a node's RAM and disk."""

    gpus: int
    summary: str
    tokens: int
    step_s: float | None = None
    peak_bytes: dict[str, int] | None = None
    offload: bool = False

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours for a billion tokens."""
        return None if self.step_s is None else self.gpus * self.step_s / self.tokens * _TOKENS / _HOUR_S

    def to_json(self, price: float | None) -> dict[str, Any]:
        hours = self.gpu_hours
        return {
            "gpus": self.gpus, "way": self.summary, "offload": self.offload, "fits": self.step_s is not None,
            "step_s": self.step_s, "peak_bytes": self.peak_bytes, "gpu_hours": hours,
            "cost": None if hours is None or price is None else hours * price,
        }  # fmt: skip


def show_engine(request: MeshRequest, engine: str, output: Path | None, as_json: bool) -> int | None:
    """Plan for another engine, write its file or command, and print. Raises BudgetError where nothing fits."""
    load("brim.planning.opening", MODELS)
    from brim.planning.engines import inference, training
    from brim.planning.engines.answer import first_that_fits
    from brim.planning.request import machine_of

    request.check()
    with Console(stderr=True).status("Planning"):
        plans = {
            "accelerate": inference.accelerate, "llama.cpp": inference.llama_cpp, "vllm": inference.vllm,
            "diffusers": inference.diffusers, "deepspeed": training.deepspeed, "fsdp": training.fsdp,
        }[engine]  # fmt: skip
        plan = first_that_fits(plans(request, machine_of(request)))
    if output is not None:
        write_text(output, plan.file or f"# by brim\n{plan.command}\n")
    if as_json:
        print_json(plan.to_json())
        return None
    console = Console(highlight=False, soft_wrap=True)
    totals = (f"{format_bytes(count)} of {tier.upper()}" for tier, count in plan.peak_bytes.items() if count)
    console.print(f"{engine} runs {plan.model} in {', '.join(totals)}.", style="bold")
    budget = ", ".join(f"{format_bytes(n)} of {tier.upper()}" for tier, n in plan.machine.budget_bytes.items())
    console.print(f"{request.task} on {plan.gpus} x {plan.machine.hardware.name} with {budget}")
    for text in plan.assumed:
        console.print(f"assumed: {text}")
    parts = [(tier, name, count) for tier, uses in plan.bytes.items() for name, count in uses.items() if count]
    rows = ((tier.upper(), name.replace("_", " "), f"{count:,}") for tier, name, count in parts)
    console.print_table(("", "of", "bytes"), rows, left=("of",))
    command = plan.command
    if output is not None and plan.file_name:  # in Python's quotes already, or a word of the shell
        command = command.replace(plan.file_name, str(output) if '"' in command else shlex.quote(str(output)))
    for text in (*plan.cannot, command):
        console.print(text)
    return None


def show_counts(request: PlanOptions) -> int | None:
    """Plan the same batch for every number of GPUs, and print; return the exit code where none fits.

    One GPU has offload, several have shards in RAM where they are too few for all of it.
    """
    model, options, price, output = str(request.model), vars(request), request.price, request.output
    counts = sorted(set(request.compare_gpus or ()))
    if options["task"] != "train" or not options["gpu"]:
        raise UsageError(
            "Cannot use --compare-gpus.", "It compares trainings on GPUs.", "Add --task train and --gpu."
        )
    batch = options["global_batch"] or 8 * max(counts)
    load("brim.estimation.ranks.estimate", "brim.run.plan.search", MODELS)
    with Console(stderr=True).status("Comparing"):
        rows = [_row(count, batch, options) for count in counts]
    if output is not None:
        _plot(output, model, rows)
    if request.as_json:
        documents = [row.to_json(price) for row in rows]
        print_json(
            {"model": model, "gpu": options["gpu"], "global_batch": batch, "tokens": _TOKENS, "rows": documents}
        )
    else:
        _print_counts(model, batch, options, rows, price)
    return None if any(row.step_s is not None for row in rows) else BudgetError.exit_code


def _row(count: int, batch: int, options: dict[str, Any]) -> Row:
    tokens = batch * options["seq"]
    try:
        return _alone(batch, options) if count == 1 else _split(count, batch, options)
    except (BudgetError, UsageError) as error:
        return Row(gpus=count, summary=f"does not fit: {error.reason}".splitlines()[0], tokens=tokens)


def _alone(batch: int, options: dict[str, Any]) -> Row:
    """Plan for one GPU, with offload where needed."""
    from brim.requests.plan import Request
    from brim.run.plan.search import answer_to

    answer = answer_to(build(Request, {**options, "batch": batch, "top": 1}))
    tokens = batch * options["seq"]
    if not answer.proposals:
        return Row(gpus=1, summary="does not fit", tokens=tokens)
    best = answer.proposals[0]
    summary = ", ".join(effect.what for effect in best.techniques) or "all in VRAM"
    peak = best.plan.promise.peak_bytes
    offload = any(peak.get(tier) for tier in ("ram", "disk"))
    return Row(gpus=1, summary=summary, tokens=tokens, step_s=best.step_s, peak_bytes=dict(peak), offload=offload)


def _split(count: int, batch: int, options: dict[str, Any]) -> Row:
    """Plan for several GPUs: the fastest mesh that is proved to fit, with shards in RAM where none fits without."""
    from brim.planning.ranks import fastest

    per_node = min(options["gpus_per_node"] or 8, count)
    split = {"gpus": count, "gpus_per_node": per_node, "global_batch": batch, "top": 1}
    answer = fastest(build(MeshRequest, {**options, **split}))
    tokens = batch * options["seq"]
    if not answer.rows:
        return Row(gpus=count, summary=f"does not fit: {answer.none()}", tokens=tokens)
    mesh, proof = answer.rows[0]
    summary = f"{mesh.split.describe().partition(': ')[2]}, recompute {mesh.checkpointing}"
    step_s, offload = proof.step_s or mesh.step_s, mesh.split.offload_shards
    peak = {"vram": proof.process_bytes} | ({"ram": proof.node_ram_bytes} if offload else {})
    return Row(gpus=count, summary=summary, tokens=tokens, step_s=step_s, peak_bytes=peak, offload=offload)


def _print_counts(model: str, batch: int, options: dict[str, Any], rows: Sequence[Row], price: float | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{model}: {batch} x {options['seq']:,} tokens a step on {options['gpu']}")
    columns = ["GPUs", "s/step", "GPU-hours", *(["cost"] if price is not None else []), "VRAM each", "RAM", "disk"]
    lines = []
    for row in rows:
        cells = [str(row.gpus)]
        if row.step_s is not None and row.gpu_hours is not None and row.peak_bytes is not None:
            cells += [format_seconds(row.step_s), f"{row.gpu_hours:,.1f}"]
            cells += [f"{row.gpu_hours * price:,.2f}"] if price is not None else []
            peaks = (row.peak_bytes.get(tier) for tier in ("vram", "ram", "disk"))
            cells += ["" if not count else format_bytes(count) for count in peaks]
        lines.append(cells)
    console.print_table(columns, lines, first="right")
    for row in rows:
        console.print(f"{row.gpus}: {row.summary}")
    console.print("GPU-hours and cost are for a billion tokens")


def _plot(path: Path, model: str, rows: Sequence[Row]) -> None:
    from brim.report.line_plot import picture

    lines: dict[str, list[tuple[float, float | None]]] = {}
    for row in rows:
        if row.gpu_hours is not None:
            lines.setdefault("with offload" if row.offload else "all on GPUs", []).append((row.gpus, row.gpu_hours))
    title = f"{model}: GPU-hours for a billion tokens"
    try:
        write_text(path, picture(title, lines, x_label="GPUs", y_label="GPU-hours", unit="h"))
    except OSError as error:
        raise UsageError(f"Cannot write a plot to {path}.", f"{error}.", "Name another file.") from error


def show_splits(request: MeshRequest, output: Path | None, as_json: bool) -> int | None:
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
        _print_splits(request, answer, took_s)
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
    from brim.planning.ranks import assumed, infeasible

    console = Console(highlight=False, soft_wrap=True)
    if not as_json:  # printed before the slower part
        why = " ".join(part for part in (refusal.request, refusal.reason) if part)
        console.print(f"Nothing fits. {why}")
        for text in assumed(request):
            console.print(f"assumed: {text}")
        if refusal.todo:
            console.print(refusal.todo)
    with Console(stderr=True).status("Searching for changes that fit"):
        answer = infeasible(request, refusal)
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
            "offload_shards": mesh.split.offload_shards,
            "command": _command(request, mesh),
        })  # fmt: skip
    return {
        "model": str(request.model), "gpus": request.gpus, "meshes": answer.looked_at, "traced": answer.traced,
        "least_bytes": answer.least_bytes, "assumed": assumed(request), "proposals": proposals, "took_s": took_s,
    }  # fmt: skip


def _print_splits(request: MeshRequest, answer: Meshes, took_s: float) -> None:
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
            str(number), *(str(split.interleave if axis == "v" else split.size(axis)) for axis in axes),
            f"{split.micro_batches:,}x{split.micro_batch}", mesh.checkpointing,
            format_bytes(proof.process_bytes), *([format_bytes(proof.node_ram_bytes)] if in_ram else []),
            format_seconds(step_s), f"{tokens:,.0f}",
        ))  # fmt: skip
    console.print_table(columns, lines, first="right")
    if in_ram:
        console.print("No split fits on the GPUs alone: these keep ZeRO-3's shards in RAM.")
    console.print("v: model chunks a rank; micro: micro-batches a step, and sequences in each")
    console.print(f"To predict every rank of the first: {_command(request, rows[0][0])}")
    for note in rows[0][1].notes:
        console.print(note)
    console.print(f"compared {answer.looked_at:,} meshes in {format_seconds(took_s)}, {answer.traced} of them traced")
