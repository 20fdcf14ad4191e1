"""The fastest ways to split a training job over several GPUs: closed forms say what to look at, traces prove it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from brim import catalog
from brim.errors import BudgetError
from brim.estimation.models import find_model
from brim.estimation.ranks.estimate import ParallelEstimate, estimate_ranks, stage_fits
from brim.estimation.ranks.job import DEFAULT_PRECISION
from brim.estimation.ranks.sizes import shape_of
from brim.estimation.ranks.split import Split
from brim.planning.meshes import offload
from brim.planning.meshes import search as closed_forms
from brim.planning.meshes.search import RECOMPUTE, SEQUENCES_PER_GPU, Mesh, Pieces
from brim.planning.meshes.torch_engine import DOUBT, least_states, run_meshes
from brim.planning.request import Request, host_assumed, machine_of

_Proofs = dict[Mesh, ParallelEstimate | None]  # what was proved of each; None: its fullest stage alone does not fit
_Search = Callable[[str, dict[str, Any], _Proofs], tuple[list[Mesh], int]]


@dataclass(frozen=True, kw_only=True)
class Found:
    """``rows``: the fastest that fit, with what was proved of them. ``looked_at`` by closed forms, of which so many
    were ``traced``; ``least_bytes``: the least of those on a GPU, and in a node's RAM where shards lie there."""

    rows: list[tuple[Mesh, ParallelEstimate]]
    looked_at: int
    traced: int
    least_bytes: dict[str, int]

    def none(self) -> str:
        """Why there are no rows."""
        of = {"vram": "on a GPU", "ram": "of a node's RAM"}
        needs = " and ".join(f"{count:,} B {of[tier]}" for tier, count in self.least_bytes.items())
        least = f"; they take {needs} at least" if needs else ""
        if self.traced == self.looked_at:
            return f"No mesh fits{least}"
        return f"None of {self.traced} traced meshes fits, of {self.looked_at:,} looked at{least}"


def fastest(model: str, options: dict[str, Any]) -> Found:
    """The fastest meshes that are proved to fit; where none does on several GPUs, with shards in RAM. Raises
    BudgetError where closed forms or a node's RAM rule out all of one kind, and none of the other fits."""
    proofs: _Proofs = {}
    on_gpus = _ways(_on_gpus, model, options, proofs)
    in_ram = _ways(_in_ram, model, options, proofs) if not on_gpus.chosen and options["gpus"] > 1 else _Ways()
    rows = [(mesh, told) for mesh in (*on_gpus.chosen, *in_ram.chosen) if (told := proofs[mesh]) is not None]
    rows.sort(key=lambda row: row[1].step_s or row[0].step_s)
    answer = Found(
        rows=rows, looked_at=on_gpus.looked_at + in_ram.looked_at, traced=len(proofs), least_bytes=_least(proofs),
    )  # fmt: skip
    refusals = [error for error in (on_gpus.refused, in_ram.refused) if error is not None]
    if not rows and refusals:
        raise _refusal(on_gpus, in_ram, refusals, answer)
    return answer


def smallest_fits(model: str, options: dict[str, Any]) -> bool:
    """Whether a split of ``options`` is proved to fit, by those that take least: all of ZeRO, one sequence at a time,
    everything computed again. What this says yes to, a search finds too, and it takes a proof in place of dozens.
    Raises what ``fastest`` does."""
    if not runs_torch(options):
        return bool(fastest(model, options).rows)
    gpus, gpu, batch = options["gpus"], catalog.gpu(options["gpu"]), options["global_batch"]
    per_node, parameters = options["gpus_per_node"] or 8, Pieces(**_pieces(model, options)).parameters()
    split = Split(
        gpus=gpus, gpus_per_node=per_node, zero=3, micro_batch=1, global_batch=batch or SEQUENCES_PER_GPU * gpus
    )
    ways = [split] if least_states(parameters, gpus) <= gpu.capacity_bytes - gpu.context().bytes else []
    if gpus > 1 and least_states(parameters, gpus) * min(gpus, per_node) <= node_ram(options):
        ways.append(replace(split, offload_shards=True))
    return any(_is_proved(model, way, options) for way in ways)


def _is_proved(model: str, split: Split, options: dict[str, Any]) -> bool:
    told = estimate_ranks(
        model, split, seq=options["seq"], gpu=options["gpu"], checkpointing=RECOMPUTE[-1],
        precision=DEFAULT_PRECISION["torch"][0],
    )  # fmt: skip
    return bool(told.fits) and told.node_ram_bytes <= node_ram(options)


def _pieces(model: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"shape": shape_of(find_model(model)), "gpu": catalog.gpu(options["gpu"]), "sequence": options["seq"]}


def _least(proofs: _Proofs) -> dict[str, int]:
    traced = [(mesh, told) for mesh, told in proofs.items() if told is not None]
    in_ram = [told.node_ram_bytes for mesh, told in traced if mesh.split.offload_shards]
    vram = [told.process_bytes for _, told in traced]
    return {tier: min(counts) for tier, counts in (("vram", vram), ("ram", in_ram)) if counts}


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


