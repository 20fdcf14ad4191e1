"""Find the fastest meshes for a training job on several GPUs: closed forms rank them, traces prove them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from brim import catalog
from brim.core.hardware import RAM, VRAM
from brim.errors import BrimError, BudgetError
from brim.estimation.models import find_model
from brim.estimation.ranks.estimate import ParallelEstimate, estimate_ranks, stage_fits
from brim.estimation.ranks.job import DEFAULT_PRECISION
from brim.estimation.ranks.sizes import shape_of
from brim.estimation.ranks.split import Split
from brim.measure.capacity import FREE_SHARE
from brim.planning.meshes import offload
from brim.planning.meshes import search as closed_forms
from brim.planning.meshes.search import RECOMPUTE, SEQUENCES_PER_GPU, Mesh, Pieces
from brim.planning.meshes.torch_engine import DOUBT, least_states, run_meshes
from brim.planning.nearest import cards_with, largest
from brim.planning.proof import prove
from brim.planning.request import Nearest, Request, host_assumed, machine_of
from brim.requests.plan import MeshRequest
from brim.units import format_bytes

_Proofs = dict[Mesh, ParallelEstimate | None]  # None: the mesh's fullest stage alone does not fit
_Search = Callable[[MeshRequest, _Proofs], tuple[list[Mesh], int]]
_Fits = Callable[[MeshRequest], bool]
_Changes = Iterator[tuple[MeshRequest, str]]
# A limit in seconds would give other answers on a slower or busier computer.
_MOST_SEARCHES = 4
_DOUBLED = 10  # times
_SHORTEST = 64  # tokens
_CARDS, _LARGER = 3, 1.25  # the most cards that are tried, and their least ratio of sizes


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """``rows``: the fastest meshes that fit, with their proofs. ``looked_at`` meshes were ranked by closed forms and
    ``traced`` of them proved; ``least_bytes``: the least proved bytes of a GPU, and of a node's RAM with shards."""

    rows: list[tuple[Mesh, ParallelEstimate]]
    looked_at: int
    traced: int
    least_bytes: dict[str, int]

    def none(self) -> str:
        """Return in words why there are no rows."""
        of = {"vram": "on a GPU", "ram": "of a node's RAM"}
        needs = " and ".join(f"{count:,} B {of[tier]}" for tier, count in self.least_bytes.items())
        least = f"; they take {needs} at least" if needs else ""
        if self.traced == self.looked_at:
            return f"No mesh fits{least}"
        return f"None of {self.traced} traced meshes fits, of {self.looked_at:,} compared{least}"


def fastest(request: MeshRequest) -> Meshes:
    """Return the fastest meshes that are proved to fit; where none fits several GPUs, with shards in RAM.

    Raises BudgetError where closed forms or a node's RAM rule out all of one kind, and none of the other fits.
    """
    proofs: _Proofs = {}
    on_gpus = _result(_on_gpus, request, proofs)
    in_ram = _result(_in_ram, request, proofs) if not on_gpus.chosen and gpus_of(request) > 1 else _Result()
    rows = [(mesh, estimate) for mesh in (*on_gpus.chosen, *in_ram.chosen) if (estimate := proofs[mesh]) is not None]
    rows.sort(key=lambda row: row[1].step_s or row[0].step_s)
    answer = Meshes(
        rows=rows, looked_at=on_gpus.looked_at + in_ram.looked_at, traced=len(proofs), least_bytes=_least(proofs),
    )  # fmt: skip
    refusals = [error for error in (on_gpus.refused, in_ram.refused) if error is not None]
    if not rows and refusals:
        raise _refusal(on_gpus, in_ram, refusals, answer)
    return answer


