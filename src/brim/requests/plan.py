"""The options of ``brim plan``; its parser, ``brim.plan`` and the commands that it prints follow them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from brim.core.options import PRECISIONS, Method, check, option, words
from brim.errors import UsageError
from brim.predict.optimizer_states import OPTIMIZERS

LOSSY = ("int8", "int4")  # of weights that were trained in 16 bits or more
PRECISIONS_OF = {"generate": ("fp32", "bf16", "fp16", *LOSSY), "train": PRECISIONS}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to ``brim.plan``; each field is its argument of that name."""

    model: str | Path = option(kind="described_model", argument=True)
    task: Literal["generate", "train"] = option("generate")
    gpu: str | None = option(None, kind="gpu", help='A GPU of the catalog, as in "RTX 3060". [default: this machine]')
    vram: str | int | None = option(
        None, "Budget of the GPU: 8GiB, or 80% of its memory. [default: all its free memory]"
    )
    ram: str | int | None = option(
        None,
        "Budget of host memory: 8GiB, or 80% of it; with --gpus, of a node.  [default: 90 % of the free memory; "
        "with --gpu, of the RAM of the machine in which that GPU is sold, else of 64GiB]",
    )
    ram_gb_per_s: float | None = option(
        None,
        min=0,
        above=True,
        help="With --gpu: rate of host memory in GB/s; with --gpus, of a node.  [default: as with --ram]",
    )
    disk: str | int | None = option(None, "Disk space for data that does not fit in memory.")
    batch: int = option(1, min=1, help="Sequences a step.")
    seq: int = option(1024, min=1, help="Tokens a sequence, or a prompt.")
    new_tokens: int = option(128, min=1, help="Tokens to generate.")
    precision: str | None = option(
        None, "Use only this precision, for example bf16 or int8. [default: the planner's choice]"
    )
    optimizer: str = option("adamw", names=OPTIMIZERS)
    method: Method = option("full")
    prefer: Literal["speed", "memory", "quality"] = option(
        "speed", "The plan to list first: the fastest, the smallest, or the fastest that rounds no weights."
    )
    lossless: bool = option(False, "Never round weights to 8 bits or fewer.")
    host_compute: bool = option(
        True,
        "Let the CPU compute blocks of a generation if that is faster; its results differ from the "
        "GPU's in the last bits.  [default: on]",
    )
    top: int = option(5, min=1, help="Maximum number of plans.")

    def check(self) -> None:
        """Raise UsageError for values that are not allowed."""
        check(self)
        if self.task == "generate" and (self.method, self.optimizer) != ("full", "adamw"):
            raise UsageError("--method or --optimizer was given for generating.", todo="It goes with --task train.")
        precisions = PRECISIONS_OF[self.task]
        if self.precision is not None and self.precision not in precisions:
            raise UsageError(f"--precision {self.precision} was given.", f"Allowed are {', '.join(precisions)}.")
        if self.lossless and self.precision in LOSSY:
            raise UsageError(f"Cannot use --precision {self.precision} with --lossless.", "It rounds weights.")

    def command(self) -> str:
        """The command line that asks this."""
        return shlex.join(["brim", "plan", *words(self, always=("task",))])


@dataclass(frozen=True, kw_only=True)
class MeshRequest(Request):
    """A request for several GPUs."""

    gpus: int | None = option(
        None, min=1, help="Split the model over this number of GPUs, and search for the best splits of a training."
    )
    gpus_per_node: int | None = option(None, min=1, help="With --gpus: GPUs of one machine. [default: 8]")
    engine: Literal["torch", "megatron"] | None = option(
        None,
        "With --gpus: predict for torch, which brim train runs, or for megatron (with Transformer Engine). "
        "[default: torch]",
    )
    global_batch: int | None = option(None, min=1, help="Sequences in a step, over all --gpus. [default: 8 for each]")
