"""The pipeline ranks of a training job under PyTorch's own engine, traced as they would run.

``techniques.parallel.pipeline`` cuts the stage, ``techniques.parallel.sharding`` splits it by FSDP2 and DTensor, and
one process takes the place of one rank in PyTorch's fake process group. Three micro-batches are traced; a pipeline's
step is put together from them in its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from brim.catalog.gpus import read_facts
from brim.core import Category, Op, Phase, Storage, Trace
from brim.core.trace import TO_DEVICE, TO_RAM
from brim.errors import BrimError, ModelError, UnsupportedError
from brim.estimation.extrapolation import extend_depth
from brim.estimation.models import short, transformers_config
from brim.estimation.optimizers import make_optimizer
from brim.estimation.ranks.balance import stages_of
from brim.estimation.ranks.compose import OPTIMIZER, Composer, mark_of, of_chunks, traced_order
from brim.estimation.ranks.job import DEFAULT_PRECISION, ParallelJob, StageFacts
from brim.estimation.ranks.layers import UNIT, Layers, layers_of
from brim.estimation.ranks.schedule import Turn, brief, turns
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.split import Split, check_context, check_experts, check_sizes, sizes_of
from brim.estimation.silence import quiet
from brim.estimation.steps import Job
from brim.predict.cost import base_name
from brim.predict.dispatch import mark
from brim.predict.flops import OVER
from brim.predict.tracer import trace
from brim.techniques.parallel import context_parallel, pipeline, sharding
from brim.techniques.parallel.parallelize import parallelize

_STEPS = 2  # the first makes the optimizer's state
_TYPES = {
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}
# Collectives by their names in traces -> kind, and whether the whole tensor is the input.
_COLLECTIVES = read_facts("operators.json")["collectives"]
_CROSSINGS = {TO_DEVICE: "to_device", TO_RAM: "to_ram"}
_BUFFERS = (
    "pipelining: every stage has receive buffers for all micro-batches at once, as in torch.distributed.pipelining "
    "(stage.py, _RecvInfo)"
)
_IN_RAM = "shards in RAM: page-locked, each in a power of two of bytes (PyTorch's CachingHostAllocator.h)"
_TOLD = "engine: PyTorch's FSDP2, DTensor and pipelining, traced on one rank of a fake process group"


def stages(job: ParallelJob) -> tuple[list[StageFacts], tuple[str, ...]]:
    """Every pipeline rank's step, and the assumptions.

    Raises UsageError for sizes that do not divide, UnsupportedError for what is not modelled.
    """
    split = job.split
    _check(job)
    check_sizes(split, sizes_of(transformers_config(job.source), job.sequence))
    layers = stages_of(
        split, transformers_config(job.source), sequence=job.sequence, checkpointing=job.workload.checkpointing
    ) if job.layers is None else (len(job.layers),)  # fmt: skip
    parts = pipeline.parts(layers)
    composers: dict[Any, Composer] = {}
    traces: dict[Any, Trace] = {}
    facts = []
    for stage in range(split.pp):
        own = parts[stage :: split.pp]
        order = turns(brief(split, stage), stage)
        traced = traced_order(order)
        chunks = tuple(layers_of(job, part) for part in own)
        key = (*((chunk.kinds, chunk.embeds, chunk.has_head) for chunk in chunks), *traced)
        if key not in composers:
            composers[key] = Composer(_traced(job, chunks, traced, traces), traced)
        facts.append(_facts(composers[key], job, chunks, order))
    told = [_TOLD, _IN_RAM] if split.offload_shards else [_TOLD]
    told += [_BUFFERS, f"stages of {', '.join(map(str, layers))} layers"] if split.pp > 1 else []
    return facts, tuple(told)


def _check(job: ParallelJob) -> None:
    split, workload = job.split, job.workload
    check_experts(split)
    check_context(split)
    if job.compiled and split.ep > 1:
        raise UnsupportedError(
            "--compile was given with --ep.",
            "The choice of experts depends on values, at which a compiled graph ends.",
            "Leave one of them out.",
        )
    if workload.precision not in (None, *_TYPES):
        raise UnsupportedError(
            f"Cannot use --precision {workload.precision} on several GPUs.", f"Known: {', '.join(_TYPES)}."
        )
    if job.source.library != "transformers":
        raise UnsupportedError(
            f"Cannot split {job.source.name} over several GPUs.",
            "brim can split transformers' language models only.",
        )


# -- tracing a stage -----------------------------------------------------------------------------------------


def _traced(
    job: ParallelJob, chunks: Sequence[Layers], order: Sequence[Turn], known: dict[Any, Trace]
) -> Trace:  # fmt: skip
    """The rank's step with these turns: of one deep stage, two layers of shallower traces repeated where that is
    exact; of several chunks each kind once, cached in ``known``."""
    if len(chunks) > 1:
        joined = of_chunks(chunks, order, lambda chunk, own: _traced(job, [chunk], own, known), known)
        return _run(job, chunks, order) if joined is None else joined
    few = chunks[0].shallower()
    if few is not None:
        extended = extend_depth([_run(job, [stage], order) for stage in few[0]], few[1], UNIT)
        if extended is not None:
            return extended[0]
    return _run(job, chunks, order)


def _run(job: ParallelJob, chunks: Sequence[Layers], order: Sequence[Turn]) -> Trace:
    """Trace the rank's step with all of these chunks."""
    program = _Program(job, chunks, order)
    split = job.split
    try:
        with quiet(), sharding.alone(split.shards * split.tp):
            program.mesh = sharding.mesh_of(split.shards, split.tp, "cpu")  # its numbers are not part of the program
            program.context = context_parallel.mesh_of(split.cp, "cpu", split.tp)
            traced = trace(
                program.build, steps=_STEPS, target=job.target, model=job.source.name, capability=job.capability
            )
            return _as_sharded(traced, program.axes())
    except BrimError:
        raise
    except Exception as error:
        raise ModelError(
            f"Cannot trace a stage of {job.source.name} with {split.describe()}.", f"It fails: {short(error)}",
            "Its layers may not split this way.",
        ) from error  # fmt: skip


