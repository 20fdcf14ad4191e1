"""``brim plan --gpus``: the fastest ways to split a training job over several GPUs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.cli.loading import MODELS, load
from brim.cli.options import print_json
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.estimation.parallel import Split
    from brim.estimation.ranks import ParallelEstimate
    from brim.planner.meshes import Mesh

INFEASIBLE = 3
_PROOFS_S = 45.0  # no further proof is begun that would end later, once something fits


@dataclass(frozen=True, kw_only=True)
class Found:
    """``rows``: the fastest that fit, with what was proved of them. ``looked_at`` by closed forms, of which so many
    were ``traced``; ``least_bytes``: the least of those on a GPU, and in a node's RAM where shards lie there.
    ``hurried``: more would have been traced if there had been time."""

    rows: list[tuple[Mesh, ParallelEstimate]]
    looked_at: int
    traced: int
    least_bytes: dict[str, int]
    hurried: bool = False

    def none(self) -> str:
        """Why there are no rows."""
        of = {"vram": "on a GPU", "ram": "of a node's RAM"}
        needs = " and ".join(f"{count:,} B {of[tier]}" for tier, count in self.least_bytes.items())
        least = f"; they take {needs} at least" if needs else ""
        if self.traced == self.looked_at:
            return f"No mesh fits{least}"
        return f"None of {self.traced} traced meshes fits, of {self.looked_at:,} looked at{least}"


def show(model: str, options: dict[str, Any], output: Path | None, as_json: bool) -> int | None:
    """Search, prove and print, and write the first to ``output``; where nothing fits, what would. The exit code."""
    from rich.console import Console

    _check(options)
    started = time.perf_counter()
    load("brim.estimation.ranks", MODELS)
    with Console(stderr=True).status("Looking at meshes"):
        found, refusal = _found(model, options)
    if refusal is not None:
        return _show_nearest(model, options, refusal, as_json=as_json)
    took_s = time.perf_counter() - started
    if output is not None:
        _write(output, model, options, *found.rows[0])
    if as_json:
        print_json(_document(model, options, found, took_s))
    else:
        _print(model, options, found, took_s)
    return None


def _found(model: str, options: dict[str, Any]) -> tuple[Found, BudgetError | None]:
    """What the search found, or why there is nothing."""
    try:
        found = fastest(model, options)
    except BudgetError as error:
        return Found(rows=[], looked_at=0, traced=0, least_bytes={}), error
    if found.rows:
        return found, None
    asked = f"{model} was to be split over {options['gpus']} {options['gpu']}."
    return found, BudgetError(asked, f"{found.none()}.", smallest_bytes=found.least_bytes)


def _show_nearest(model: str, options: dict[str, Any], refusal: BudgetError, *, as_json: bool) -> int:
    """What would fit in place of what was asked."""
    from rich.console import Console

    from brim.cli.plan_meshes_nearest import infeasible

    with Console(stderr=True).status("Looking for what would fit"):
        answer = infeasible(model, options, refusal, lambda changed: bool(fastest(model, dict(changed)).rows))
    if as_json:
        print_json({
            "model": model, "gpus": options["gpus"], "engine": options["engine"] or "torch", "proposals": [],
            "infeasible": answer.to_json(),
        })  # fmt: skip
        return INFEASIBLE
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Nothing fits. {answer.why}", markup=False)
    if refusal.todo:
        console.print(refusal.todo, markup=False)
    for one in answer.nearest:
        console.print(f"It fits with {one.change}: {one.command}", markup=False)
    if not answer.nearest:
        console.print("No small change that would do was found.", markup=False)
    return INFEASIBLE


def fastest(model: str, options: dict[str, Any]) -> Found:
    """The fastest meshes that are proved to fit; where none does on several GPUs, with shards in RAM. Raises
    BudgetError where closed forms or a node's RAM rule out all of one kind, and none of the other fits."""
    proofs = _Proofs()
    on_gpus = _ways(_on_gpus, model, options, proofs)
    in_ram = _ways(_in_ram, model, options, proofs) if not on_gpus.chosen and options["gpus"] > 1 else _Ways()
    rows = [(mesh, told) for mesh in (*on_gpus.chosen, *in_ram.chosen) if (told := proofs[mesh]) is not None]
    rows.sort(key=lambda row: row[1].step_s or row[0].step_s)
    found = Found(
        rows=rows, looked_at=on_gpus.looked_at + in_ram.looked_at, traced=len(proofs),
        least_bytes=_least(proofs), hurried=proofs.hurried,
    )  # fmt: skip
    refusals = [error for error in (on_gpus.refused, in_ram.refused) if error is not None]
    if not rows and refusals:
        raise _refusal(on_gpus, in_ram, refusals, found)
    return found


