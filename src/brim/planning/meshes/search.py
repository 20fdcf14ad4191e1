"""Search the fastest meshes for a training job by Megatron-LM's engine.

Closed forms first: seconds and bytes of every mesh follow from a layer, the embedding and the head, computed once for
each tensor split, and states of ``6 + 12 / d`` bytes. Meshes that fit are sorted by seconds, and each is proved rank
by rank (``estimation.ranks``) before it is offered.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from brim import catalog
from brim.core import Hardware, Op, Phase, Trace
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.estimation.ranks.balance import balanced
from brim.estimation.ranks.estimate import nccl_bytes
from brim.estimation.ranks.megatron.layer import Place
from brim.estimation.ranks.megatron.stages import LAUNCHES_S
from brim.estimation.ranks.megatron.step import stage_trace
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.sizes import Shape
from brim.estimation.ranks.split import Split, in_flight, stage_layers
from brim.estimation.ranks.time import StageTime, StepTime, kernels_s, sent_s, step_time, training_hardware
from brim.estimation.simulation import capability_of, place_of
from brim.planning.meshes.splits import splits
from brim.planning.proof import search

_Key = tuple[int | str, ...]
RECOMPUTE = ("none", "selective", "full")
SEQUENCES_PER_GPU = 8  # of a step without a given batch
_MOST_PROOFS = 64
_DOUBT = 1.005  # times the room: the error of closed forms; the proof tells what fits
_NEAREST = 8  # splits that are evaluated where nothing fits, to find the smallest budget


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A split of a job, with its seconds and its bytes on the worst rank by closed forms."""

    split: Split
    checkpointing: str
    time: StepTime
    peak_bytes: int
    fullest: int = 0  # the stage of the worst rank

    @property
    def step_s(self) -> float:
        return self.time.step_s


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a piece of the model for a micro-batch, forward and backward; ``sends_s`` of them communicate."""

    forward_s: float
    backward_s: float
    sends_s: float

    def times(self, count: int) -> Costs:
        return Costs(
            forward_s=self.forward_s * count, backward_s=self.backward_s * count, sends_s=self.sends_s * count
        )

    def plus(self, other: Costs) -> Costs:
        return Costs(
            forward_s=self.forward_s + other.forward_s, backward_s=self.backward_s + other.backward_s,
            sends_s=self.sends_s + other.sends_s,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A layer's parameters and saved bytes, and those of a stage beside its layers, by (1 or 2 stages, index).

    ``layer_experts`` are the parameters of a layer's experts on a rank, not part of ``layer_parameters``.
    ``table_bytes`` are those beside other micro-batches' activations while the embedding's gradient, a full table, is
    computed; ``beside_bytes`` those at any other moment.
    """

    layer_parameters: int
    layer_experts: int
    layer_bytes: int
    beside_parameters: dict[tuple[int, int], int]
    beside_bytes: dict[tuple[int, int], int]
    table_bytes: dict[tuple[int, int], int]


def meshes(
    shape: Shape, *, gpus: int, gpus_per_node: int, gpu: catalog.Gpu, sequence: int, global_batch: int = 0
) -> list[Mesh]:
    """Return all meshes that fit by closed forms, the fastest first.

    ``global_batch`` 0: eight sequences for each GPU. Meshes whose states alone do not fit are skipped. Raises
    UsageError where nothing divides, BudgetError where nothing fits, naming the GPUs that would hold the model's
    states.
    """
    if shape.experts and shape.experts.dense_layers:
        raise UnsupportedError(
            f"Cannot search the fastest mesh for {shape.name}.",
            "Its layers are of two kinds, with experts and without.",
            "Estimate single meshes: brim estimate --gpus, with --ep.",
        )  # fmt: skip
    batch = global_batch or SEQUENCES_PER_GPU * gpus
    pieces = Pieces(shape, gpu, sequence)
    least = {split: pieces.least_bytes(split) for split in splits(shape, gpus, gpus_per_node, sequence, batch)}
    if not least:
        raise UsageError(
            f"Cannot split {shape.name} over {gpus} GPUs with {batch} sequences a step.",
            "No mesh divides its layers, its heads and the batch.",
            f"Try --global-batch {SEQUENCES_PER_GPU * gpus}.",
        )
    room = int(_DOUBT * (gpu.capacity_bytes - gpu.context().bytes))
    candidates = [mesh for split, bytes in least.items() if bytes <= room for mesh in pieces.meshes(split)]
    fitting = [mesh for mesh in candidates if mesh.peak_bytes + nccl_bytes(mesh.split) <= room]
    if not fitting:
        nearest = heapq.nsmallest(_NEAREST, least, key=lambda split: least[split])
        candidates += [mesh for split in nearest if least[split] > room for mesh in pieces.meshes(split)]
        raise _too_small(shape, gpus, gpu, min(mesh.peak_bytes for mesh in candidates), pieces.parameters())
    return sorted(fitting, key=lambda mesh: mesh.step_s)


