"""The options by which several commands split a job over GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from brim.errors import UsageError

if TYPE_CHECKING:
    from brim.estimation.ranks.split import Split

_FIELDS = (
    "gpus", "gpus_per_node", "tp", "pp", "dp", "cp", "ep", "zero", "sp", "offload_shards", "interleave",
    "zero_bubble", "stage_layers", "micro_batch", "global_batch",
)  # fmt: skip


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


# Options of Megatron-LM's own command line, by its names: the fields of MegatronOptions.
_MEGATRON = {
    "cross_entropy_loss_fusion": click.option(
        "--cross-entropy-loss-fusion", is_flag=True, default=None,
        help="Megatron-LM's, as the options below: fuse the loss. [default: unfused]",
    ),
    "cross_entropy_fusion_impl": click.option(
        "--cross-entropy-fusion-impl", help="The fused loss: native or te. [default: native]"
    ),
    "gradient_accumulation_fusion": click.option(
        "--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", flag_value=False, type=bool,
        default=None, help="Weight gradients are tensors of their own first. [default: fused]",
    ),
    "create_attention_mask_in_dataloader": click.option(
        "--no-create-attention-mask-in-dataloader", "create_attention_mask_in_dataloader", flag_value=False,
        type=bool, default=None, help="Batches bring no attention mask. [default: they do]",
    ),
    "attention_backend": click.option(
        "--attention-backend", help="Attention: auto, flash, fused or unfused. [default: auto]"
    ),
    "transformer_impl": click.option(
        "--transformer-impl", help="Layers: transformer_engine or local. [default: transformer_engine]"
    ),
    "deterministic_mode": click.option(
        "--deterministic-mode", is_flag=True, default=None, help="Deterministic kernels only."
    ),
    "num_distributed_optimizer_instances": click.option(
        "--num-distributed-optimizer-instances", type=click.IntRange(min=1),
        help="Groups of ranks that each split all optimizer states. [default: 1]",
    ),
    "cublas_workspace_config": click.option(
        "--cublas-workspace-config", help="The value of CUBLAS_WORKSPACE_CONFIG, as in :4096:8."
    ),
}  # fmt: skip
_MEGATRON_OFF = {
    name: f"--no-{name.replace('_', '-')}"
    for name in ("gradient_accumulation_fusion", "create_attention_mask_in_dataloader")
}

_OPTIONS = [
    click.option("--gpus", type=click.INT, help="Split over so many GPUs, and tell what every rank takes."),
    click.option("--gpus-per-node", type=click.INT, help="GPUs of one machine. [default: 8]"),
    click.option("--tp", type=click.INT, help="Tensor parallelism: ranks that share every layer. [default: 1]"),
    click.option("--pp", type=click.INT, help="Pipeline stages. [default: 1]"),
    click.option("--dp", type=click.INT, help="Data parallelism. [default: what is left over]"),
    click.option("--cp", type=click.INT, help="Context parallelism: ranks that share a sequence. [default: 1]"),
    click.option("--ep", type=click.INT, help="Ranks that share a layer's experts. [default: 1]"),
    click.option(
        "--zero", type=click.INT, help="What data-parallel ranks share: 0 nothing, 1 optimizer states, 2 gradients "
        "too, 3 weights too. [default: 0]",
    ),
    click.option(
        "--offload-shards", is_flag=True, default=None, help="Keep what --zero splits in RAM: weights, their "
        "gradients, optimizer states.",
    ),
    click.option("--sp", is_flag=True, default=None, help="Sequence parallelism between tensor-parallel parts."),
    click.option("--interleave", type=click.INT, help="Model chunks of a pipeline rank. [default: 1]"),
    click.option(
        "--zero-bubble", is_flag=True, default=None,
        help="Pipeline stages work out the gradients of their weights where they would wait.",
    ),
    click.option(
        "--stage-layers", help="Layers of each pipeline stage, as in 9,9,8,6. [default: balanced by their work; "
        "with --engine megatron even]",
    ),
    click.option("--micro-batch", type=click.INT, help="Sequences of one micro-batch. [default: 1]"),
    click.option(
        "--global-batch", type=click.INT,
        help="Sequences of a step on all GPUs. [default: a micro-batch for each data-parallel rank and stage]",
    ),
    click.option(
        "--engine", help="torch (FSDP2, DTensor, pipelining) or megatron (with Transformer Engine). "
        "[default: torch]",
    ),
    *_MEGATRON.values(),
]  # fmt: skip


def split_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--gpus`` and all that goes with it, each given to the command as None where it was not."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split_of(settings: dict[str, Any]) -> tuple[Split, str] | None:
    """Take these options out of ``settings``: the split and the engine, or None where one GPU is meant. Options of
    Megatron-LM become its entry ``megatron``.

    Raises UsageError where they are given without ``--gpus``, or Megatron-LM's for another engine.
    """
    options = {name: settings.pop(name) for name in _FIELDS}
    engine = settings.pop("engine")
    megatron = {name: value for name in _MEGATRON if (value := settings.pop(name)) is not None}
    names = [name for name, value in options.items() if value is not None]
    if megatron and engine != "megatron":
        raise UsageError(
            f"Cannot use {_flags(megatron)} without --engine megatron.", "Other engines have no such options.",
            "Give --engine megatron.",
        )  # fmt: skip
    if options["gpus"] is None:
        if engine is not None:
            names.append("engine")
        if names:
            flags = _flags(names)
            raise UsageError(f"Cannot use {flags} without --gpus.", "It splits a job over GPUs.", "Give --gpus.")
        return None
    if settings.pop("batch", 1) != 1:
        raise UsageError("Cannot use --batch with --gpus.", todo="Give --micro-batch and --global-batch.")
    from brim.estimation.ranks.split import Split

    values = {name: options[name] for name in names}
    if "sp" in values:
        values["sequence_parallel"] = values.pop("sp")
    if "stage_layers" in values:
        values["stage_layers"] = _numbers(values["stage_layers"])
    if values.get("offload_shards") and options["gpus"] == 1:
        raise UsageError(
            "Cannot use --offload-shards with one GPU.", "There are no shards on one GPU.",
            "Give more --gpus; brim plan finds what one GPU can do with its host's RAM.",
        )  # fmt: skip
    if megatron:
        from brim.estimation.ranks.job import MegatronOptions

        settings["megatron"] = MegatronOptions(**megatron)
    return Split(**values), engine or "torch"


def _flags(names: Iterable[str]) -> str:
    return " and ".join(_MEGATRON_OFF.get(name, f"--{name.replace('_', '-')}") for name in names)


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--stage-layers {text} was given.", "It must be numbers of layers, as in 9,9,8,6.")
    return tuple(map(int, words))
