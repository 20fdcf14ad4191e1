"""A training over several ranks: its options and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.core.options import STORED, build
from brim.errors import UnsupportedError, UsageError
from brim.estimation.ranks.split import Split, nearest
from brim.requests.train import RankOptions, Request

_PRECISIONS = ("fp32", "bf16-mixed", "bf16", STORED)
_OPTIMIZERS = ("adamw", "adam", "sgd")
# Fields of Request that several ranks do not support -> options of the command line.
_ALONE = {
    "vram": "--vram", "ram": "--ram", "disk": "--disk", "disk_folder": "--disk",
    "offload_activations": "--offload-activations", "stream_weights": "--stream-weights",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SplitRequest(RankOptions):
    """A training over all ranks that torchrun has started."""

    training: Request
    stage_layers: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise UsageError for options that contradict each other, UnsupportedError for those that ranks do not
        support."""
        training = self.training
        training.check()
        for field, option in _ALONE.items():
            if getattr(training, field) is not None:
                raise UnsupportedError(
                    f"Cannot use {option} on several ranks.", "It works on one rank only, so far.",
                    "Leave it out: ZeRO, tensor and pipeline parallelism and --checkpointing save memory here.",
                )  # fmt: skip
        over = next((name for name in ("tp", "pp", "ep", "cp") if getattr(self, name) > 1), None)
        if training.method != "full" and over:
            raise UnsupportedError(
                f"Cannot use --method {training.method} with --{over}.",
                "Adapters can be split over data-parallel ranks only.", "Use --zero.",
            )  # fmt: skip
        if training.optimizer not in _OPTIMIZERS:
            raise UnsupportedError(
                f"Cannot use --optimizer {training.optimizer} on several ranks.",
                f"Optimizers that can be split: {', '.join(_OPTIMIZERS)}.",
            )
        if training.precision not in (None, *_PRECISIONS):
            raise UnsupportedError(
                f"Cannot use --precision {training.precision} on several ranks.",
                f"Allowed are {', '.join(_PRECISIONS)}.",
            )
        if training.offload_optimizer not in (None, "keep"):
            raise UnsupportedError(
                "Cannot use --offload-optimizer on several ranks.",
                "Shards of the optimizer stay with the weights.", "Use --offload-shards to keep both in RAM.",
            )  # fmt: skip

    def split(self, ranks: int, per_node: int) -> Split:
        """The mesh. Raises UsageError, naming the nearest possible mesh, if it does not fit ``ranks``."""
        if self.offload_shards and ranks == 1:
            raise UsageError(
                "Cannot use --offload-shards on one rank.", "There are no shards on one rank.",
                "Start several ranks, or train without torchrun and limit memory by --vram and --ram.",
            )  # fmt: skip
        batch, dp = self.training.batch, ranks // (self.tp * self.pp * self.cp) or 1
        micro = self.training.micro_batch
        if micro is None:  # a pipeline is filled by as many micro-batches as it has stages
            share = batch // dp or 1
            micro = nearest(share // self.pp or 1, lambda n: share % n == 0)
        sizes = {"gpus": ranks, "gpus_per_node": min(per_node, ranks), "micro_batch": micro, "global_batch": batch}
        return build(Split, vars(self) | sizes)


@dataclass(frozen=True, kw_only=True)
class SplitTraining:
    """The result of a training, on rank 0. ``losses``: of the full batch, per step of this run; ``allocated_bytes``:
    the peak of each rank's tensors, if measured. With shards in RAM, it is the peak on the rank's GPU (or of tensors
    that a GPU would hold), and ``ram_bytes`` the peak in RAM."""

    losses: list[float]
    split: Split
    allocated_bytes: list[int]
    ram_bytes: list[int]
    step_s: float
    output: Path
    notes: list[str]
    precision: str
    precision_origin: str

    def to_json(self) -> dict[str, Any]:
        mesh: Mapping[str, int] = {name: self.split.size(name) for name in ("pp", "dp", "cp", "tp", "ep")}
        ranks = [
            {"rank": rank, "coordinates": self.split.coordinates(rank), "allocated_bytes": count}
            | ({"ram_bytes": self.ram_bytes[rank]} if self.ram_bytes else {})
            for rank, count in enumerate(self.allocated_bytes)
        ]
        return {
            "losses": self.losses, "mesh": dict(mesh), "zero": self.split.zero,
            "sequence_parallel": self.split.sequence_parallel, "interleave": self.split.interleave,
            "micro_batches": self.split.micro_batches, "ranks": ranks, "step_s": self.step_s,
            "output": str(self.output), "notes": self.notes,
            "precision": self.precision, "precision_origin": self.precision_origin,
        }  # fmt: skip
