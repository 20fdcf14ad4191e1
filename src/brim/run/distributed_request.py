"""What a user asks of a training over several ranks, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.errors import UnsupportedError
from brim.estimation.parallel import Split, nearest
from brim.run.training_request import Request

TIMEOUT_S = 600.0
_PRECISIONS = ("fp32", "bf16-mixed", "bf16")
_OPTIMIZERS = ("adamw", "adam", "sgd")
# Of Request: what a rank cannot do yet, with what the command line calls it.
_ALONE = {
    "vram": "--vram", "ram": "--ram", "disk": "--disk", "disk_folder": "--disk",
    "offload_activations": "--offload-activations", "stream_weights": "--stream-weights",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SplitRequest:
    """A training over all ranks that torchrun has started. ``timeout_s``: how long a rank waits for another."""

    training: Request
    zero: int = 0
    tp: int = 1
    pp: int = 1
    interleave: int = 1
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] = ()
    timeout_s: float = TIMEOUT_S

    def check(self) -> None:
        """Raise UsageError for what cannot be meant, UnsupportedError for what ranks cannot do."""
        training = self.training
        training.check()
        for field, option in _ALONE.items():
            if getattr(training, field) is not None:
                raise UnsupportedError(
                    f"{option} was given for several ranks.", "Splitting is planned without it.",
                    "Leave it out: ZeRO, tensor and pipeline parallelism and --checkpointing save memory here.",
                )  # fmt: skip
        if training.method != "full" and (self.tp > 1 or self.pp > 1):
            raise UnsupportedError(
                f"--method {training.method} was asked for with --{'tp' if self.tp > 1 else 'pp'}.",
                "Adapters are split over data-parallel ranks.", "Use --zero.",
            )  # fmt: skip
        if training.optimizer not in _OPTIMIZERS:
            raise UnsupportedError(
                f"--optimizer {training.optimizer} was asked for on several ranks.",
                f"Those that split as they are: {', '.join(_OPTIMIZERS)}.",
            )
        if training.precision not in (None, *_PRECISIONS):
            raise UnsupportedError(
                f"--precision {training.precision} was asked for on several ranks.",
                f"Known there are {', '.join(_PRECISIONS)}.",
            )
        if training.offload_optimizer not in (None, "keep"):
            raise UnsupportedError(
                "--offload-optimizer was asked for on several ranks.",
                "Shards of the optimizer stay with the weights.",
            )

    def split(self, ranks: int, per_node: int) -> Split:
        """The mesh; raises UsageError, naming the nearest that works, where it is not one of ``ranks``."""
        batch, dp = self.training.batch, ranks // (self.tp * self.pp) or 1
        micro = self.training.micro_batch
        if micro is None:  # a pipeline is filled by as many micro-batches as it has stages
            share = batch // dp or 1
            micro = nearest(share // self.pp or 1, lambda n: share % n == 0)
        return Split(
            gpus=ranks, gpus_per_node=min(per_node, ranks), tp=self.tp, pp=self.pp, zero=self.zero,
            interleave=self.interleave, sequence_parallel=self.sequence_parallel, micro_batch=micro,
            global_batch=batch, stage_layers=self.stage_layers,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SplitTraining:
    """What came of it, on rank 0. ``losses``: of the whole batch, one for each step of this run; ``allocated_bytes``:
    the most that tensors of each rank took at once, where that was measured."""

    losses: list[float]
    split: Split
    allocated_bytes: list[int]
    step_s: float
    output: Path
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        mesh: Mapping[str, int] = {name: self.split.size(name) for name in ("pp", "dp", "tp")}
        ranks = [
            {"rank": rank, "coordinates": self.split.coordinates(rank), "allocated_bytes": count}
            for rank, count in enumerate(self.allocated_bytes)
        ]
        return {
            "losses": self.losses, "mesh": dict(mesh), "zero": self.split.zero,
            "sequence_parallel": self.split.sequence_parallel, "interleave": self.split.interleave,
            "micro_batches": self.split.micro_batches, "ranks": ranks, "step_s": self.step_s,
            "output": str(self.output), "notes": self.notes,
        }  # fmt: skip