def smallest_fits(request: MeshRequest) -> bool:
    """Return True where the smallest split is proved to fit: ZeRO-3, a sequence per micro-batch, full recomputation.

    A search would find it too, but with dozens of proofs. Raises the errors of ``fastest``.
    """
    if not runs_torch(request):
        return bool(fastest(request).rows)
    gpus, gpu, batch = gpus_of(request), card_of(request), request.global_batch
    per_node, parameters = request.gpus_per_node or 8, Pieces(**_pieces(request)).parameters()
    split = Split(
        gpus=gpus, gpus_per_node=per_node, zero=3, micro_batch=1, global_batch=batch or SEQUENCES_PER_GPU * gpus
    )
    splits = [split] if least_states(parameters, gpus) <= gpu.capacity_bytes - gpu.context().bytes else []
    if gpus > 1 and least_states(parameters, gpus) * min(gpus, per_node) <= node_ram(request):
        splits.append(replace(split, offload_shards=True))
    return any(_is_proved(each, request) for each in splits)


def _is_proved(split: Split, request: MeshRequest) -> bool:
    estimate = estimate_ranks(
        str(request.model), split, seq=request.seq, gpu=str(request.gpu), checkpointing=RECOMPUTE[-1],
        precision=DEFAULT_PRECISION["torch"][0],
    )  # fmt: skip
    return bool(estimate.fits) and estimate.node_ram_bytes <= node_ram(request)


def gpus_of(request: MeshRequest) -> int:
    assert request.gpus is not None, "meshes are of several GPUs"
    return request.gpus


def card_of(request: MeshRequest) -> catalog.Gpu:
    assert request.gpu is not None, "meshes are of a GPU of the catalog"
    return catalog.gpu(request.gpu)


def _pieces(request: MeshRequest) -> dict[str, Any]:
    return {"shape": shape_of(find_model(request.model)), "gpu": card_of(request), "sequence": request.seq}


def _least(proofs: _Proofs) -> dict[str, int]:
    traced = [(mesh, estimate) for mesh, estimate in proofs.items() if estimate is not None]
    in_ram = [estimate.node_ram_bytes for mesh, estimate in traced if mesh.split.offload_shards]
    vram = [estimate.process_bytes for _, estimate in traced]
    return {tier: min(counts) for tier, counts in (("vram", vram), ("ram", in_ram)) if counts}


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The meshes that a search found, or its refusal."""

    chosen: tuple[Mesh, ...] = ()
    looked_at: int = 0
    refused: BudgetError | None = None


def _result(search: _Search, request: MeshRequest, proofs: _Proofs) -> _Result:
    try:
        chosen, looked_at = search(request, proofs)
    except BudgetError as error:
        return _Result(refused=error)
    return _Result(chosen=tuple(chosen), looked_at=looked_at)


def _refusal(on_gpus: _Result, in_ram: _Result, refusals: list[BudgetError], answer: Meshes) -> BudgetError:
    """Join the errors of both searches, with the smallest bytes."""
    why = [on_gpus.refused.reason if on_gpus.refused else f"{answer.none()}."]
    if in_ram.refused or in_ram.looked_at:
        reason = in_ram.refused.reason if in_ram.refused else f"{answer.none()}."
        why.append(f"With shards in RAM it does not fit either: {reason}")
    least = {tier: count for error in refusals for tier, count in error.smallest_bytes.items()}
    todo = " ".join(error.todo for error in refusals)
    return BudgetError(refusals[0].request, "\n".join(why), todo, smallest_bytes=least)


def _on_gpus(request: MeshRequest, proofs: _Proofs) -> tuple[list[Mesh], int]:
    """Return the fastest meshes without shards in RAM, and the number of candidates."""
    sizes = _sizes(request) | {"global_batch": request.global_batch or 0}
    if runs_torch(request):
        del sizes["shape"]
        candidates = run_meshes(find_model(request.model), **sizes)
        return _best(candidates, request, proofs, doubt=DOUBT), len(candidates)
    candidates = closed_forms.meshes(**sizes)
    return closed_forms.best(candidates, lambda mesh: _proved(mesh, request, proofs), request.top), len(candidates)


def _in_ram(request: MeshRequest, proofs: _Proofs) -> tuple[list[Mesh], int]:
    """Return the fastest meshes with shards in RAM, and the number of candidates."""
    ram_bytes, rate = node_ram(request), request.ram_gb_per_s
    sizes, batch = _sizes(request), request.global_batch or SEQUENCES_PER_GPU * gpus_of(request)
    candidates = offload.offloaded(
        global_batch=batch, ram_bytes=ram_bytes, ram_bytes_per_s=None if rate is None else rate * 1e9, **sizes
    )
    return _best(candidates, request, proofs, ram_bytes=ram_bytes), len(candidates)


def node_ram(request: MeshRequest) -> int:
    """Return the bytes of a node's RAM that plans may use."""
    ram = catalog.host_of(card_of(request)).ram_of(_per_node(request)) if request.ram is None else request.ram
    return machine_of(Request(model="", task="train", gpu=request.gpu, ram=ram)).budget_bytes["ram"]