def _refusal(on_gpus: _Ways, in_ram: _Ways, refusals: list[BudgetError], answer: Found) -> BudgetError:
    """The error of both searches, with the bytes that are missing."""
    told = [on_gpus.refused.found if on_gpus.refused else f"{answer.none()}."]
    if in_ram.refused or in_ram.looked_at:
        told.append(f"Nor with its shards in RAM: {in_ram.refused.found if in_ram.refused else f'{answer.none()}.'}")
    least = {tier: count for error in refusals for tier, count in error.smallest_bytes.items()}
    todo = " ".join(error.todo for error in refusals)
    return BudgetError(refusals[0].asked, "\n".join(told), todo, smallest_bytes=least)


def _on_gpus(model: str, options: dict[str, Any], proofs: _Proofs) -> tuple[list[Mesh], int]:
    """The fastest with all of it on the GPUs, and how many were looked at."""
    sizes = _sizes(model, options) | {"global_batch": options["global_batch"] or 0}
    if runs_torch(options):
        del sizes["shape"]
        candidates = run_meshes(find_model(model), **sizes)
        return _best(candidates, model, options, proofs, doubt=DOUBT), len(candidates)
    candidates = closed_forms.meshes(**sizes)
    return closed_forms.best(candidates, lambda mesh: _proved(model, mesh, options, proofs), options["top"]), len(
        candidates
    )


def _in_ram(model: str, options: dict[str, Any], proofs: _Proofs) -> tuple[list[Mesh], int]:
    """The fastest with shards in RAM, and how many were looked at."""
    ram_bytes, rate = node_ram(options), options.get("ram_gb_per_s")
    sizes, batch = _sizes(model, options), options["global_batch"] or SEQUENCES_PER_GPU * options["gpus"]
    candidates = offload.offloaded(
        global_batch=batch, ram_bytes=ram_bytes, ram_bytes_per_s=None if rate is None else rate * 1e9, **sizes
    )
    return _best(candidates, model, options, proofs, ram_bytes=ram_bytes), len(candidates)


def node_ram(options: dict[str, Any]) -> int:
    """Bytes of RAM of a node that plans take."""
    gpu, per_node = catalog.gpu(options["gpu"]), min(options["gpus"], options["gpus_per_node"] or 8)
    ram = catalog.host_of(gpu).ram_of(per_node) if options["ram"] is None else options["ram"]
    return machine_of(Request(model="", task="train", gpu=options["gpu"], ram=ram)).budget_bytes["ram"]


def assumed(options: dict[str, Any]) -> list[str]:
    """Which figures of a node nobody gave, a sentence each."""
    gpu, per_node = catalog.gpu(options["gpu"]), min(options["gpus"], options["gpus_per_node"] or 8)
    given = {name: options.get(name) for name in ("ram", "ram_gb_per_s")}
    nodes = [] if options["gpus_per_node"] is not None else [f"nodes of {per_node} GPUs (else give --gpus-per-node)"]
    return [*nodes, *(f"a node has {text}" for text in host_assumed(catalog.host_of(gpu), per_node, **given))]


def _best(
    candidates: list[Mesh], model: str, options: dict[str, Any], proofs: _Proofs, *, doubt: float = 0.0,
    ram_bytes: int | None = None,
) -> list[Mesh]:  # fmt: skip
    """Under the engine that ``brim train`` runs; ``ram_bytes`` of a node, where shards lie there."""

    def proof(mesh: Mesh) -> offload.Proof:
        fits = _proved(model, mesh, options, proofs)
        told = proofs[mesh]
        assert told is not None  # no stage of this engine's is looked at alone
        fits = fits and (ram_bytes is None or told.node_ram_bytes <= ram_bytes)
        return offload.Proof(bytes=told.process_bytes, step_s=told.step_s or mesh.step_s, fits=fits)

    room = catalog.gpu(options["gpu"]).capacity_bytes
    return offload.best(candidates, proof, options["top"], room, doubt)


def _sizes(model: str, options: dict[str, Any]) -> dict[str, Any]:

    per_node = options["gpus_per_node"] or 8
    return _pieces(model, options) | {"gpus": options["gpus"], "gpus_per_node": per_node}


def _proved(model: str, mesh: Mesh, options: dict[str, Any], proofs: _Proofs) -> bool:
    """Whether every rank fits, told rank by rank."""
    engine, precision = engine_of(mesh, options)
    if engine == "megatron" and mesh.split.pp > 1 and not stage_fits(
        model, mesh.split, mesh.fullest, seq=options["seq"], gpu=catalog.gpu(options["gpu"]),
        checkpointing=mesh.checkpointing,
    ):  # fmt: skip
        proofs[mesh] = None
        return False
    proofs[mesh] = estimate = estimate_ranks(
        model, mesh.split, engine=engine, seq=options["seq"], gpu=options["gpu"], checkpointing=mesh.checkpointing,
        precision=precision, ram_gb_per_s=options.get("ram_gb_per_s"),
    )  # fmt: skip
    return bool(estimate.fits)


def engine_of(mesh: Mesh, options: dict[str, Any]) -> tuple[str, str]:
    """Which engine a mesh is proved for, and in which precision: shards in RAM are FSDP2's."""
    engine = "torch" if mesh.split.offload_shards or runs_torch(options) else "megatron"
    return engine, DEFAULT_PRECISION[engine][0]


def runs_torch(options: dict[str, Any]) -> bool:
    """The engine that ``brim train`` runs, unless another was named."""
    # A promise of another engine would not be what ``brim train --plan`` takes.
    return (options["engine"] or "torch") == "torch"
