"""Search meshes whose shards rest in RAM: ZeRO-3 with FSDP2's CPU offload, with or without tensor parallelism.

They are for jobs that do not fit otherwise. Closed forms rank them: a layer takes the longer of its kernels and its
copies of weights and gradients; the CPU's step runs over the states of a node's ranks. Bytes are estimates that
choose the next proof; only the proof tells what fits (``estimation.ranks``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from brim import catalog
from brim.core import Op, Phase
from brim.errors import BudgetError, ModelError, UnsupportedError, UsageError
from brim.estimation.ranks.estimate import nccl_bytes
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.sizes import Shape
from brim.estimation.ranks.split import Split, check_sizes
from brim.estimation.ranks.time import StepTime, crossed_s, host_s, node_rate, sent_s
from brim.planning.meshes.search import RECOMPUTE, Mesh, Pieces
from brim.planning.proof import search

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MOST_PROOFS = 8  # while nothing fits; later only the smallest mesh of each family is proved
_FURTHER_PROOFS = 4  # once something fits: each takes 10 to 20 s
_DOUBT = 1.1  # times the room: an estimate below it may fit, in a family without a proof
_STATES = 16  # bytes of a parameter in RAM: weight, gradient and two moments in float32
_STEPPED = 32  # bytes of a parameter that AdamW reads and writes: all states, both ways
_ADDED = 12  # bytes that adding a further micro-batch's gradient moves: two reads, one write
_WIDTH = 2  # bytes of a weight in bfloat16
_LOGIT = 12  # bytes of a logit: in bfloat16, in float32, and both gradients of the latter


def offloaded(
    shape: Shape, *, gpus: int, gpus_per_node: int, gpu: catalog.Gpu, sequence: int, global_batch: int,
    ram_bytes: int, ram_bytes_per_s: float | None = None,
) -> list[Mesh]:  # fmt: skip
    """Return the meshes that divide the job, the fastest first, with estimated bytes.

    ``ram_bytes`` and its rate are a node's. Raises BudgetError where a node's RAM cannot hold its ranks' states,
    UsageError where nothing divides.
    """
    pieces = Pieces(shape, gpu, sequence)
    states = _STATES * pieces.parameters() * min(gpus_per_node, gpus) // gpus
    if states > ram_bytes:
        raise BudgetError(
            f"Cannot train {shape.name} on {gpus} {gpu.name} with its shards in RAM.",
            f"The states of the ranks of one node need {states:,} B of RAM, and the node has {ram_bytes:,} B.",
            "Give a larger --ram, or more nodes.", smallest_bytes={"ram": states},
        )  # fmt: skip
    meshes = [
        Mesh(
            split=split, checkpointing=recompute,
            time=_step(pieces, split, recompute, node_rate(split, gpu, ram_bytes_per_s)),
            peak_bytes=_bytes(pieces, split, recompute),
        )
        for split in _splits(shape, gpus, gpus_per_node, sequence, global_batch)
        for recompute in RECOMPUTE
    ]  # fmt: skip
    return sorted(meshes, key=lambda mesh: mesh.step_s)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A proved mesh: bytes of the worst rank, seconds of a step, and ``fits``."""

    bytes: int
    step_s: float
    fits: bool


def best(
    candidates: Sequence[Mesh], proof: Callable[[Mesh], Proof], top: int, room: int, doubt: float = 0.0
) -> list[Mesh]:
    """Return the ``top`` fastest meshes that fit, one per split, with few proofs: each corrects the other estimates.

    ``room`` is a GPU's bytes. Meshes that may fit are proved in the order of their expected seconds, until none is
    left that may be faster, allowing for an error of the share ``doubt``. While nothing fits, the smallest is proved
    before the search ends; after the first that fits, it ends ``_FURTHER_PROOFS`` proofs later. A mesh whose proof
    raises ModelError or UnsupportedError rules out all that use its features; the first such error is raised where
    nothing else is left.
    """
    state = _Proofs(candidates=candidates, room=room)

    def attempt(mesh: Mesh) -> None:
        try:
            state.proved[mesh] = proof(mesh)
        except (ModelError, UnsupportedError) as error:  # this model's layers cannot be split so
            state.refused[mesh] = error

    def following() -> Iterator[Mesh]:
        while (mesh := state.following(top, doubt)) is not None:
            yield mesh
            if mesh not in state.proved and mesh not in state.refused:
                return  # its proof raised BudgetError

    search(following(), attempt)
    if state.refused and not state.proved:
        raise next(iter(state.refused.values()))
    return state.fitting()[:top]


