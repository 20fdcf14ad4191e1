"""A layer, and the rest of the model, as PyTorch's engine runs them: from traces of models with very few layers.

A search over splits compares them by these: a trace of one or two layers takes half a second of a CPU, one of a whole
stage many times that. The exact memory and time of a split need its proof (``torch_engine``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from brim import catalog
from brim.core import Category, Op, Phase, Trace
from brim.estimation.estimate import capability_of
from brim.estimation.models import Source
from brim.estimation.ranks import torch_engine
from brim.estimation.ranks.job import ParallelJob
from brim.estimation.ranks.layers import usual_layers
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.split import Split
from brim.estimation.simulation import place_of
from brim.estimation.workload import Workload

_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.BUFFER, Category.WORKSPACE)
_RANKS = 2  # that split the weights: the fewest that do


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A micro-batch of a model of few layers whose weights are split. ``ops`` are its kernels without ``copies``, by
    which FSDP2 assembles weights from shards, and shards of gradients; ``sent`` is the rest of the communication.
    ``kept_bytes``: of activations, at the start of the backward pass."""

    ops: tuple[Op, ...]
    copies: tuple[Op, ...]
    sent: tuple[Sent, ...]
    kept_bytes: int


def pieces(
    source: Source, split: Split, layers: int, *, sequence: int, recompute: str, gpu: catalog.Gpu, precision: str
) -> Pieces:
    """Trace ``source`` with ``layers`` layers of the most frequent kind, whose tensors, sequences and experts are
    split by ``split``. Raises as ``torch_engine.stages``."""
    workload = Workload(
        task="train", batch=split.micro_batch, seq=sequence, precision=precision, checkpointing=recompute
    )
    job = ParallelJob(
        source=source, workload=workload, split=_little(split), sequence=sequence,
        capability=capability_of(place_of(gpu)), layers=usual_layers(source, layers),
    )  # fmt: skip
    (facts,), _ = torch_engine.stages(job)
    ops = [op for op in facts.ops if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    return Pieces(
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