def _as_sharded(trace: Trace, axes: Mapping[str, str]) -> Trace:
    """Drop storages that are freed after building: real programs build on ``meta`` and allocate their shards only.
    Name collectives by the mesh axis of their group (``axes``)."""
    start = trace.step_starts[0]
    kept = [storage for storage in trace.storages if storage.died is None or storage.died >= start]
    # PyTorch keeps an optimizer's step counters in RAM (torch/optim/adam.py, not fused and not capturable).
    kept = [storage for storage in kept if storage.category is not Category.OPTIMIZER_STATE or storage.bytes != 4]
    ops = (op if OVER not in op.name else replace(op, name=_along(op.name, axes)) for op in trace.ops)
    storages = tuple(replace(storage, id=index) for index, storage in enumerate(kept))
    return replace(trace, storages=storages, ops=tuple(ops))


def _along(name: str, axes: Mapping[str, str]) -> str:
    does, _, group = name.rpartition(OVER)
    return f"{does}{OVER}{axes.get(group, group)}"


class _Program:
    """A rank's program: ``build`` returns its step of ``order``. Nothing names a device: all is traced."""

    mesh: DeviceMesh
    context: DeviceMesh | None = None

    def __init__(self, job: ParallelJob, chunks: Sequence[Layers], order: Sequence[Turn]) -> None:
        self.job, self.chunks, self.order = job, chunks, order

    def axes(self) -> dict[str, str]:
        """The mesh axis of each group, by the group's name: experts are spread over all ranks that share weights."""
        along = {"tp": self.mesh["tp"], "ep": self.mesh["shard"], "cp": self.context}
        return {mesh.get_group().group_name: axis for axis, mesh in along.items() if mesh is not None}

    def build(self) -> Callable[[], None]:
        job, split = self.job, self.job.split
        weights, computes = _TYPES[job.workload.precision or DEFAULT_PRECISION["torch"][0]]
        chunks, tied_weights = [], []
        for layers in self.chunks:
            model, table = self._model(layers, weights)
            model.train()
            # A typical rank: among those that share sequences the first and the last have fewer pieces of attention.
            # The process is rank 0 nevertheless: DTensor caches meshes across traces, as one rank sees them.
            handle = parallelize(
                model, self.mesh, split, dtype=computes, checkpointed=job.workload.checkpointing,
                compiled=job.compiled, context=self.context, context_place=int(split.cp > 2),
            )  # fmt: skip
            chunks.append(TracedChunk(model, handle, job, computes or weights))
            tied_weights += [pipeline.TiedWeight(p) for name, p in model.named_parameters() if name == table]
        trained = [p for chunk in chunks for p in chunk.model.parameters() if p.requires_grad]
        optimizer = make_optimizer(job.workload.optimizer or "adamw", trained)
        sharding.group_by_mesh(optimizer, offload=split.offload_shards)
        return self._step(chunks, tied_weights, optimizer)

    def _model(self, layers: Layers, weights: torch.dtype) -> tuple[pipeline.Stage, str | None]:
        """The stage, cut out of the whole model (deleted layers take nothing), and its name of a weight that another
        stage has too."""
        job = self.job
        precision = "bf16" if weights is torch.bfloat16 else "fp32"
        settings = replace(job.workload, precision=precision, seq=job.sequence)
        model = Job(layers.uncut, settings).module()
        table = pipeline.tied_table(model) if self.job.split.pp > 1 else None
        stage = layers.cut(model)
        return stage, next((name for name, parameter in stage.named_parameters() if parameter is table), None)

    def _step(
        self,
        chunks: Sequence[TracedChunk],
        tied_weights: Sequence[pipeline.TiedWeight],
        optimizer: torch.optim.Optimizer,
    ) -> Callable[[], None]:
        last = set({turn.kind: turn for turn in self.order}.values())
        sent: list[torch.Tensor] = []  # freed at the step's end by torch's runtime of schedules (send_ops)
        keeps = sent if _keeps_sent(self.job.split) else None

        def step() -> None:
            for turn in self.order:
                mark(mark_of(turn))
                chunks[turn.chunk].take(turn, keeps, last=turn in last)
            mark(OPTIMIZER)
            sent.clear()
            for chunk in chunks:
                chunk.finish()
            for tied_weight in tied_weights:
                tied_weight.add()
            with chunks[0].handle.stepping():
                optimizer.step()
            optimizer.zero_grad()

        return step