def _least(proofs: _Proofs) -> dict[str, int]:
    traced = [(mesh, told) for mesh, told in proofs.items() if told is not None]
    in_ram = [told.node_ram_bytes for mesh, told in traced if mesh.split.offload_shards]
    vram = [told.process_bytes for _, told in traced]
    return {tier: min(counts) for tier, counts in (("vram", vram), ("ram", in_ram)) if counts}


class _Proofs(dict["Mesh", "ParallelEstimate | None"]):
    """What was proved of each; None: its fullest stage alone does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s = self._last_s = time.perf_counter()
        self._longest_s = 0.0
        self.hurried = False

    def __setitem__(self, mesh: Mesh, told: ParallelEstimate | None) -> None:
        super().__setitem__(mesh, told)
        now_s = time.perf_counter()
        self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s

    def in_time(self) -> bool:
        """Whether another one, as long as the longest so far, would end before ``_PROOFS_S`` are over."""
        self.hurried = time.perf_counter() - self._began_s + self._longest_s > _PROOFS_S
        return not self.hurried


_Search = Callable[[str, dict[str, Any], _Proofs], tuple[list["Mesh"], int]]


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """What one search found, or why it looked at nothing."""

    chosen: tuple[Mesh, ...] = ()
    looked_at: int = 0
    refused: BudgetError | None = None


def _ways(search: _Search, model: str, options: dict[str, Any], proofs: _Proofs) -> _Ways:
    try:
        chosen, looked_at = search(model, options, proofs)
    except BudgetError as error:
        return _Ways(refused=error)
    return _Ways(chosen=tuple(chosen), looked_at=looked_at)


def _refusal(on_gpus: _Ways, in_ram: _Ways, refusals: list[BudgetError], found: Found) -> BudgetError:
    """What each of the searches says, with the bytes that are missing."""
    told = [on_gpus.refused.found if on_gpus.refused else f"{found.none()}."]
    if in_ram.refused or in_ram.looked_at:
        told.append(f"Nor with its shards in RAM: {in_ram.refused.found if in_ram.refused else f'{found.none()}.'}")
    least = {tier: count for error in refusals for tier, count in error.smallest_bytes.items()}
    todo = " ".join(error.todo for error in refusals)
    return BudgetError(refusals[0].asked, "\n".join(told), todo, smallest_bytes=least)


def _on_gpus(model: str, options: dict[str, Any], proofs: _Proofs) -> tuple[list[Mesh], int]:
    """The fastest with all of it on the GPUs, and how many were looked at."""
    from brim.estimation.models import find_model
    from brim.planner import meshes
    from brim.planner.meshes_torch import DOUBT, run_meshes

    sizes = _sizes(model, options) | {"global_batch": options["global_batch"] or 0}
    if _runs_torch(options):
        del sizes["shape"]
        found = run_meshes(find_model(model), **sizes)
        return _best(found, model, options, proofs, doubt=DOUBT), len(found)
    found = meshes.meshes(**sizes)
    return meshes.best(found, lambda mesh: _proved(model, mesh, options, proofs), options["top"]), len(found)


def _in_ram(model: str, options: dict[str, Any], proofs: _Proofs) -> tuple[list[Mesh], int]:
    """The fastest with shards in RAM, and how many were looked at."""
    from brim.planner import meshes_offload
    from brim.planner.meshes import SEQUENCES_PER_GPU
    from brim.run.planning_request import Request, machine_of

    asked = Request(model=model, task="train", gpu=options["gpu"], ram=options["ram"])
    ram_bytes = machine_of(asked).budget_bytes["ram"]
    sizes, batch = _sizes(model, options), options["global_batch"] or SEQUENCES_PER_GPU * options["gpus"]
    found = meshes_offload.offloaded(global_batch=batch, ram_bytes=ram_bytes, **sizes)
    return _best(found, model, options, proofs, ram_bytes=ram_bytes), len(found)


def _best(
    found: list[Mesh], model: str, options: dict[str, Any], proofs: _Proofs, *, doubt: float = 0.0,
    ram_bytes: int | None = None,
) -> list[Mesh]:  # fmt: skip
    """Under the engine that ``brim train`` runs; ``ram_bytes`` of a node, where shards lie there."""
    from brim import catalog
    from brim.planner import meshes_offload

    def proof(mesh: Mesh) -> meshes_offload.Proof:
        fits = _proved(model, mesh, options, proofs)
        told = proofs[mesh]
        assert told is not None  # no stage of this engine's is looked at alone
        fits = fits and (ram_bytes is None or told.node_ram_bytes <= ram_bytes)
        return meshes_offload.Proof(bytes=told.process_bytes, step_s=told.step_s or mesh.step_s, fits=fits)

    room = catalog.gpu(options["gpu"]).capacity_bytes
    return meshes_offload.best(found, proof, options["top"], room, doubt, proofs.in_time)


def _sizes(model: str, options: dict[str, Any]) -> dict[str, Any]:
    from brim import catalog
    from brim.estimation.models import find_model
    from brim.estimation.parallel_shape import shape_of

    per_node = options["gpus_per_node"] or 8
    return {
        "shape": shape_of(find_model(model)), "gpus": options["gpus"], "gpus_per_node": per_node,
        "gpu": catalog.gpu(options["gpu"]), "sequence": options["seq"],
    }  # fmt: skip


def _write(path: Path, model: str, options: dict[str, Any], mesh: Mesh, proof: ParallelEstimate) -> None:
    """For ``torchrun ... -m brim train --plan``."""
    from brim.run import distributed_plan

    engine, precision = _engine(mesh, options)
    made = distributed_plan.made(
        model=model, gpu=options["gpu"], engine=engine, precision=precision, sequence=options["seq"],
        split=mesh.split, checkpointing=mesh.checkpointing, peak_bytes=proof.process_bytes,
        step_s=proof.step_s or mesh.step_s,
    )  # fmt: skip
    distributed_plan.write(path, made)


def _check(options: dict[str, Any]) -> None:
    if options["task"] != "train":
        raise UnsupportedError("--gpus was given for generating.", "Training is split, so far.", "Use --task train.")
    if not options["gpu"]:
        raise UsageError("--gpus was given without --gpu.", "Seconds and memory need one.", 'Add --gpu "A100 80GB".')


def _proved(model: str, mesh: Mesh, options: dict[str, Any], proofs: _Proofs) -> bool:
    """Whether every rank fits, told rank by rank."""
    from brim import catalog
    from brim.estimation.ranks import estimate_ranks, stage_fits

    engine, precision = _engine(mesh, options)
    if engine == "megatron" and mesh.split.pp > 1 and not stage_fits(
        model, mesh.split, mesh.fullest, seq=options["seq"], gpu=catalog.gpu(options["gpu"]),
        checkpointing=mesh.checkpointing,
    ):  # fmt: skip
        proofs[mesh] = None
        return False
    proofs[mesh] = found = estimate_ranks(
        model, mesh.split, engine=engine, seq=options["seq"], gpu=options["gpu"], checkpointing=mesh.checkpointing,
        precision=precision,
    )  # fmt: skip
    return bool(found.fits)


def _engine(mesh: Mesh, options: dict[str, Any]) -> tuple[str, str]:
    """Which engine a mesh is proved for, and in which precision: shards in RAM are FSDP2's. Mixed is what ``brim
    train`` takes on GPUs."""
    torch = mesh.split.offload_shards or _runs_torch(options)
    return ("torch", "bf16-mixed") if torch else ("megatron", "bf16")


def _runs_torch(options: dict[str, Any]) -> bool:
    """The engine that ``brim train`` runs, unless another was named."""
    return (options["engine"] or "torch") == "torch"


def _command(model: str, options: dict[str, Any], mesh: Mesh) -> str:
    split = mesh.split
    words = ["brim", "estimate", model, "--gpus", str(split.gpus), "--gpu", options["gpu"]]
    words += ["--gpus-per-node", str(split.gpus_per_node), "--seq", str(options["seq"])]
    for name in ("tp", "pp", "interleave", "zero", "micro_batch", "global_batch"):
        words += [f"--{name.replace('_', '-')}", str(getattr(split, name))]
    for name in ("cp", "ep"):
        words += [f"--{name}", str(getattr(split, name))] if getattr(split, name) > 1 else []
    words += ["--sp"] if split.sequence_parallel else []
    words += ["--zero-bubble"] if split.zero_bubble else []
    words += ["--offload-shards"] if split.offload_shards else []
    words += ["--stage-layers", ",".join(map(str, split.stage_layers))] if split.stage_layers else []
    engine, precision = _engine(mesh, options)
    words += ["--precision", precision] if engine == "torch" else []
    return shlex.join([*words, "--checkpointing", mesh.checkpointing, "--engine", engine])


def _document(model: str, options: dict[str, Any], found: Found, took_s: float) -> dict[str, Any]:
    proposals = []
    for mesh, proof in found.rows:
        document = proof.to_json()
        document.pop("ranks")
        proposals.append(document | {
            "interleave": mesh.split.interleave, "zero": mesh.split.zero, "micro_batch": mesh.split.micro_batch,
            "global_batch": mesh.split.global_batch, "sequence_parallel": mesh.split.sequence_parallel,
            "checkpointing": mesh.checkpointing, "stage_layers": list(mesh.split.stage_layers),
            "offload_shards": mesh.split.offload_shards, "zero_bubble": mesh.split.zero_bubble,
            "command": _command(model, options, mesh),
        })  # fmt: skip
    return {
        "model": model, "gpus": options["gpus"], "meshes": found.looked_at, "traced": found.traced,
        "least_bytes": found.least_bytes, "proposals": proposals, "took_s": took_s, "hurried": found.hurried,
    }  # fmt: skip


def _size(split: Split, axis: str) -> str:
    """As the table has it: of chunks a zero-bubble pipeline's with its mark."""
    return f"{split.interleave}{' zb' * split.zero_bubble}" if axis == "v" else str(split.size(axis))