def assumed(request: MeshRequest) -> list[str]:
    """Return the assumed figures of a node, a sentence each."""
    per_node, host = _per_node(request), catalog.host_of(card_of(request))
    nodes = [] if request.gpus_per_node is not None else [f"nodes of {per_node} GPUs (change with --gpus-per-node)"]
    rams = host_assumed(host, per_node, ram=request.ram, ram_gb_per_s=request.ram_gb_per_s)
    return [*nodes, *(f"a node has {text}" for text in rams)]


def _per_node(request: MeshRequest) -> int:
    return min(gpus_of(request), request.gpus_per_node or 8)


def _best(
    candidates: list[Mesh], request: MeshRequest, proofs: _Proofs, *, doubt: float = 0.0,
    ram_bytes: int | None = None,
) -> list[Mesh]:  # fmt: skip
    """Return the best under the engine of ``brim train``; ``ram_bytes`` of a node limit shards in RAM."""

    def proof(mesh: Mesh) -> offload.Proof:
        fits = _proved(mesh, request, proofs)
        estimate = proofs[mesh]
        assert estimate is not None  # this engine's stages are not proved alone
        fits = fits and (ram_bytes is None or estimate.node_ram_bytes <= ram_bytes)
        return offload.Proof(bytes=estimate.process_bytes, step_s=estimate.step_s or mesh.step_s, fits=fits)

    room = card_of(request).capacity_bytes
    return offload.best(candidates, proof, request.top, room, doubt)


def _sizes(request: MeshRequest) -> dict[str, Any]:
    return _pieces(request) | {"gpus": gpus_of(request), "gpus_per_node": request.gpus_per_node or 8}


def _proved(mesh: Mesh, request: MeshRequest, proofs: _Proofs) -> bool:
    """Prove a mesh rank by rank; return True where every rank fits."""
    engine, precision = engine_of(mesh, request)
    if engine == "megatron" and mesh.split.pp > 1 and not stage_fits(
        str(request.model), mesh.split, mesh.fullest, seq=request.seq, gpu=card_of(request),
        checkpointing=mesh.checkpointing,
    ):  # fmt: skip
        proofs[mesh] = None
        return False
    (estimate,) = prove(mesh, lambda mesh: estimate_ranks(
        str(request.model), mesh.split, engine=engine, seq=request.seq, gpu=str(request.gpu),
        checkpointing=mesh.checkpointing, precision=precision, ram_gb_per_s=request.ram_gb_per_s,
    ))  # fmt: skip
    proofs[mesh] = estimate
    return bool(estimate.fits)


def engine_of(mesh: Mesh, request: MeshRequest) -> tuple[str, str]:
    """Return the engine and the precision of a mesh's proof: shards in RAM are FSDP2's."""
    engine = "torch" if mesh.split.offload_shards or runs_torch(request) else "megatron"
    return engine, DEFAULT_PRECISION[engine][0]


