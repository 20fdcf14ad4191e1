"""The pipeline ranks of a training job under Megatron-LM with Transformer Engine."""

from __future__ import annotations

from brim.core import Phase
from brim.errors import UnsupportedError
from brim.estimation.ranks.job import ParallelJob, StageFacts
from brim.estimation.ranks.megatron.step import StageTrace, stage_trace
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.sizes import shape_of
from brim.estimation.ranks.split import Split, check_sizes

_TOLD = (
    "engine: Megatron-LM with Transformer Engine (flash attention, fused cross entropy), bfloat16 weights and "
    "float32 gradients, written down from its code",
)


def stages(job: ParallelJob, only: int | None = None) -> tuple[list[StageFacts], tuple[str, ...]]:
    """Every pipeline rank's step (``only``: of one of them), and what was assumed. Raises UnsupportedError for what
    the engine does not do."""
    split, workload = job.split, job.workload
    _check(job)
    shape = shape_of(job.source)
    if (shape.experts or shape.latent) and (split.tp > 1 or split.cp > 1):
        raise UnsupportedError(
            f"Cannot split {shape.name} by --tp {split.tp} --cp {split.cp}.",
            "Experts and latent attention are modelled on whole layers.", "Use --ep, --pp and --dp.",
        )  # fmt: skip
    check_sizes(split, shape.sizes(job.sequence), even_stages=True)
    ranks = (
        stage_trace(
            shape, split, stage, sequence=job.sequence, recompute=workload.checkpointing or "none",
            capability=job.capability, fused_loss=job.fused_loss,
        )
        for stage in (range(split.pp) if only is None else (only,))
    )  # fmt: skip
    return [_facts(rank, split) for rank in ranks], _TOLD


def _check(job: ParallelJob) -> None:
    split, workload = job.split, job.workload
    if workload.precision not in (None, "bf16") or workload.optimizer not in (None, "adamw", "adam"):
        raise UnsupportedError(
            f"Cannot model Megatron-LM in {workload.precision or 'bf16'} with {workload.optimizer or 'adamw'}.",
            "Only bfloat16 weights under Adam are modelled.",
            "Use --precision bf16 --optimizer adamw, or --engine torch.",
        )
    if job.compiled or workload.checkpointing == "alternate":
        option = "--compile" if job.compiled else "--checkpointing alternate"
        raise UnsupportedError(
            f"Megatron-LM does not support {option}.", "Its kernels are Transformer Engine's.", "Use --engine torch."
        )
    if split.offload_shards:
        raise UnsupportedError(
            "Megatron-LM does not support --offload-shards.", "Only FSDP2 keeps shards in RAM.", "Use --engine torch."
        )
    if split.zero_bubble:
        raise UnsupportedError(
            "Megatron-LM does not support --zero-bubble.", "Its pipelines are 1F1B and interleaved 1F1B.",
            "Use --engine torch.",
        )  # fmt: skip
    if split.zero > 1:
        raise UnsupportedError(
            f"Megatron-LM does not support --zero {split.zero}.",
            "Its distributed optimizer splits optimizer states only.",
            "Use --zero 0 or 1, or --engine torch.",
        )


def _facts(made: StageTrace, split: Split) -> StageFacts:
    """Float32 gradients are reduced over data and context ranks once a step; split ones' weights gathered again."""
    kind = "reduce_scatter" if split.zero else "all_reduce"
    once = [Sent(kind=kind, axis="shard", bytes=4 * made.parameters, phase=Phase.OPTIMIZER)]
    if split.zero:
        once.append(Sent(kind="all_gather", axis="shard", bytes=2 * made.parameters, phase=Phase.OPTIMIZER))
    if made.expert_parameters and split.shards > split.ep:
        once.append(Sent(kind=kind, axis="shard", bytes=4 * made.expert_parameters, phase=Phase.OPTIMIZER))
    return StageFacts(trace=made.trace, ops=made.ops, sent=made.sent, once=tuple(once))