def best(candidates: list[Mesh], proves: Callable[[Mesh], bool], top: int) -> list[Mesh]:
    """Return the ``top`` fastest candidates for which ``proves`` is True, one per split."""
    chosen: list[Mesh] = []

    def split_of(mesh: Mesh) -> Split:
        return replace(mesh.split, stage_layers=())

    unlike = (mesh for mesh in candidates[:_MOST_PROOFS] if split_of(mesh) not in map(split_of, chosen))
    return search(unlike, lambda mesh: mesh if proves(mesh) else None, results=chosen, most=top)


def _which(split: Split, stage: int) -> tuple[int, int]:
    """Return a stage's index into ``Ends``: of a single stage, or the first or last of several."""
    return (1, 0) if split.pp == 1 else (2, 0 if stage == 0 else 1)


def _beside(split: Split, stage: int, ends: Ends) -> int:
    """Return the parameters of a stage beside its layers'."""
    return 0 if 0 < stage < split.pp - 1 else ends.beside_parameters[_which(split, stage)]


def _peak_bytes(trace: Trace) -> tuple[int, int]:
    """Return the peak bytes without and with a gradient of the embedding."""
    begins = next(op.at for op in trace.ops if op.phase is Phase.BACKWARD)
    changes: list[tuple[int, int, int]] = []
    for storage in trace.storages:
        table = int(storage.module == "embedding" and storage.born > begins)
        changes.append((storage.born, storage.bytes, table))
        if storage.died is not None:
            changes.append((storage.died, -storage.bytes, -table))
    most, now, tables = [0, 0], 0, 0
    for _, bytes, table in sorted(changes):
        now, tables = now + bytes, tables + table
        most[bool(tables)] = max(most[bool(tables)], now)
    return most[0], most[1]