# -- from a trace to facts -----------------------------------------------------------------------------------


def _facts(composer: Composer, job: ParallelJob, chunks: Sequence[Layers], order: Sequence[Turn]) -> StageFacts:
    split = job.split
    ops = composer.usual_ops()
    per_micro_batch = _sent(ops)
    hidden = _boundary_bytes(job)
    for chunk in chunks if split.pp > 1 else ():
        for phase, does in ((Phase.FORWARD, not chunk.has_head), (Phase.BACKWARD, not chunk.embeds)):
            if does:
                per_micro_batch.append(Sent(kind="send", axis="pp", bytes=hidden, phase=phase))
    kernels = [op for op in (*ops, *composer.optimizer_ops()) if not _is_collective(op) and op.name not in _CROSSINGS]
    told = 1 + max(turn.micro_batch for turn in order)
    sent_bytes = (split.micro_batches - told) * sum(sent.bytes for sent in per_micro_batch if sent.axis == "pp")
    sent_bytes *= _keeps_sent(split)
    trace = composer.composed(order)
    trace = _with_sent(trace, sent_bytes) if sent_bytes else trace
    return StageFacts(
        trace=replace(trace, storages=tuple(storage for storage in trace.storages if not storage.in_ram)),
        ram=tuple(storage for storage in trace.storages if storage.in_ram),
        ops=tuple(op for op in kernels if not op.in_ram),
        in_ram=tuple(op for op in (*kernels, *_once_in_ram(composer, split)) if op.in_ram),
        sent=tuple(per_micro_batch),
        once=_put_off(composer, per_micro_batch, split),
        not_modelled=tuple(name for name in composer.trace.not_modelled if not name.endswith("NCCL's buffers")),
    )


def _once_in_ram(composer: Composer, split: Split) -> list[Op]:
    """The CPU's additions of a later micro-batch's gradients, which the first, traced one does not have."""
    adds = (op for op in composer.end_ops() if op.name not in _CROSSINGS)
    return [replace(op, phase=Phase.OPTIMIZER) for op in adds] if split.micro_batches == 2 else []


def _keeps_sent(split: Split) -> bool:
    """Return whether torch's runtime of schedules runs the turns, not the loop of 1F1B."""
    return split.interleave > 1


def _with_sent(trace: Trace, held_bytes: int) -> Trace:
    """Add the tensors sent by micro-batches that were not traced, which are kept until the step ends."""
    ends = next(op.at for op in reversed(trace.ops) if op.name == OPTIMIZER)
    sent = Storage(
        id=len(trace.storages), bytes=held_bytes, category=Category.TEMPORARY, module="what was sent",
        born=trace.step_starts[-1], died=ends, dtype="uint8",
    )  # fmt: skip
    return replace(trace, storages=(*trace.storages, sent))


