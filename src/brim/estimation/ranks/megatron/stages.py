"""The pipeline ranks of a training job under Megatron-LM with Transformer Engine."""

from __future__ import annotations

from brim.core import Phase
from brim.errors import UnsupportedError, UsageError
from brim.estimation.ranks.job import ParallelJob, StageFacts
from brim.estimation.ranks.megatron.step import StageTrace, stage_trace
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.sizes import Shape, shape_of
from brim.estimation.ranks.split import Split, check_sizes

# The least seconds in which the host launches a layer's forward and backward pass for a micro-batch: together 3.6 to
# 6.5 ms, whatever the split, in Megatron-LM's golden values of models of 12 layers of 512 on H100 (d98e8a64,
# tests/functional_tests/test_cases/gpt, iteration-time of 26 cases). A backward pass launches about twice as much.
LAUNCHES_S = (1.2e-3, 2.4e-3)


def stages(job: ParallelJob, only: int | None = None) -> tuple[list[StageFacts], tuple[str, ...]]:
    """Every pipeline rank's step (``only``: of one rank), and the assumptions. Raises UnsupportedError for settings
    that the engine lacks."""
    split, workload = job.split, job.workload
    _check(job)
    shape = shape_of(job.source)
    if shape.latent and (split.tp > 1 or split.cp > 1):
        raise UnsupportedError(
            f"Cannot split {shape.name} by --tp {split.tp} --cp {split.cp}.",
            "Latent attention is modelled on whole layers.", "Use --ep, --pp and --dp.",
        )  # fmt: skip
    if shape.experts and split.tp > 1 and not split.sequence_parallel:
        raise UsageError(
            f"Cannot split the experts of {shape.name} by --tp {split.tp} without --sp.",
            "Megatron-LM trains experts under tensor parallelism with sequence parallelism only.", "Give --sp.",
        )  # fmt: skip
    check_sizes(split, shape.sizes(job.sequence), even_stages=True)
    ranks = (
        stage_trace(
            shape, split, stage, sequence=job.sequence, recompute=workload.checkpointing or "none",
            capability=job.capability, options=job.megatron,
        )
        for stage in (range(split.pp) if only is None else (only,))
    )  # fmt: skip
    return [_facts(rank, split) for rank in ranks], tuple(_notes(job, shape))


def _notes(job: ParallelJob, shape: Shape) -> list[str]:
    options = job.megatron
    loss = {
        "unfused": "unfused cross entropy",
        "native": "cross entropy fused natively",
        "te": "Transformer Engine's cross entropy, which Megatron-LM refuses by default since June 2026",
    }[options.loss]
    layers = "Transformer Engine" if options.transformer_impl == "transformer_engine" else "its own layers"
    gradients = "fused" if options.gradient_accumulation_fusion else "no"
    notes = [
        f"engine: Megatron-LM with {layers}, {loss}, {gradients} gradient accumulation, bfloat16 weights and float32 "
        "gradients, written down from its code",
    ]
    if options.create_attention_mask_in_dataloader:
        notes.append("the loader makes an attention mask; --no-create-attention-mask-in-dataloader leaves it out")
    if shape.experts:
        notes.append("experts: as many tokens at each; a router out of balance takes more")
    return notes


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
    if split.zero > 1:
        raise UnsupportedError(
            f"Megatron-LM does not support --zero {split.zero}.",
            "Its distributed optimizer splits optimizer states only.",
            "Use --zero 0 or 1, or --engine torch.",
        )


def _facts(stage: StageTrace, split: Split) -> StageFacts:
    """Add a step's reduction of float32 gradients over data and context ranks, and gathering of split weights."""
    kind = "reduce_scatter" if split.zero else "all_reduce"
    once = [Sent(kind=kind, axis="shard", bytes=4 * stage.parameters, phase=Phase.OPTIMIZER)]
    if split.zero:
        once.append(Sent(kind="all_gather", axis="shard", bytes=2 * stage.parameters, phase=Phase.OPTIMIZER))
    if stage.expert_parameters and split.shards > split.ep:
        once.append(Sent(kind=kind, axis="shard", bytes=4 * stage.expert_parameters, phase=Phase.OPTIMIZER))
    forward_s, backward_s = LAUNCHES_S
    return StageFacts(
        trace=stage.trace, ops=stage.ops, sent=stage.sent, once=tuple(once),
        launches_s=(forward_s * stage.layers, backward_s * stage.layers),
    )  # fmt: skip
