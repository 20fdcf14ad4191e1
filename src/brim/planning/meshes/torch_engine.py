"""Search meshes under PyTorch's own engine, which ``brim train`` runs: with ZeRO's stages.

A layer's seconds and saved activations are the difference of traces of one and two layers, computed once per tensor
split: such a trace takes half a second of a CPU, that of a whole stage many times that. Parameters are those of
``planning.meshes``, with FSDP2's known bytes for each. Every mesh that may be the fastest is then traced rank by rank
(``offload.best``), which corrects the estimates of similar ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from brim import catalog
from brim.core import Category, Op, Phase, Trace
from brim.errors import BudgetError, ModelError, UnsupportedError, UsageError
from brim.estimation.models import Source
from brim.estimation.ranks import torch_engine
from brim.estimation.ranks.estimate import nccl_bytes
from brim.estimation.ranks.job import DEFAULT_PRECISION, ParallelJob
from brim.estimation.ranks.layers import usual_layers
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.sizes import Shape, shape_of
from brim.estimation.ranks.split import Split, in_flight
from brim.estimation.ranks.time import StepTime, kernels_s, sent_s
from brim.estimation.simulation import capability_of, place_of
from brim.estimation.workload import Workload
from brim.planning.meshes.search import SEQUENCES_PER_GPU, Costs, Ends, Mesh, Pieces
from brim.planning.meshes.splits import run_splits

DOUBT = 0.02  # the error of expected seconds if a similar mesh was proved
PRECISION = DEFAULT_PRECISION["torch"][0]
_WIDTH = 2  # bytes of a weight in bfloat16
_RESTS = 12  # bytes of a parameter in float32: the weight and two moments, which ZeRO shards
_GRADIENT = 4
# Bytes of a parameter that PyTorch's AdamW reads and writes, one operation after the other (torch/optim/adam.py,
# _multi_tensor_adam): lerp takes 12, addcmul and addcdiv 16 each; decay, scale, root, division and addition 8 each.
_STEPPED = 84
_GATHERED, _REDUCED = 10, 6  # bytes that FSDP2's copies of a gathered weight, and of its gradient, move
_ADDED = 10  # bytes that adding a bfloat16 gradient to a float32 one moves
_ENOUGH = 1024  # tokens of a micro-batch from which on kernels' seconds are proportional to them
_LOGIT = 12  # bytes of a logit: in bfloat16, in float32, and both gradients of the latter


def run_meshes(
    source: Source, *, gpus: int, gpus_per_node: int, gpu: catalog.Gpu, sequence: int, global_batch: int = 0
) -> list[Mesh]:
    """Return the meshes that divide and that ``brim train`` runs, the fastest first, with estimated bytes.

    Raises UsageError where nothing divides, BudgetError where all GPUs together do not hold the model's states.
    """
    batch = global_batch or SEQUENCES_PER_GPU * gpus
    pieces = _Traced(source, gpu, sequence)
    shape = pieces.shape
    _check_states(shape, gpus, gpu, Pieces(shape, gpu, sequence).parameters())
    meshes = [
        mesh for split in run_splits(shape, gpus, gpus_per_node, sequence, batch)
        for mesh in pieces.meshes(split)
    ]  # fmt: skip
    if not meshes:
        raise UsageError(
            f"Cannot split {shape.name} over {gpus} GPUs with {batch} sequences a step.",
            "No mesh divides its layers, its heads and the batch.",
            f"Try --global-batch {SEQUENCES_PER_GPU * gpus}.",
        )
    return sorted(meshes, key=lambda mesh: mesh.step_s)


def least_states(parameters: int, gpus: int) -> int:
    """Return the mean bytes of weights, gradients and moments per GPU, or its share of RAM."""
    return -(-(_RESTS + _GRADIENT) * parameters // gpus)


def _check_states(shape: Shape, gpus: int, gpu: catalog.Gpu, parameters: int) -> None:
    """Raise BudgetError where the mean of all states exceeds a GPU's room: some GPU has at least the mean."""
    room, least = gpu.capacity_bytes - gpu.context().bytes, least_states(parameters, gpus)
    if least > room:
        raise BudgetError(
            f"Cannot split {shape.name} over {gpus} {gpu.name}.",
            f"Its states need at least {least:,} B on each of them, and one has {room:,} B for them.",
            f"About {-(-least_states(parameters, 1) // room)} GPUs are enough for its states.",
            smallest_bytes={"vram": least + gpu.context().bytes},
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer in a micro-batch of ``sequences``: ``costs`` as those of ``Pieces.costs``, without FSDP2's copies for
    all-gathers (``gathers_s``) and reduce-scatters (``reduces_s``); ``rest_``: those outside of layers."""

    sequences: int
    costs: tuple[Costs, Costs, Costs]
    gathers_s: float
    reduces_s: float
    rest_gathers_s: float
    rest_reduces_s: float
    kept_bytes: int


class _Traced(Pieces):
    """Pieces under FSDP2: shards in float32, gathered weights in bfloat16, gradients reduced in float32."""

    def __init__(self, source: Source, gpu: catalog.Gpu, sequence: int) -> None:
        shape = shape_of(source)
        if shape.experts:  # in all layers: dense ones need less
            shape = replace(shape, experts=replace(shape.experts, dense_layers=0))
        super().__init__(shape, gpu, sequence)
        self.source = source
        self._layers: dict[tuple[int | str, ...], _Layer | None] = {}

    def ends(self, split: Split, recompute: str) -> Ends:
        ends, layer = super().ends(split, recompute), self._layer(split, recompute)
        if layer is None:
            return ends
        kept = layer.kept_bytes * split.micro_batch // layer.sequences
        if split.cp > 1:
            kept = kept * ends.layer_bytes // super().ends(_unsplit(split), recompute).layer_bytes
        return replace(ends, layer_bytes=kept)

    def costs(self, split: Split, recompute: str) -> tuple[Costs, Costs, Costs]:
        layer = self._layer(split, recompute)
        if layer is None:
            return super().costs(split, recompute)
        times = [cost.times(split.micro_batch // layer.sequences) for cost in layer.costs]
        if split.cp > 1:
            parts, wholes = (super(_Traced, self).costs(each, recompute) for each in (split, _unsplit(split)))
            times = [_as_much_of(*each) for each in zip(times, parts, wholes, strict=True)]
        layer_cost, embedding, head = times
        beside = _copied(split, layer.rest_gathers_s / 2, layer.rest_reduces_s / 2)
        added = self._added_s(split, super().ends(split, recompute).layer_parameters)
        return (
            layer_cost.plus(_copied(split, layer.gathers_s, layer.reduces_s)).plus(added), embedding.plus(beside),
            head.plus(beside),
        )  # fmt: skip

    def _added_s(self, split: Split, count: int) -> Costs:
        """Return the costs of accumulating a further micro-batch's unsharded gradients of a layer."""
        rate = self.hardware.tier(self.hardware.compute).bytes_per_s
        return Costs(forward_s=0.0, backward_s=_ADDED * count / rate if _puts_off(split) else 0.0, sends_s=0.0)

    def _layer(self, split: Split, recompute: str) -> _Layer | None:
        """Return the layer for unsplit sequences; None where the engine cannot split it so (the proof says why)."""
        enough = (n for n in (1, 2, 4) if n <= split.micro_batch and n * self.sequence >= _ENOUGH)
        sequences = next(enough, split.micro_batch)
        split = _unsplit(split)
        key = (split.tp, split.ep, sequences, recompute)
        if key not in self._layers:
            try:
                self._layers[key] = self._of_two_layers(replace(split, micro_batch=sequences), recompute)
            except (ModelError, UnsupportedError):
                self._layers[key] = None
        return self._layers[key]

    def _of_two_layers(self, split: Split, recompute: str) -> _Layer:
        shallow, deep = (
            traced_layers(self.source, split, count, sequence=self.sequence, recompute=recompute, gpu=self.gpu)
            for count in (1, 2)
        )  # fmt: skip
        first, second = (self._all(trace.ops, trace.sent, split) for trace in (shallow, deep))
        layer = second.plus(first.times(-1))
        embedding = self._all([op for op in shallow.ops if op.name.startswith("aten.embedding")], (), split)
        head = first.plus(layer.times(-1)).plus(embedding.times(-1))
        (gathers, reduces), (all_gathers, all_reduces) = self._copies(shallow.copies), self._copies(deep.copies)
        gathers, all_gathers = all_gathers - gathers, 2 * gathers - all_gathers
        reduces, all_reduces = all_reduces - reduces, 2 * reduces - all_reduces
        return _Layer(
            sequences=split.micro_batch, costs=(layer, embedding, head), gathers_s=gathers, reduces_s=reduces,
            rest_gathers_s=all_gathers, rest_reduces_s=all_reduces, kept_bytes=deep.kept_bytes - shallow.kept_bytes,
        )  # fmt: skip

    def _copies(self, ops: Sequence[Op]) -> tuple[float, float]:
        """Return the seconds of copies for a forward all-gather, and of all others."""
        gathers = kernels_s((op for op in ops if op.phase is Phase.FORWARD), self.hardware)
        again = kernels_s((op for op in ops if op.phase is Phase.BACKWARD), self.hardware)
        return gathers, again - gathers

    def named(self, split: Split, layers: tuple[int, ...]) -> Split:
        """Add the layers of stages to the split, as PyTorch's engine would choose them otherwise."""
        return replace(split, stage_layers=layers) if split.pp > 1 and split.interleave == 1 else split

    def stage_bytes(self, split: Split, stage: int, ends: Ends, layers: int) -> int:
        whole = split.pp == 1
        beside = ends.beside_parameters[1 if whole else 2, 0 if whole or stage < split.pp - 1 else 1]
        beside *= stage in (0, split.pp - 1)
        count = layers * split.interleave * ends.layer_parameters + beside
        experts = layers * split.interleave * ends.layer_experts
        if split.ep == 1:
            count, experts = count + experts, 0
        state_bytes = (_RESTS + _GRADIENT) * (count // split.shards + experts)
        if split.zero < 3:
            state_bytes += _WIDTH * count + (_GRADIENT * count if split.zero == 1 and split.micro_batches > 1 else 0)
        else:
            each = ends.layer_parameters + (ends.layer_experts if split.ep == 1 else 0)
            state_bytes += split.interleave * (3 * _WIDTH + _GRADIENT) * each + (2 * _WIDTH + _GRADIENT) * beside
        has_head = stage == split.pp - 1
        logits = _LOGIT * split.micro_batch * self.sequence * self.shape.vocabulary // (split.tp * split.cp)
        kept = in_flight(split, stage) * layers * ends.layer_bytes
        kept += has_head * logits + self._passed_bytes(split)
        return state_bytes + kept + nccl_bytes(split) + self.gpu.context().bytes

    def _passed_bytes(self, split: Split) -> int:
        """Return the bytes of a pipeline stage's receive buffers for all micro-batches, and of sent messages where
        torch's schedule runtime keeps them (``estimation.ranks.torch_engine``)."""
        if split.pp == 1:
            return 0
        tokens = split.micro_batch * split.between(self.sequence)
        ways = (2 * split.interleave - 1) * (1 + (split.interleave > 1))
        return ways * split.micro_batches * _WIDTH * tokens * self.shape.hidden

    def step(self, split: Split, recompute: str, ends: Ends, layers: tuple[int, ...]) -> StepTime:
        """Add the communication of every micro-batch that takes longer than the kernels."""
        time = super().step(split, recompute, ends, layers)
        if split.shards == 1 or _puts_off(split):
            return time
        layer = self.costs(split, recompute)[0]
        count = ends.layer_parameters + (ends.layer_experts if split.ep == 1 else 0)
        whole = Sent(kind="all_gather", axis="shard", bytes=_WIDTH * count, phase=Phase.FORWARD)
        summed = Sent(kind="reduce_scatter", axis="shard", bytes=_GRADIENT * count, phase=Phase.BACKWARD)
        once_a_step = split.zero < 3 and split.micro_batches > 1
        gathers = 0.0 if once_a_step else sent_s(whole, split, self.network)
        reduces = sent_s(summed, split, self.network)
        waits = self._longer(gathers, gathers + reduces, layer) * max(layers) * split.interleave
        return replace(time, communication_s=time.communication_s + waits * split.micro_batches)

    def once_s(self, split: Split, count: int, experts: int) -> float:
        """Return the seconds of the update of this rank's shards, and of communication after the last micro-batch."""
        own = count // split.shards + experts // (split.shards // split.ep)
        rate = self.hardware.tier(self.hardware.compute).bytes_per_s
        stepped, whole = _STEPPED * own / rate, count + (experts if split.ep == 1 else 0)
        if split.zero < 3 and split.micro_batches > 1 and split.shards > 1:
            stepped += (_GATHERED + _REDUCED * _puts_off(split)) * whole / rate
        if not _puts_off(split):
            return stepped
        sent = (
            Sent(kind="reduce_scatter", axis="shard", bytes=_GRADIENT * whole, phase=Phase.OPTIMIZER),
            Sent(kind="all_gather", axis="shard", bytes=_WIDTH * whole, phase=Phase.OPTIMIZER),
        )
        return stepped + sum(sent_s(each, split, self.network) for each in sent)

    @staticmethod
    def _longer(forward_s: float, backward_s: float, layer: Costs) -> float:
        return max(forward_s - layer.forward_s, 0.0) + max(backward_s - layer.backward_s, 0.0)


def _puts_off(split: Split) -> bool:
    """Return True where gradients are reduced after the last of several micro-batches only."""
    return split.zero == 1 and split.micro_batches > 1


def _unsplit(split: Split) -> Split:
    """Return the split with tensor and expert parallelism only."""
    return Split(
        gpus=split.tp * split.ep, tp=split.tp, ep=split.ep, gpus_per_node=split.gpus_per_node,
        sequence_parallel=split.sequence_parallel, micro_batch=split.micro_batch,
    )  # fmt: skip


def _as_much_of(total: Costs, part_by_forms: Costs, total_by_forms: Costs) -> Costs:
    """Scale the whole's costs by the part's share in closed forms."""
    forward_s = total.forward_s * part_by_forms.forward_s / (total_by_forms.forward_s or 1.0)
    backward_s = total.backward_s * part_by_forms.backward_s / (total_by_forms.backward_s or 1.0)
    return Costs(forward_s=forward_s, backward_s=backward_s, sends_s=part_by_forms.sends_s)


def _copied(split: Split, gathers_s: float, reduces_s: float) -> Costs:
    """Return the costs of FSDP2's copies that each micro-batch repeats."""
    if split.zero == 3:
        return Costs(forward_s=gathers_s, backward_s=gathers_s + reduces_s, sends_s=0.0)
    if split.micro_batches == 1:
        return Costs(forward_s=gathers_s, backward_s=reduces_s, sends_s=0.0)
    return Costs(forward_s=0.0, backward_s=reduces_s * (split.zero == 2), sends_s=0.0)


_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.BUFFER, Category.WORKSPACE)
_RANKS = 2  # that split the weights: the fewest that do


@dataclass(frozen=True, kw_only=True)
class TracedLayers:
    """A micro-batch of a model of few layers whose weights are split. ``ops`` are its kernels without ``copies``, by
    which FSDP2 assembles weights from shards, and shards of gradients; ``sent`` is the rest of the communication.
    ``kept_bytes``: of activations, at the start of the backward pass."""

    ops: tuple[Op, ...]
    copies: tuple[Op, ...]
    sent: tuple[Sent, ...]
    kept_bytes: int


def traced_layers(
    source: Source, split: Split, layers: int, *, sequence: int, recompute: str, gpu: catalog.Gpu
) -> TracedLayers:
    """Trace ``source`` with ``layers`` layers of the most frequent kind, whose tensors, sequences and experts are
    split by ``split``. Raises as ``torch_engine.stages``."""
    workload = Workload(
        task="train", batch=split.micro_batch, seq=sequence, precision=PRECISION, checkpointing=recompute
    )
    job = ParallelJob(
        source=source, workload=workload, split=_little(split), sequence=sequence,
        capability=capability_of(place_of(gpu)), layers=usual_layers(source, layers),
    )  # fmt: skip
    (facts,), _ = torch_engine.stages(job)
    ops = [op for op in facts.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    return TracedLayers(
        ops=tuple(op for op in ops if not _copies(op)),
        copies=tuple(op for op in ops if _copies(op)),
        sent=tuple(sent for sent in facts.sent if sent.axis != "shard"),
        kept_bytes=_kept_bytes(facts.trace),
    )


def _little(split: Split) -> Split:
    """The smallest split of the same kinds of parallelism, with one micro-batch for each rank."""
    shared = split.cp * split.ep
    gpus = split.tp * (shared if shared > 1 else _RANKS)
    return Split(
        gpus=gpus, gpus_per_node=gpus, tp=split.tp, cp=split.cp, ep=split.ep, zero=3,
        sequence_parallel=split.sequence_parallel, micro_batch=split.micro_batch,
    )  # fmt: skip


def _copies(op: Op) -> bool:
    return op.name.startswith(("fsdp.", "aten._foreach_copy_."))


def _kept_bytes(trace: Trace) -> int:
    begins = _backward(trace.ops, trace.step_starts[-1])
    alive = (
        storage
        for storage in trace.storages
        if storage.born < begins and (storage.died is None or storage.died > begins)
    )
    return sum(storage.bytes for storage in alive if storage.category not in _STATES)


def _backward(ops: Iterable[Op], after: int) -> int:
    return next(op.at for op in ops if op.phase is Phase.BACKWARD and op.at > after)