def _print(model: str, options: dict[str, Any], found: Found, took_s: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = found.rows
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{model}: train on {options['gpus']} {options['gpu']}, {options['seq']:,} tokens", markup=False)
    table = Table(box=box.SIMPLE, pad_edge=False)
    in_ram = any(mesh.split.offload_shards for mesh, _ in rows)
    ram = ["RAM of a node"] if in_ram else []
    axes = ["tp", "pp", "v", *(axis for axis in ("cp", "ep") if any(mesh.split.size(axis) > 1 for mesh, _ in rows))]
    axes += ["dp", *(["zero"] if len({mesh.split.zero for mesh, _ in rows}) > 1 else [])]
    columns = ["", *axes, "micro", "recompute", "worst rank", *ram, "s/step", "tokens/s"]
    for column in columns:
        table.add_column(column, justify="right")
    for number, (mesh, proof) in enumerate(rows, 1):
        step_s = proof.step_s or mesh.step_s
        tokens = mesh.split.global_batch * options["seq"] / step_s
        split = mesh.split
        table.add_row(
            str(number), *(_size(split, axis) for axis in axes),
            f"{split.micro_batches:,}x{split.micro_batch}", mesh.checkpointing,
            format_bytes(proof.process_bytes), *([format_bytes(proof.node_ram_bytes)] if in_ram else []),
            format_seconds(step_s), f"{tokens:,.0f}",
        )  # fmt: skip
    console.print(table)
    if in_ram:
        console.print("Nothing fits with all of it on the GPUs: these keep ZeRO-3's shards in RAM.", markup=False)
    halves = ", zb: zero-bubble" if any(mesh.split.zero_bubble for mesh, _ in rows) else ""
    told = f"v: model chunks a rank{halves}; micro: micro-batches a step, and sequences in each"
    console.print(told, markup=False)
    console.print(f"Every rank of the first: {_command(model, options, rows[0][0])}", markup=False)
    for note in rows[0][1].notes:
        console.print(note, markup=False)
    counts = f"looked at {found.looked_at:,} meshes in {format_seconds(took_s)}, {found.traced} of them traced"
    counts += ": more would have taken too long" * found.hurried
    console.print(counts, markup=False)
