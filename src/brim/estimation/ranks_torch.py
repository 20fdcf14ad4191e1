"""The pipeline ranks of a training job under PyTorch's own engine, traced as they would run.

``techniques.pipeline`` cuts the stage, ``techniques.sharding`` splits it by FSDP2 and DTensor, and one process
takes the place of one rank in PyTorch's fake process group. Three micro-batches are traced; a pipeline's step is
put together from them in its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from brim.core import Category, Op, Phase, Storage, Trace
from brim.errors import BrimError, ModelError, UnsupportedError
from brim.estimation.models import short, transformers_config
from brim.estimation.optimizers import make_optimizer
from brim.estimation.parallel import Sizes, Split, check_sizes, stage_layers
from brim.estimation.parallel_compose import BACKWARD, FORWARD, OPTIMIZER, TRACED, Composer
from brim.estimation.parallel_depth import UNIT, deepened_in_pairs
from brim.estimation.parallel_job import ParallelJob, StageFacts
from brim.estimation.parallel_schedule import brief, turns
from brim.estimation.parallel_script import Sent
from brim.estimation.quiet import quiet
from brim.estimation.steps import Job
from brim.predict.cost import base_name
from brim.predict.dispatch import mark
from brim.predict.tracer import trace
from brim.techniques import checkpointing, pipeline, sharding

_STEPS = 2  # the first makes the optimizer's state
_FEWEST = 8  # layers of a stage from which on three shallower ones are traced and two layers repeated
_TYPES = {
    "bf16": (torch.bfloat16, None),
    "fp32": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}
# Collectives as traces name them -> kind, and whether the whole is what is read.
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", False),
    "_reduce_scatter_base_": ("reduce_scatter", True),
    "allreduce_": ("all_reduce", True),
    "all_gather_into_tensor": ("all_gather", False),
    "reduce_scatter_tensor": ("reduce_scatter", True),
    "all_reduce": ("all_reduce", True),
    "all_to_all_single": ("all_to_all", True),
}
_BUFFERS = (
    "pipelining: every stage has room for what it receives of all micro-batches at once, as "
    "torch.distributed.pipelining makes it (stage.py, _RecvInfo)"
)
_TOLD = "engine: PyTorch's FSDP2, DTensor and pipelining, traced on one rank of a fake process group"


def stages(job: ParallelJob) -> tuple[list[StageFacts], tuple[str, ...]]:
    """Every pipeline rank's step, and what was assumed.

    Raises UsageError for sizes that do not divide, UnsupportedError for what is not modelled.
    """
    split = job.split
    _check(job)
    sizes = _sizes(job)
    check_sizes(split, sizes)
    parts = pipeline.parts(stage_layers(sizes.layers, split.pp))
    composers: dict[tuple[int, bool, bool], Composer] = {}
    found = []
    for stage, part in enumerate(parts):
        key = (part.layers, part.embeds, part.has_head)
        if key not in composers:
            composers[key] = Composer(_traced(job, part))
        found.append(_facts(composers[key], job, stage))
    return found, (_TOLD, *((_BUFFERS,) if split.pp > 1 else ()))


def _check(job: ParallelJob) -> None:
    split, workload = job.split, job.workload
    for name, value in (("--cp", split.cp), ("--ep", split.ep), ("--interleave", split.interleave)):
        if value > 1:
            raise UnsupportedError(
                f"{name} {value} was asked of PyTorch's engine.", "It is not modelled there.",
                "Use --engine megatron, or leave it out.",
            )  # fmt: skip
    if workload.precision not in (None, *_TYPES):
        raise UnsupportedError(
            f"--precision {workload.precision} was asked for on several GPUs.", f"Known are {', '.join(_TYPES)}."
        )
    if job.source.library != "transformers":
        raise UnsupportedError(
            f"{job.source.name} was to be split over several GPUs.",
            "That is known of transformers' language models only.",
        )


def _sizes(job: ParallelJob) -> Sizes:
    config: Any = transformers_config(job.source)
    if any(not isinstance(getattr(config, name, None), int) for name in ("num_hidden_layers", "hidden_size")):
        raise UnsupportedError(
            f"{job.source.name} was to be split over several GPUs.",
            "Its configuration has no number of layers and hidden size: it is no language model.",
        )
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    ffn = next((v for n in ("intermediate_size", "n_inner", "ffn_dim") if (v := getattr(config, n, None))), None)
    return Sizes(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        hidden=int(config.hidden_size),
        ffn=int(ffn or 4 * config.hidden_size),
        sequence=job.sequence,
    )


# -- tracing a stage -----------------------------------------------------------------------------------------


def _traced(job: ParallelJob, part: pipeline.Part) -> Trace:
    """The stage's step with three micro-batches; of a deep one, two layers of shallower ones repeated where that is
    exact."""
    if part.layers >= _FEWEST:
        least = UNIT + part.layers % UNIT
        few = [_of_layers(job, part, least + more * UNIT) for more in range(3)]
        found = deepened_in_pairs(few, part.layers - least)
        if found is not None:
            return found
    return _of_layers(job, part, part.layers)


def _of_layers(job: ParallelJob, part: pipeline.Part, layers: int) -> Trace:
    """The same kind of stage with so many layers, of a model with one layer before and one behind it where it has
    some there."""
    before, behind = (0 if part.embeds else 1), (0 if part.has_head else 1)
    program = _Program(job, pipeline.Part(first=before, layers=layers, of=before + layers + behind))
    split = job.split
    try:
        with quiet(), sharding.alone(split.shards * split.tp):
            program.mesh = sharding.mesh_of(split.shards, split.tp, "cpu")  # its numbers are no part of the program
            made = trace(
                program.build, steps=_STEPS, target=job.target, model=job.source.name, capability=job.capability
            )
            return _as_sharded(made)
    except BrimError:
        raise
    except Exception as error:
        raise ModelError(
            f"A stage of {job.source.name} was to be traced with {split.describe()}.", f"It fails: {short(error)}",
            "Its layers may not split this way.",
        ) from error  # fmt: skip


def _as_sharded(made: Trace) -> Trace:
    """Without what building lets go: real programs build on ``meta`` and make their shards only."""
    start = made.step_starts[0]
    kept = [storage for storage in made.storages if storage.died is None or storage.died >= start]
    kept = [storage for storage in kept if not _counts_steps(storage)]
    return replace(made, storages=tuple(replace(storage, id=index) for index, storage in enumerate(kept)))


def _counts_steps(storage: Storage) -> bool:
    """PyTorch keeps an optimizer's step counters in RAM (torch/optim/adam.py, not fused and not capturable)."""
    return storage.category is Category.OPTIMIZER_STATE and storage.bytes == 4