def _put_off(composer: Composer, usual: Iterable[Sent], split: Split) -> tuple[Sent, ...]:
    """Communication over data-parallel ranks in the first and last micro-batch that the others do not have."""
    if split.micro_batches == 1:
        return ()
    ends = Counter(_sent(composer.end_ops()))
    for sent in usual:
        ends[sent] -= 2
    return tuple(sent for sent, count in ends.items() for _ in range(count) if sent.axis == "shard")


def _boundary_bytes(job: ParallelJob) -> int:
    split = job.split
    config: Any = transformers_config(job.source)
    weights, computes = _TYPES[job.workload.precision or DEFAULT_PRECISION["torch"][0]]
    width = (computes or weights).itemsize
    return split.micro_batch * split.between(job.sequence) * int(config.hidden_size) * width


def _is_collective(op: Op) -> bool:
    return op.name.startswith(("c10d.", "_c10d_functional."))


def _sent(ops: Iterable[Op]) -> list[Sent]:
    """FSDP2's collectives are ``c10d``'s, over data-parallel ranks; DTensor's, experts' and attention's are
    ``_c10d_functional``'s, over the group in the operation's name. Shards copied from and to RAM count too."""
    sent = []
    for op in ops:
        if op.name in _CROSSINGS:
            sent.append(Sent(kind=_CROSSINGS[op.name], axis="shard", bytes=op.written_bytes, phase=op.phase))
            continue
        collective = _COLLECTIVES.get(base_name(op.name)) if _is_collective(op) else None
        if collective is None:
            continue
        kind, reads_whole = collective
        axis = "shard" if op.name.startswith("c10d.") else op.name.rpartition(OVER)[2]
        size = op.read_bytes if reads_whole else op.written_bytes
        sent.append(Sent(kind=kind, axis=axis, bytes=size, phase=op.phase))
    return sent


class TracedChunk:
    """A stage's received tensors, kept for its backward passes, and these passes. ``dtype``: of hidden states."""

    def __init__(self, model: pipeline.Stage, handle: sharding.Sharded, job: ParallelJob, dtype: torch.dtype) -> None:
        part = model.part
        self.model, self.handle, self._part = model, handle, part
        many = job.split.micro_batches  # pipelining allocates receive buffers for all of them (stage.py, _RecvInfo)
        self._tokens = torch.zeros(job.split.micro_batch, job.sequence, dtype=torch.long)
        self._received = None if part.embeds else torch.zeros(many, *_hidden(job), dtype=dtype)
        self._returned = None if part.has_head else torch.zeros(many, *_hidden(job), dtype=dtype)
        self._flying: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The tensors last sent forward and backward: 1F1B's loop holds them until the next send (schedules.py,
        # fwd_sends and bwd_sends).
        self.last_sent: dict[str, torch.Tensor] = {}

    def take(self, turn: Turn, sent: list[torch.Tensor] | None, *, last: bool) -> None:
        """Take a turn. ``sent`` collects the sent tensors if these are kept. ``last``: the last turn of its kind."""
        if turn.forward:
            self._forward(turn.micro_batch, sent)
        else:
            self._backward(turn.micro_batch, sent, last=last)

    def finish(self) -> None:
        """End a step, after its last turn."""
        self.last_sent.clear()
        self.handle.settle()

    def _forward(self, number: int, sent: list[torch.Tensor] | None) -> None:
        received = self._received
        input = self._tokens if received is None else received[number].detach().requires_grad_()
        with self.handle.losses():
            output = self.model(input, self._tokens.clone() if self._part.has_head else None)
        self._flying[number] = (input, output)
        if not self._part.has_head:
            self.last_sent["forward"] = output.detach()
            if sent is not None:
                sent.append(output.detach())

    def _backward(self, number: int, sent: list[torch.Tensor] | None, *, last: bool) -> None:
        input, output = self._flying.pop(number)
        self.handle.set_last_backward(last=last)
        with self.handle.losses():
            output.backward(None if self._returned is None else self._returned[number])
        self._send(input, sent)

    def _send(self, given: torch.Tensor, sent: list[torch.Tensor] | None) -> None:
        if given.grad is not None:
            self.last_sent["backward"] = given.grad
            if sent is not None:
                sent.append(given.grad)


def _hidden(job: ParallelJob) -> tuple[int, int, int]:
    split = job.split
    config: Any = transformers_config(job.source)
    return split.micro_batch, split.between(job.sequence), int(config.hidden_size)
