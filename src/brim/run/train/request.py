"""A training: its options and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from brim.core import Plan, Timeline
from brim.errors import UsageError
from brim.estimation.workload import LARGEST
from brim.run.fit.machine import Device
from brim.run.model.training_model import Method
from brim.run.train.report import EvaluationReport
from brim.run.train.strategy.choice import Place
from brim.run.train.strategy.ladder import Orders
from brim.techniques.optimizers import OPTIMIZERS
from brim.techniques.precision import PRECISIONS

REPORTERS = ("none", "tensorboard", "wandb")
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # as torch.manual_seed


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a training. Amounts are bytes or strings such as ``"8GiB"``; None leaves a choice to the
    planner.

    ``disk`` limits the bytes in ``disk_folder`` (None: the temporary folder). ``steps`` or ``epochs``, not both;
    with neither, one epoch. ``clip_norm`` bounds the norm of all gradients together. ``plan`` is a file written by
    ``brim plan``, which is followed exactly. The loss of ``eval_data`` is computed every ``eval_every`` steps and at
    the end. ``report_to``: ``REPORTERS`` that get every step; None is TensorBoard if it is installed.
    ``output`` is new or empty, or a training that ``resume`` continues (with its settings, unless
    ``change_settings``), or is replaced with ``overwrite``. ``lr`` is at least 0, ``clip_norm`` above 0, both finite.
    A loss or a weight that is not finite ends the training, unless ``allow_non_finite``. ``seed`` is as for
    ``torch.manual_seed``.
    """

    model: str | Path
    data: str | Path
    eval_data: str | Path | None = None
    eval_every: int | None = None
    report_to: Sequence[str] | None = None
    output: str | Path
    method: Method = "full"
    vram: str | int | None = None
    ram: str | int | None = None
    disk: str | int | None = None
    disk_folder: str | None = None
    device: Device = "auto"  # or one GPU of several: "cuda:1"
    batch: int = 8
    micro_batch: int | None = None
    seq: int = 1024
    steps: int | None = None
    epochs: int | None = None
    lr: float = 2e-5
    warmup: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    clip_norm: float | None = None
    optimizer: str = "adamw"
    precision: str | None = None
    checkpointing: str | None = None
    offload_activations: int | None = None
    offload_optimizer: Place | None = None
    stream_weights: bool | None = None
    save_every: int | None = None
    resume: bool = False
    change_settings: bool = False
    overwrite: bool = False
    allow_non_finite: bool = False
    plan: str | Path | None = None
    seed: int = 0
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raise UsageError for values that are not allowed or contradict each other."""
        _check_choice("--method", self.method, ("full", "lora"))
        _check_choice("--optimizer", self.optimizer, OPTIMIZERS)
        _check_choice("--schedule", self.schedule, ("constant", "cosine"))
        if self.precision is not None:
            _check_choice("--precision", self.precision, PRECISIONS)
        for name in self.report_to or ():
            _check_choice("--report-to", name, REPORTERS)
        if self.eval_every is not None and self.eval_data is None:
            raise UsageError(
                f"Cannot use --eval-every {self.eval_every}.", "There is no data to evaluate on.", "Give --eval-data."
            )
        for option, number, above in (("--lr", self.lr, False), ("--clip-norm", self.clip_norm, True)):
            if number is not None and (not math.isfinite(number) or number < 0 or (above and number == 0)):
                least = "above 0" if above else "from 0 on"
                raise UsageError(f"{option} {number} was given.", f"It must be a finite number {least}.")
        for option, count, fewest in (
            ("--batch", self.batch, 1), ("--micro-batch", self.micro_batch, 1), ("--seq", self.seq, 2),
            ("--steps", self.steps, 1), ("--epochs", self.epochs, 1), ("--warmup", self.warmup, 0),
            ("--save-every", self.save_every, 1), ("--eval-every", self.eval_every, 1),
            ("--offload-activations", self.offload_activations, 0),
        ):  # fmt: skip
            if count is not None and count < fewest:
                raise UsageError(f"{option} {count} was given.", f"It must be a whole number, {fewest} or more.")
            if count is not None and count > LARGEST:
                raise UsageError(f"{option} {count} was given.", f"It must be at most {LARGEST:,}.")
        if not LEAST_SEED <= self.seed <= MOST_SEED:
            raise UsageError(f"--seed {self.seed} was given.", f"It must be from {LEAST_SEED} to {MOST_SEED}.")
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

    def orders(self) -> Orders:
        return Orders(
            micro_batch=self.micro_batch,
            checkpointing=self.checkpointing,
            offload_activations=self.offload_activations,
            offload_optimizer=self.offload_optimizer,
            stream_weights=self.stream_weights,
        )

    def course(self, steps: int) -> dict[str, Any]:
        """Options, beside model and data, that decide the numbers of all steps: a resumed training must have the
        same.

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
        """Learning rate of step ``step`` of ``steps``, from 0 on. It depends on the step alone, so resuming needs no
        state.

        It grows linearly over ``warmup`` steps; with ``cosine`` it then falls to 0 (Loshchilov and Hutter, "SGDR",
        arXiv 1608.03983, a single cycle).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


def _check_choice(option: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value} was given.", f"Allowed are {', '.join(allowed)}.")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The result of a training. ``losses`` has a value per step of this run, ``measured_bytes`` the run's peaks:

    for RAM the growth of the resident set's peak since before the model was opened, for VRAM PyTorch's reserved
    bytes, for disk the length of the scratch file. ``step_s`` is the median. ``truncated`` counts examples cut to the
    length of a sequence. ``precision_origin`` says how the plan's precision was chosen.
    """

    losses: list[float]
    plan: Plan
    promised_bytes: Mapping[str, int]
    measured_bytes: Mapping[str, int]
    step_s: float
    output: Path
    notes: list[str]
    precision_origin: str = ""
    truncated: int = 0
    evaluations: Sequence[EvaluationReport] = ()
    timeline: Timeline = field(compare=False)
    predicted: Timeline | None = field(default=None, compare=False)  # the plan's predicted step, if requested

    def to_json(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "promised_bytes": dict(self.promised_bytes),
            "measured_bytes": dict(self.measured_bytes),
            "step_s": self.step_s,
            "plan": self.plan.to_json(),
            "output": str(self.output),
            "precision_origin": self.precision_origin,
            "notes": self.notes,
            "truncated": self.truncated,
        } | {
            name: values
            for name, values in (
                ("evaluations", [evaluation.to_json() for evaluation in self.evaluations]),
                ("exceeded", self.plan.exceeded(self.measured_bytes)),
            )
            if values
        }