@dataclass(frozen=True, kw_only=True)
class _Proofs:
    """The proofs so far, in order, and the refused meshes."""

    candidates: Sequence[Mesh]
    room: int
    proved: dict[Mesh, Proof] = field(default_factory=dict)
    refused: dict[Mesh, ModelError | UnsupportedError] = field(default_factory=dict)

    def fitting(self) -> list[Mesh]:
        fits = (mesh for mesh, proof in self.proved.items() if proof.fits)
        return sorted(fits, key=lambda mesh: self.proved[mesh].step_s)

    def following(self, top: int, doubt: float) -> Mesh | None:
        """Return the mesh to prove next, or None at the end of the search."""
        fitting, left = self.fitting(), self._left()
        likely = [mesh for mesh in left if self._may_fit(mesh)]
        if not fitting:
            if likely and len(self.proved) < _MOST_PROOFS:
                return min(likely, key=self._seconds)
            return self._smallest(left)
        since = len(self.proved) - 1 - [proof.fits for proof in self.proved.values()].index(True)
        if not likely or since >= _FURTHER_PROOFS:
            return None
        mesh = min(likely, key=self._seconds)
        if len(fitting) >= top and self.proved[fitting[top - 1]].step_s <= (1 - doubt) * self._seconds(mesh):
            return None
        return mesh

    def _left(self) -> list[Mesh]:
        fitting = self.fitting()
        failed = [mesh for mesh, proof in self.proved.items() if not proof.fits]
        return [
            mesh for mesh in self.candidates
            if mesh not in self.proved and not any(_uses(other) <= _uses(mesh) for other in self.refused)
            and not any(_same_split(mesh, other) for other in fitting)
            and not any(_takes_more(mesh, other) for other in failed)
        ]  # fmt: skip

    def _smallest(self, left: Sequence[Mesh]) -> Mesh | None:
        """Return the smallest of the families' unproved smallest meshes; None where proofs rule it out."""
        least: dict[tuple[int, bool], Mesh] = {}
        for mesh in self.candidates:
            if not any(_uses(refused) <= _uses(mesh) for refused in self.refused):
                first = least.setdefault(_family(mesh), mesh)
                least[_family(mesh)] = min(first, mesh, key=lambda candidate: candidate.peak_bytes)
        still = set(left)
        smallest = min((mesh for mesh in least.values() if mesh in still), key=self._bytes, default=None)
        proved = [proof.bytes for proof in self.proved.values()]
        if smallest is None or self._may_fit(smallest) or not proved or self._bytes(smallest) < min(proved):
            return smallest
        return None

    def _may_fit(self, mesh: Mesh) -> bool:
        is_family_proved = any(_family(other) == _family(mesh) for other in self.proved)
        return self._bytes(mesh) <= (1.0 if is_family_proved else _DOUBT) * self.room

    def _bytes(self, mesh: Mesh) -> float:
        return _expected(mesh, self.proved)[0]

    def _seconds(self, mesh: Mesh) -> float:
        return _expected(mesh, self.proved)[1]


def _uses(mesh: Mesh) -> frozenset[str]:
    """Return the features that a model's layers must support; all support ZeRO's first stage."""
    split = mesh.split
    axes = {name for name in ("tp", "pp", "cp", "ep", "interleave") if getattr(split, name) > 1}
    sequence = {"sequence_parallel"} if split.sequence_parallel else set()
    zero = {f"zero {split.zero}"} if split.zero > 1 else set()
    recompute = {mesh.checkpointing} if mesh.checkpointing != RECOMPUTE[0] else set()
    return frozenset(axes | sequence | zero | recompute)


def _same_split(mesh: Mesh, other: Mesh) -> bool:
    """Compare splits without recomputation, layers of stages and interleaving."""
    first, second = (replace(each.split, stage_layers=(), interleave=1) for each in (mesh, other))
    return first == second


def _expected(mesh: Mesh, proved: Mapping[Mesh, Proof]) -> tuple[float, float]:
    """Correct the estimated bytes and seconds by the errors of the most similar proved mesh."""
    alike = [other for other in proved if _family(other) == _family(mesh)]
    if not alike:
        return mesh.peak_bytes, mesh.step_s
    nearest = min(alike, key=lambda other: (*_unlike(other, mesh), abs(other.peak_bytes - mesh.peak_bytes)))
    proof = proved[nearest]
    return proof.bytes + mesh.peak_bytes - nearest.peak_bytes, mesh.step_s * proof.step_s / nearest.step_s


def _family(mesh: Mesh) -> tuple[int, bool]:
    """Return a mesh's family; proofs correct estimates within it only."""
    return mesh.split.tp, mesh.split.pp > 1


def _unlike(mesh: Mesh, other: Mesh) -> tuple[bool, ...]:
    """Return the differences of two meshes, the one with the most effect on estimates first."""
    pairs = [(getattr(mesh.split, name), getattr(other.split, name)) for name in ("ep", "cp", "zero")]
    return (mesh.checkpointing != other.checkpointing, *(first != second for first, second in pairs))