class _Program:
    """One rank's program: ``build`` gives its step of three micro-batches. Nothing names a device: all is traced."""

    mesh: DeviceMesh

    def __init__(self, job: ParallelJob, part: pipeline.Part) -> None:
        self.job, self.part = job, part

    def build(self) -> Callable[[], None]:
        job, split = self.job, self.job.split
        weights, computes = _TYPES[job.workload.precision or _precision(job)]
        model = self._model(weights)
        model.train()
        if (job.workload.checkpointing or "none") != "none":
            names = checkpointing.blocks(model)
            checkpointing.apply(model, dict.fromkeys(names, str(job.workload.checkpointing)))
        handle = sharding.apply(
            model, self.mesh,
            sharding.Sharding(zero=split.zero, sequence_parallel=split.sequence_parallel, dtype=computes),
        )  # fmt: skip
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(job.workload.optimizer or "adamw", trained)
        sharding.group_by_kind(optimizer)
        return self._step(model, handle, optimizer, computes or weights)

    def _model(self, weights: torch.dtype) -> nn.Module:
        """The whole model, and of it the stage: layers that are left out take nothing once they are gone."""
        job = self.job
        config = {**job.source.config, _layers_field(job): self.part.of}
        source = replace(job.source, config=config)
        precision = "bf16" if weights is torch.bfloat16 else "fp32"
        settings = replace(job.workload, precision=precision, seq=job.sequence)
        return pipeline.cut(Job(source, settings).module(), self.part)

    def _step(self, model: nn.Module, handle: Any, optimizer: Any, dtype: torch.dtype) -> Callable[[], None]:
        split, part = self.job.split, self.part
        batch, sequence = split.micro_batch, self.job.sequence
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        shape = self._hidden()
        many = split.micro_batches  # torch.distributed.pipelining makes room for all of them (stage.py, _RecvInfo)
        received = None if part.embeds else torch.zeros(many, *shape, dtype=dtype)
        returned = None if part.has_head else torch.zeros(many, *shape, dtype=dtype)
        traced = min(TRACED, many)

        def micro_batch(index: int) -> None:
            mark(FORWARD)
            given = tokens if received is None else received[index].detach().requires_grad_()
            output = model(given, tokens.clone() if part.has_head else None)
            mark(BACKWARD)
            if returned is None:
                output.backward()
            else:
                output.backward(returned[index])

        def step() -> None:
            for index in range(traced):
                with handle.micro_batch(last=index == traced - 1):
                    micro_batch(index)
            mark(OPTIMIZER)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _hidden(self) -> tuple[int, int, int]:
        split = self.job.split
        config: Any = transformers_config(self.job.source)
        tokens = self.job.sequence // (split.tp if split.sequence_parallel else 1)
        return split.micro_batch, tokens, int(config.hidden_size)