def runs_torch(request: MeshRequest) -> bool:
    """Return True for the engine of ``brim train``, the default."""
    # Another engine's promise would not hold for ``brim train --plan``.
    return (request.engine or "torch") == "torch"


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """The reason why nothing fits, the least bytes of each memory, and changes that fit."""

    why: str
    needs_bytes: Mapping[str, int]
    nearest: tuple[Nearest, ...]

    def to_json(self) -> dict[str, Any]:
        nearest = [vars(change) for change in self.nearest]
        return {**vars(self), "needs_bytes": dict(self.needs_bytes), "nearest": nearest}


def infeasible(request: MeshRequest, refusal: BudgetError) -> Infeasible:
    """Return the answer to a refused ``request``, with small changes under which it fits, each proved by planning."""
    prover = _Prover()
    changes: list[Nearest] = []
    for search in (_more_gpus, _larger_gpus, _shorter, _more_ram):
        for changed, description in search(request, refusal.smallest_bytes, prover.fits):
            changes.append(Nearest(change=description, command=changed.command()))
    why = " ".join(part for part in (refusal.request, refusal.reason) if part)
    return Infeasible(why=why, needs_bytes=refusal.smallest_bytes, nearest=tuple(changes))


class _Prover:
    """Search at most ``_MOST_SEARCHES`` times; later requests count as not fitting."""

    def __init__(self) -> None:
        self._left = _MOST_SEARCHES

    def fits(self, request: MeshRequest) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        try:
            return smallest_fits(replace(request, top=1))
        except BrimError:
            return False


def _more_gpus(request: MeshRequest, needs: Mapping[str, int], fits: _Fits) -> _Changes:
    """Try twice as many, four times, ...; numbers ruled out by states alone cost no search."""
    for doubled in range(1, _DOUBLED):
        changed = replace(request, gpus=gpus_of(request) << doubled)
        if _has_room(changed, needs, gpus_of(request)) and fits(changed):
            yield changed, f"{changed.gpus:,} GPUs"
            return


def _has_room(changed: MeshRequest, needs: Mapping[str, int], gpus: int) -> bool:
    """Return True where the bytes that ``gpus`` GPUs need each fit when spread evenly over the changed number."""
    room = card_of(changed).capacity_bytes * gpus_of(changed)
    return needs.get(VRAM, 0) * gpus <= room


def _larger_gpus(request: MeshRequest, needs: Mapping[str, int], fits: _Fits) -> _Changes:
    mine = card_of(request)
    for card in islice(_ever_larger(mine, max(needs.get(VRAM, 0), mine.capacity_bytes + 1)), _CARDS):
        changed = replace(request, gpu=card.name)
        if fits(changed):
            more = format_bytes(card.capacity_bytes - mine.capacity_bytes)
            yield changed, f"{more} more on each GPU, as {card.name} ({format_bytes(card.capacity_bytes)}) has"
            return


def _ever_larger(mine: catalog.Gpu, least_bytes: int) -> Iterator[catalog.Gpu]:
    while cards := cards_with(least_bytes, mine.vendor):
        yield cards[0]
        least_bytes = int(_LARGER * cards[0].capacity_bytes)


def _shorter(request: MeshRequest, needs: Mapping[str, int], fits: _Fits) -> _Changes:
    tokens = largest(request.seq, _SHORTEST, lambda count: fits(replace(request, seq=count)))
    if tokens is not None:
        yield replace(request, seq=tokens), f"sequences of {tokens:,} tokens"


def _more_ram(request: MeshRequest, needs: Mapping[str, int], fits: _Fits) -> _Changes:
    """Try the RAM per node that shards were found to need."""
    if RAM not in needs:
        return
    gib = -(-int(needs[RAM] / FREE_SHARE) // (1 << 30)) + 1
    changed = replace(request, ram=f"{gib}GiB")
    if fits(changed):
        yield changed, f"{gib} GiB of RAM in each node"