def _takes_more(mesh: Mesh, other: Mesh) -> bool:
    """Return True where ``mesh`` surely needs the bytes of ``other`` on every GPU. With fewer micro-batches a
    pipeline has fewer in flight, and a single one accumulates no gradients."""
    split, other_split = mesh.split, other.split
    fewer_rows = split.micro_batch < other_split.micro_batch
    if fewer_rows or RECOMPUTE.index(mesh.checkpointing) > RECOMPUTE.index(other.checkpointing):
        return False
    if split == other_split:
        return True
    alike = replace(split, micro_batch=other_split.micro_batch) == other_split
    return alike and split.pp == 1 and (split.micro_batches > 1 or other_split.offload_shards)


def _splits(shape: Shape, gpus: int, gpus_per_node: int, sequence: int, batch: int) -> Iterator[Split]:
    whole = shape.experts is not None or shape.latent is not None or shape.whole_tensors  # not split by tensors
    tensors = [n for n in range(1, 1 + (1 if whole else min(gpus_per_node, gpus))) if gpus % n == 0]
    divides = False
    for tp, micro in itertools.product(tensors, _MICRO_BATCHES):
        try:
            split = Split(
                gpus=gpus, gpus_per_node=gpus_per_node, tp=tp, micro_batch=micro, global_batch=batch,
                sequence_parallel=tp > 1, zero=3, offload_shards=True,
            )  # fmt: skip
            check_sizes(split, shape.sizes(sequence))
        except UsageError:  # does not divide
            continue
        divides = True
        yield split
    if not divides:
        raise UsageError(
            f"Cannot split {shape.name} over {gpus} GPUs with {batch} sequences a step.",
            "No mesh divides its heads and the batch.", f"Try --global-batch {8 * gpus}.",
        )  # fmt: skip


def _bytes(pieces: Pieces, split: Split, recompute: str) -> int:
    """Estimate the bytes: saved activations, two gathered layers, logits with gradients, and parameters outside of
    layers, which stay gathered during a micro-batch and have gradients reduced in float32."""
    ends, shape = pieces.ends(split, recompute), pieces.shape
    whole = (
        _WIDTH * 2 * (ends.layer_parameters + ends.layer_experts) + (2 * _WIDTH + 4) * ends.beside_parameters[1, 0]
    )
    logits = _LOGIT * split.micro_batch * pieces.sequence * shape.vocabulary // split.tp
    return shape.layers * ends.layer_bytes + whole + logits + nccl_bytes(split) + pieces.gpu.context().bytes


def _step(pieces: Pieces, split: Split, recompute: str, ram_bytes_per_s: float) -> StepTime:
    layer, embedding, head = pieces.costs(split, recompute)
    ends, layers = pieces.ends(split, recompute), pieces.shape.layers
    outside = embedding.plus(head)
    compute = waits = adds = 0.0
    each = ends.layer_parameters + ends.layer_experts
    for cost, count, times in ((layer, each, layers), (outside, ends.beside_parameters[1, 0], 1)):
        incoming_s, outgoing_s = _brought_s(pieces, split, count), _taken_s(pieces, split, count)
        forward, backward = max(incoming_s - cost.forward_s, 0.0), max(incoming_s + outgoing_s - cost.backward_s, 0.0)
        compute += times * (cost.forward_s + cost.backward_s)
        waits += times * (forward + backward)
        adds += times * _host_s(_ADDED * count / split.shards, split, ram_bytes_per_s)
    return StepTime(
        compute_s=compute * split.micro_batches,
        communication_s=waits * split.micro_batches + adds * (split.micro_batches - 1),
        bubble_s=0.0,
        once_s=_host_s(_STEPPED * pieces.parameters() / split.gpus, split, ram_bytes_per_s),
    )


def _brought_s(pieces: Pieces, split: Split, count: int) -> float:
    """Return the seconds of loading a unit's weights: this rank's shard from RAM, then an all-gather."""
    shard = Sent(kind="to_device", axis="shard", bytes=4 * count // split.shards, phase=Phase.FORWARD)
    whole = Sent(kind="all_gather", axis="shard", bytes=_WIDTH * count, phase=Phase.FORWARD)
    return crossed_s(shard, pieces.gpu) + sent_s(whole, split, pieces.network)


def _taken_s(pieces: Pieces, split: Split, count: int) -> float:
    """Return the seconds of reducing a unit's gradients in float32, and copying this rank's shard to RAM."""
    whole = Sent(kind="reduce_scatter", axis="shard", bytes=4 * count, phase=Phase.BACKWARD)
    shard = Sent(kind="to_ram", axis="shard", bytes=4 * count // split.shards, phase=Phase.BACKWARD)
    return crossed_s(shard, pieces.gpu) + sent_s(whole, split, pieces.network)


def _host_s(moved_bytes: float, split: Split, ram_bytes_per_s: float) -> float:
    op = Op(name="", module="", phase=Phase.OPTIMIZER, step=0, at=0, read_bytes=int(moved_bytes))
    return host_s([op], split, ram_bytes_per_s)