def _precision(job: ParallelJob) -> str:
    """The configuration's; where it has none, what large models are trained in."""
    dtype = str(getattr(transformers_config(job.source), "dtype", None)).removeprefix("torch.")
    return "bf16" if dtype in ("bfloat16", "float16") else "bf16-mixed"


def _layers_field(job: ParallelJob) -> str:
    config: Any = transformers_config(job.source)
    return str(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))


# -- from a trace to facts -----------------------------------------------------------------------------------


def _facts(composer: Composer, job: ParallelJob, stage: int) -> StageFacts:
    split = job.split
    order = turns(brief(split, stage), stage)
    whole = composer.composed(order)
    ops = composer.ops_of(
        max(composer.traced - 2, 0)
    )  # like most: neither the first nor the last, where there is one
    kernels = [op for op in ops if not _is_collective(op)]
    per_micro_batch = _sent(ops, split)
    hidden = _boundary_bytes(job)
    if split.pp > 1:
        sends = (stage + 1 < split.pp, stage > 0)
        for phase, does in zip((Phase.FORWARD, Phase.BACKWARD), sends, strict=True):
            if does:
                per_micro_batch.append(Sent(kind="send", axis="pp", bytes=hidden, phase=phase))
    return StageFacts(
        trace=whole,
        ops=(*kernels, *(op for op in composer.optimizer_ops() if not _is_collective(op))),
        sent=tuple(per_micro_batch),
        once=_put_off(composer, per_micro_batch, split),
        not_modelled=tuple(name for name in composer.trace.not_modelled if not name.endswith("NCCL's buffers")),
    )


def _put_off(composer: Composer, usual: Iterable[Sent], split: Split) -> tuple[Sent, ...]:
    """What the first and the last micro-batch send over data-parallel ranks beyond what all do."""
    if composer.traced < TRACED:
        return ()
    ends = Counter(sent for index in (0, TRACED - 1) for sent in _sent(composer.ops_of(index), split))
    for sent in usual:
        ends[sent] -= 2
    return tuple(sent for sent, count in ends.items() for _ in range(count) if sent.axis == "shard")


def _boundary_bytes(job: ParallelJob) -> int:
    split = job.split
    config: Any = transformers_config(job.source)
    weights, computes = _TYPES[job.workload.precision or _precision(job)]
    width = (computes or weights).itemsize
    tokens = job.sequence // (split.tp if split.sequence_parallel else 1)
    return split.micro_batch * tokens * int(config.hidden_size) * width


def _is_collective(op: Op) -> bool:
    return op.name.startswith(("c10d.", "_c10d_functional."))


def _sent(ops: Iterable[Op], split: Split) -> list[Sent]:
    """FSDP2 sends by ``c10d``, over data-parallel ranks; DTensor by ``_c10d_functional``, over tensor-parallel
    ones."""
    found = []
    for op in ops:
        known = _COLLECTIVES.get(base_name(op.name)) if _is_collective(op) else None
        if known is None:
            continue
        kind, reads_whole = known
        axis = "shard" if op.name.startswith("c10d.") else "tp"
        size = op.read_bytes if reads_whole else op.written_bytes
        found.append(Sent(kind=kind, axis=axis, bytes=size, phase=op.phase))
    return found