class Pieces:
    """The model's pieces on a GPU, each computed once per tensor split."""

    def __init__(self, shape: Shape, gpu: catalog.Gpu, sequence: int) -> None:
        self.shape, self.gpu, self.sequence = shape, gpu, sequence
        self.capability = capability_of(place_of(gpu))  # decides on the kernels, and so on the tensors that they save
        self.hardware: Hardware = training_hardware(gpu)[0]
        self.network = catalog.network(gpu)
        self._all_ends: dict[_Key, Ends] = {}
        self._known: dict[_Key, tuple[Costs, Costs, Costs]] = {}

    def least_bytes(self, split: Split) -> int:
        """Return a lower bound on this split's bytes: a stage with the mean of all states, and NCCL's buffers."""
        place = Place(shape=self.shape, split=split, sequence=self.sequence, recompute="none")
        layers = self.shape.layers
        states = _states(
            layers * place.parameters() // split.pp, layers * place.expert_parameters(0) // split.pp, split
        )
        return states + nccl_bytes(split)

    def meshes(self, split: Split) -> Iterator[Mesh]:
        """Yield a mesh for each kind of recomputation, with even stages, or balanced ones where those fit or are
        faster."""
        room = self._room(split)
        for recompute in RECOMPUTE:
            ends = self.ends(split, recompute)
            layouts = {self._balanced(split, recompute, ends)}
            if self.shape.layers % (split.pp * split.interleave) == 0:
                layouts.add(stage_layers(self.shape.layers, split.pp * split.interleave))
            candidates = [self._mesh(split, recompute, ends, layers) for layers in layouts]
            yield min(candidates, key=lambda mesh: (mesh.peak_bytes > room, mesh.step_s, mesh.peak_bytes))

    def _mesh(self, split: Split, recompute: str, ends: Ends, layers: tuple[int, ...]) -> Mesh:
        own = self.named(split, layers)
        stage_bytes = [self.stage_bytes(own, stage, ends, layers[stage]) for stage in range(split.pp)]
        time = self.step(own, recompute, ends, layers)
        fullest = stage_bytes.index(max(stage_bytes))
        return Mesh(split=own, checkpointing=recompute, time=time, peak_bytes=max(stage_bytes), fullest=fullest)

    def _room(self, split: Split) -> int:
        return self.gpu.capacity_bytes - self.gpu.context().bytes - nccl_bytes(split)

    def named(self, split: Split, layers: tuple[int, ...]) -> Split:
        """Add the layers of stages to the split, unless they are the engine's default (even)."""
        return split if len(set(layers)) == 1 else replace(split, stage_layers=layers)

    def _balanced(self, split: Split, recompute: str, ends: Ends) -> tuple[int, ...]:
        """Return balanced layers of each pipeline stage; interleaved chunks are even."""
        many = split.pp * split.interleave
        if many == 1 or split.interleave > 1:
            return stage_layers(self.shape.layers, many)

        def seconds(stage: int, count: int) -> float:
            cost = self._stage_costs(split, recompute, stage, count)
            return cost.forward_s + cost.backward_s

        def bytes_of(stage: int, count: int) -> int:
            return self.stage_bytes(split, stage, ends, count)

        counts = balanced(self.shape.layers, split.pp, seconds, bytes_of, self._room(split))
        return counts or stage_layers(self.shape.layers, split.pp)

    def parameters(self) -> int:
        """Return the parameters of the model."""
        ends = self.ends(Split(gpus=1), "none")
        return self.shape.layers * (ends.layer_parameters + ends.layer_experts) + ends.beside_parameters[1, 0]

    def stage_bytes(self, split: Split, stage: int, ends: Ends, layers: int) -> int:
        """Return the bytes of a stage with ``layers`` (in each of its chunks) and all micro-batches in flight."""
        inner = 0 < stage < split.pp - 1
        own = layers * split.interleave
        states = _states(own * ends.layer_parameters + _beside(split, stage, ends), own * ends.layer_experts, split)
        flying, kept, which = in_flight(split, stage), layers * ends.layer_bytes, _which(split, stage)
        live_bytes = flying * kept + ends.beside_bytes[(2, 0) if inner else which]
        return states + (max(live_bytes, (flying - 1) * kept + ends.table_bytes[which]) if stage == 0 else live_bytes)

    def ends(self, split: Split, recompute: str) -> Ends:
        key = _key(split, recompute)
        if key not in self._all_ends:
            self._all_ends[key] = self._of_few_layers(split, recompute)
        return self._all_ends[key]

    def _of_few_layers(self, split: Split, recompute: str) -> Ends:
        """Derive ``Ends`` from traces of models with one or two layers per stage."""
        peaks: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
        for stages, stage, each in itertools.product((1, 2), (0, 1), (1, 2)):
            if stage < stages:
                little = _alone(split, stages)
                traced = stage_trace(
                    replace(self.shape, layers=each * stages), little, stage, sequence=self.sequence,
                    recompute=recompute, capability=self.capability,
                )  # fmt: skip
                peaks[stages, stage, each] = (traced.parameters, traced.expert_parameters, *_peak_bytes(traced.trace))
        layer_parameters, layer_experts, layer_bytes, _ = (
            second - first for first, second in zip(peaks[1, 0, 1], peaks[1, 0, 2], strict=True)
        )
        layer_bytes -= megatron_state_bytes(layer_parameters + layer_experts)
        beside_parameters, beside_bytes, table_bytes = {}, {}, {}
        for (stages, stage, each), (count, experts, peak, table) in peaks.items():
            if each == 1:
                fixed_bytes = megatron_state_bytes(count + experts) + (stages - stage) * layer_bytes
                beside_parameters[stages, stage] = count - layer_parameters
                beside_bytes[stages, stage] = peak - fixed_bytes
                table_bytes[stages, stage] = table - fixed_bytes + layer_bytes
        return Ends(
            layer_parameters=layer_parameters, layer_experts=layer_experts, layer_bytes=layer_bytes,
            beside_parameters=beside_parameters, beside_bytes=beside_bytes, table_bytes=table_bytes,
        )  # fmt: skip

    def step(self, split: Split, recompute: str, ends: Ends, layers: tuple[int, ...]) -> StepTime:
        own = [layers[stage] * split.interleave for stage in range(split.pp)]
        stages = []
        for stage in range(split.pp):
            cost = self._stage_costs(split, recompute, stage, own[stage])
            count = own[stage] * ends.layer_parameters + _beside(split, stage, ends)
            once = self.once_s(split, count, own[stage] * ends.layer_experts)
            stages.append(StageTime(
                forward_s=cost.forward_s, backward_s=cost.backward_s, communicates_s=cost.sends_s, once_s=once,
            ))  # fmt: skip
        return step_time(stages, split)

    def _stage_costs(self, split: Split, recompute: str, stage: int, layers: int) -> Costs:
        """Return a stage's costs for a micro-batch: the longer of kernels and launches, plus communication."""
        layer, embedding, head = self.costs(split, recompute)
        cost = layer.times(layers).plus(self._handed_on(split, stage))
        if stage == 0:
            cost = cost.plus(embedding)
        if stage == split.pp - 1:
            cost = cost.plus(head)
        sends = cost.sends_s / 2
        forward, backward = (
            max(seconds - sends, layers * launches) + sends
            for seconds, launches in zip((cost.forward_s, cost.backward_s), LAUNCHES_S, strict=True)
        )
        return Costs(forward_s=forward, backward_s=backward, sends_s=cost.sends_s)

    def _handed_on(self, split: Split, stage: int) -> Costs:
        """Return the costs of a stage's messages to its neighbours."""
        if split.pp == 1:
            return Costs(forward_s=0.0, backward_s=0.0, sends_s=0.0)
        place = Place(shape=self.shape, split=split, sequence=self.sequence, recompute="none")
        message = Sent(kind="send", axis="pp", bytes=place.between, phase=Phase.FORWARD)
        each = sent_s(message, split, self.network)
        forward = each * (split.interleave - (stage == split.pp - 1))
        backward = each * (split.interleave - (stage == 0))
        return Costs(forward_s=forward, backward_s=backward, sends_s=forward + backward)

    def once_s(self, split: Split, count: int, experts: int) -> float:
        sent = [
            Sent(kind="reduce_scatter", axis="shard", bytes=4 * count, phase=Phase.OPTIMIZER),
            Sent(kind="all_gather", axis="shard", bytes=2 * count, phase=Phase.OPTIMIZER),
        ]
        if split.shards > split.ep:
            sent.append(Sent(kind="reduce_scatter", axis="shard", bytes=4 * experts, phase=Phase.OPTIMIZER))
        rate = self.hardware.tier(self.hardware.compute).bytes_per_s
        moved = 4 * (count + experts) + 34 * (count + experts * split.ep) / split.shards
        return sum(sent_s(each, split, self.network) for each in sent) + moved / rate

    def costs(self, split: Split, recompute: str) -> tuple[Costs, Costs, Costs]:
        """Return the costs of a layer, the embedding and the head."""
        key = (*_key(split, recompute), *(split.per_node(axis) for axis in ("tp", "cp", "ep")))
        if key not in self._known:
            shallow, deep = (
                stage_trace(
                    replace(self.shape, layers=layers),
                    _alone(split),
                    0,
                    sequence=self.sequence,
                    recompute=recompute,
                    capability=self.capability,
                )
                for layers in (1, 2)
            )
            first, second = (self._all(trace.ops, trace.sent, split) for trace in (shallow, deep))
            layer = second.plus(first.times(-1))
            rest = first.plus(layer.times(-1))
            embedding = self._all([op for op in shallow.ops if op.module == "embedding"], (), split)
            self._known[key] = (layer, embedding, rest.plus(embedding.times(-1)))
        return self._known[key]

    def _all(self, ops: list[Op] | tuple[Op, ...], sent: tuple[Sent, ...], split: Split) -> Costs:
        sends = {
            phase: sum(sent_s(each, split, self.network) for each in sent if each.phase is phase)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        works = {
            phase: kernels_s((op for op in ops if op.phase is phase), self.hardware)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        return Costs(
            forward_s=works[Phase.FORWARD] + sends[Phase.FORWARD],
            backward_s=works[Phase.BACKWARD] + sends[Phase.BACKWARD],
            sends_s=sum(sends.values()),
        )


def _key(split: Split, recompute: str) -> _Key:
    """Return the fields that a micro-batch's pieces depend on."""
    return split.tp, split.cp, split.ep, split.micro_batch, recompute


def _alone(split: Split, stages: int = 1) -> Split:
    """Return a split with the fewest ranks for the same tensor, sequence and expert parallelism, states unsharded."""
    gpus = split.tp * split.cp * split.ep * stages
    return Split(
        gpus=gpus, gpus_per_node=gpus, tp=split.tp, cp=split.cp, ep=split.ep, pp=stages,
        sequence_parallel=split.sequence_parallel, micro_batch=split.micro_batch,
    )  # fmt: skip


def _states(count: int, experts: int, split: Split) -> int:
    """Return the bytes of weights, gradients and optimizer states; experts are sharded over fewer ranks."""
    dense = megatron_state_bytes(count, split.shards)
    return dense + megatron_state_bytes(experts, split.shards // split.ep) if experts else dense


def megatron_state_bytes(parameters: int, shards: int = 1) -> int:
    """Return the bytes of Megatron-LM's states for the ``parameters`` that one GPU holds.

    18 B per parameter: 2 of bfloat16 weights, 4 of float32 gradients, 4 of float32 weights and 8 of moments. The
    distributed optimizer splits the last 12 over the data-parallel GPUs: ``6 + 12 / shards``
    (Megatron-LM ``docs/source/api-guide/dist_optimizer.md``).
    """
    return 6 * parameters + round(Fraction(12 * parameters, shards))


def _too_small(shape: Shape, gpus: int, gpu: catalog.Gpu, least: int, parameters: int) -> BudgetError:
    enough = -(-megatron_state_bytes(parameters) // gpu.capacity_bytes)
    return BudgetError(
        f"Cannot split {shape.name} over {gpus} {gpu.name}.",
        f"It needs at least {least:,} B on each of them, and one has {gpu.capacity_bytes:,} B.",
        f"About {enough} GPUs are enough for its states.",
        smallest_bytes={"vram": least},
    )
