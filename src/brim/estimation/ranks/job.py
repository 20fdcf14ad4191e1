"""The engines' input and output: a training job, and the step of one of its pipeline ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from brim.core import Op, Storage, Trace
from brim.core.hardware import VRAM
from brim.core.options import option
from brim.errors import UsageError
from brim.estimation.models import Source
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.split import Split
from brim.estimation.workload import Workload, training_precision
from brim.units import KIB

DEFAULT_PRECISION = {  # by engine, with its origin
    "torch": training_precision(None, "full", VRAM),
    "megatron": ("bf16", "by default: Megatron-LM's --bf16"),
}
_CHOICES = {
    "cross_entropy_fusion_impl": ("native", "te"),
    "attention_backend": ("auto", "flash", "fused", "unfused"),
    "transformer_impl": ("transformer_engine", "local"),
}


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Options of Megatron-LM's own command line that change a step's memory or time, by their names and defaults
    there.

    ``cross_entropy_fusion_impl``: ``native`` compiles Megatron-LM's loss; ``te`` is Transformer Engine's kernel,
    which Megatron-LM refuses by default since June 2026. ``gradient_accumulation_fusion``: a product adds its weight
    gradient to the float32 buffer by itself. ``create_attention_mask_in_dataloader``: each micro-batch brings a dense
    mask of one byte for each pair of tokens.

    Raises UsageError for a value that Megatron-LM or PyTorch does not know.
    """

    cross_entropy_loss_fusion: bool = option(
        False, "Fuse the loss. This and the options below are Megatron-LM's. [default: unfused]"
    )
    cross_entropy_fusion_impl: str = option("native", "The fused loss: native or te. [default: native]")
    gradient_accumulation_fusion: bool = option(
        True,
        flags=("--no-gradient-accumulation-fusion",),
        help="First compute each weight gradient as a separate tensor. [default: fused]",
    )
    create_attention_mask_in_dataloader: bool = option(
        True,
        flags=("--no-create-attention-mask-in-dataloader",),
        help="Batches have no attention mask. [default: they have one]",
    )
    attention_backend: str = option("auto", "Attention: auto, flash, fused or unfused. [default: auto]")
    transformer_impl: str = option(
        "transformer_engine", "Layers: transformer_engine or local. [default: transformer_engine]"
    )
    deterministic_mode: bool = option(False, "Deterministic kernels only.")
    num_distributed_optimizer_instances: int = option(
        1, min=1, help="Groups of ranks; each group splits all optimizer states. [default: 1]"
    )
    cublas_workspace_config: str = option("", "The value of CUBLAS_WORKSPACE_CONFIG, for example :4096:8.")

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"Unknown {option} {getattr(self, name)}.", f"Known: {', '.join(known)}.")
        if not re.fullmatch(r"(:\d{1,9}:\d{1,9})*", self.cublas_workspace_config):
            raise UsageError(
                f"Cannot use --cublas-workspace-config {self.cublas_workspace_config}.",
                "It must be pairs of KiB and a count, as in :4096:8.",
            )

    @property
    def loss(self) -> str:
        """``unfused``, ``native`` or ``te``."""
        return self.cross_entropy_fusion_impl if self.cross_entropy_loss_fusion else "unfused"

    def cublas_workspace_bytes(self, default_bytes: int) -> int:
        """Sum the pairs of KiB and counts, as PyTorch does (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
        numbers = [int(number) for number in self.cublas_workspace_config.split(":")[1:]]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return sum(size * count for size, count in pairs) * KIB if numbers else default_bytes


@dataclass(frozen=True, kw_only=True)
class ParallelJob:
    """A model to train, its workload and its split. ``capability`` is the GPU's. ``megatron``: options of that engine
    only. ``target``: ``cuda``, or ``cpu`` for ranks without a GPU. ``compiled``: each block by torch.compile.
    ``layers``: the indices of the layers in this part; None: all."""

    source: Source
    workload: Workload
    split: Split
    sequence: int
    capability: tuple[int, int]
    megatron: MegatronOptions = MegatronOptions()
    target: str = "cuda"
    compiled: bool = False
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """A pipeline rank's step: its memory, kernels and communication.

    ``ops`` and ``sent`` are those of one micro-batch, and the optimizer's kernels; ``once`` is sent once a step.
    Where shards are in RAM, ``ram`` has their storages, and ``in_ram`` the CPU's operations. ``launches_s``: the
    host's least seconds to launch a micro-batch's forward and backward pass.
    """

    trace: Trace
    ops: tuple[Op, ...]
    sent: tuple[Sent, ...]
    once: tuple[Sent, ...]
    not_modelled: tuple[str, ...] = ()
    ram: tuple[Storage, ...] = ()
    in_ram: tuple[Op, ...] = ()
    launches_s: tuple[float, float] = (0.0, 0.0)
