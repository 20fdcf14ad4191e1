"""The options of ``brim train``; under torchrun, those by which ranks share the model too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from brim.core.options import PRECISIONS, RAM_HELP, VRAM_HELP, Device, Method, Place, check, device_option, option
from brim.errors import UsageError
from brim.predict.optimizer_states import OPTIMIZERS

TIMEOUT_S = 600.0
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # as torch.manual_seed
_AUTO: dict[str, Any] = {"auto": None}  # the planner's choice


@dataclass(frozen=True, kw_only=True)
class Request:
    """A training. Amounts are bytes or such as ``"8GiB"``; None leaves a choice to the planner.

    ``output`` is new or empty, or what ``resume`` goes on with (under the settings that it began with, unless
    ``change_settings``), or gives way by ``overwrite``. A loss or a weight that is no finite number ends the
    training, unless ``allow_non_finite``.
    """

    model: str | Path = option(kind="model", argument=True)
    data: str | Path = option(help="JSONL, JSON or plain text.")
    eval_data: str | Path | None = option(None, "Data for the reported loss; it is not used for training.")
    eval_every: int | None = option(None, "Steps between evaluations.  [default: at the end]", min=1)
    output: str | Path = option(kind="new_folder", help="Folder for the trained model.")
    method: Method = option("full")
    vram: str | int | None = option(None, VRAM_HELP)
    ram: str | int | None = option(None, RAM_HELP)
    disk: str | int | None = option(
        None,
        "Folder for data that does not fit in memory, and its limit (:50GiB, or :40% of the free space).",
        kind="room",
    )
    disk_folder: str | None = None  # the temporary folder where None
    device: Device = device_option()
    batch: int = option(8, "Sequences a step.", min=1)
    micro_batch: int | None = option(None, "Sequences at once.", min=1, words=_AUTO)
    seq: int = option(1024, "Tokens a sequence.", min=2)
    steps: int | None = option(None, "Number of steps; default: from --epochs.", min=1)
    epochs: int | None = option(None, "Number of passes over the data.  [default: 1]", min=1)
    lr: float = option(2e-5, min=0)
    warmup: int = option(0, "Steps over which the learning rate grows to --lr.", min=0)
    schedule: Literal["constant", "cosine"] = option("constant")
    clip_norm: float | None = option(None, "Maximum norm of all gradients together.", min=0, above=True)
    optimizer: str = option("adamw", names=OPTIMIZERS)
    precision: str | None = option(None, names=PRECISIONS, words=_AUTO)
    checkpointing: str | None = option(None, words=_AUTO | {name: name for name in ("none", "selective", "full")})
    offload_activations: int | None = option(
        None, "Number of blocks whose activations are offloaded.", min=0, words=_AUTO
    )
    offload_optimizer: Place | None = option(None, words=_AUTO | {"none": "keep", "ram": "ram", "disk": "disk"})
    stream_weights: bool | None = option(None, words=_AUTO | {"off": False})
    plan: str | Path | None = option(None, "Run this plan of `brim plan --output`.", kind="file")
    save_every: int | None = option(None, "Steps between checkpoints.", min=1)
    report_to: Sequence[Literal["none", "tensorboard", "wandb"]] | None = option(
        None,
        "Service that gets the numbers of every step; may be given twice.  [default: tensorboard if it is installed]",
    )
    resume: bool = option(False, "Continue from the last checkpoint in --output.")
    change_settings: bool = option(
        False, "With --resume: allow other values of --lr, --clip-norm and some other options."
    )
    overwrite: bool = option(False, "Replace the model or the training in --output.")
    allow_non_finite: bool = option(False, "Continue with values that are not finite (NaN, inf), and save them.")
    seed: int = option(0, "Seed of data order, adapters and dropout.", min=LEAST_SEED, max=MOST_SEED)
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")

    def check(self) -> None:
        """Raise UsageError for values that are not allowed or contradict each other."""
        check(self)
        if self.eval_every is not None and self.eval_data is None:
            raise UsageError(
                f"Cannot use --eval-every {self.eval_every}.", "There is no data to evaluate on.", "Give --eval-data."
            )
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite were both given.", "One keeps what the other deletes.")
        if self.change_settings and not self.resume:
            raise UsageError("--change-settings was given.", "It is for trainings that go on.", "Give --resume.")
        if self.steps is not None and self.epochs is not None:
            raise UsageError("--steps and --epochs were both given.", "Each decides the length.", "Give one of them.")
        if self.micro_batch is not None and self.micro_batch > self.batch:
            raise UsageError(
                f"Cannot use --micro-batch {self.micro_batch}.",
                f"A batch has only {self.batch} sequences.",
                "Give a smaller --micro-batch or a larger --batch.",
            )

    def course(self, steps: int) -> dict[str, Any]:
        """Return the options, beside model and data, that decide the numbers of all steps; resuming keeps them.

        ``steps`` is the length of the training, which counts if the schedule depends on it.
        """
        return {
            "--method": self.method,
            "--optimizer": self.optimizer,
            "--lr": self.lr,
            "--schedule": self.schedule,
            "--warmup": self.warmup,
            "--steps": None if self.schedule == "constant" else steps,
            "--clip-norm": self.clip_norm,
            "--batch": self.batch,
            "--seed": self.seed,
        }

    def lr_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step`` of ``steps``, from 0 on.

        It depends on the step alone, so resuming needs no state. It grows linearly over ``warmup`` steps; with
        ``cosine`` it then falls to 0 (Loshchilov and Hutter, "SGDR", arXiv 1608.03983, one cycle).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options by which torchrun's ranks share a training. ``timeout_s``: how long a rank waits for another."""

    zero: int = option(0, "Under torchrun: ZeRO stage.  [default: 0]", min=0, max=3)
    offload_shards: bool = option(False, "With --zero: keep its shards in RAM, and run the optimizer there.")
    tp: int = option(1, "Under torchrun: ranks that split each matrix.", min=1)
    pp: int = option(1, "Under torchrun: pipeline stages.", min=1)
    interleave: int = option(1, "Stages on each pipeline rank.", min=1)
    ep: int = option(1, "Under torchrun: data-parallel ranks that split experts.", min=1)
    cp: int = option(1, "Under torchrun: ranks that split a sequence.", min=1)
    sequence_parallel: bool = option(
        False, "With --tp: also split the sequence, between the matrices.", flags=("--sp",)
    )
    timeout_s: float = option(TIMEOUT_S, "Seconds to wait for a rank.  [default: 600]", min=1, flags=("--timeout",))
