"""A workload: the task and its settings, checked; settings that are None are filled in later."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from brim.core.hardware import RAM, VRAM
from brim.core.options import LARGEST, STORED, option
from brim.errors import UnsupportedError, UsageError
from brim.predict.optimizer_states import OPTIMIZERS

TASKS = ("train", "generate")
PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed", "fp8", "int8", "int4", STORED)
_FROZEN = ("int8", "int4", STORED)  # precisions whose weights get no gradient
_FULL_NAMES = {"adamw8bit": "adamw8bit (torchao)"}  # bitsandbytes has another of the same name
METHODS = ("full", "lora")
CHECKPOINTING = ("none", "selective", "alternate", "full")

_CHOICES = {
    "task": TASKS,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "method": METHODS,
    "checkpointing": CHECKPOINTING,
}
DEFAULT_NEW_TOKENS = 128
_TRAINING_ONLY = ("optimizer", "method", "checkpointing")
ASKED = "as asked for"
_TRAINED = {  # the default precision of brim train, by the tier that computes
    RAM: ("fp32", "brim train's default on CPUs"),
    VRAM: ("bf16-mixed", "brim train's default on GPUs"),
}


def training_precision(precision: str | None, method: str, compute: str) -> tuple[str, str]:
    """The precision in which ``brim train`` computes on the tier ``compute``, and its origin."""
    if precision is None and (method, compute) == ("lora", RAM):
        return STORED, "brim train's default for adapters on CPUs"
    return _TRAINED[compute] if precision is None else (precision, ASKED)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task and its settings. None: not given; ``resolved`` replaces it by the default.

    ``batch``, ``seq``, ``new_tokens`` and ``lora_rank`` are whole numbers from 1. Raises UsageError for other values
    and for settings that contradict each other.

    Attributes:
        task: ``"train"`` or ``"generate"``.
        batch: Sequences, or images, of one step.
        seq: Tokens of a sequence, or of the prompt.
        precision: ``"fp32"`` and ``"bf16"``: weights and arithmetic in that type. ``"bf16-mixed"`` and
            ``"fp16-mixed"``: float32 weights under autocast, fp16 with a gradient scaler. ``"fp8"``, ``"int8"`` and
            ``"int4"``: bf16 with linear layers in that type. ``"stored"``: quantized weights as the checkpoint has
            them, and the others in its type. The last three train with ``method="lora"`` only.
        optimizer: One of the names that ``brim.estimate`` lists.
        method: ``"full"`` or ``"lora"``.
        checkpointing: ``"none"``, ``"selective"``, ``"alternate"`` or ``"full"``.
        new_tokens: Tokens to generate after the prompt.
        lora_rank: Rank of the adapters. None: PEFT's default.
        lora_targets: Last parts of module names, or ``("all-linear",)``. None: PEFT's default.
    """

    task: str = option("train", "train or generate.")
    batch: int = option(1, "Sequences, or images, in a step.")
    seq: int | None = option(None, "Tokens of a sequence, or of the prompt. [default: 4096, or the model's own]")
    precision: str | None = option(
        None,
        "fp32, bf16, bf16-mixed, fp16-mixed, fp8, int8, int4 (NF4), or stored (of quantized checkpoints). "
        "[default: the weights' own; with --gpus bf16-mixed]",
    )
    optimizer: str | None = option(
        None,
        "adamw, adam, sgd, sgd-momentum, adafactor, rmsprop, adagrad, lion or adamw8bit (of torchao). "
        "[default: adamw]",
    )
    method: str | None = option(None, "full or lora (PEFT's defaults). [default: full]")
    lora_rank: int | None = option(None, "With --method lora: rank of the adapters. [default: 8]")
    lora_targets: tuple[str, ...] | None = option(
        None,
        kind="names",
        metavar="NAMES",
        help="With --method lora: the last parts of modules' names, for example q_proj,v_proj, or all-linear. "
        "[default: PEFT's]",
    )
    checkpointing: str | None = option(
        None, "none, selective, alternate (keeps every other matrix product) or full. [default: none]"
    )
    new_tokens: int | None = option(None, "Tokens to generate. [default: 128]")

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise _unknown(name, value, choices)
        for name in ("batch", "seq", "new_tokens", "lora_rank"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= LARGEST):
                raise UsageError(f"{name}={value!r} was given.", f"It must be a whole number, 1 to {LARGEST:,}.")
        self._check_task()

    def _check_task(self) -> None:
        adapters = [name for name in ("lora_rank", "lora_targets") if getattr(self, name) is not None]
        if adapters and self.method != "lora":
            raise UsageError(
                f"{' and '.join(adapters)} was given without method lora.", "There are no adapters then.",
                "Give --method lora, or leave it out.",
            )  # fmt: skip
        if self.lora_targets is not None and not (self.lora_targets and all(self.lora_targets)):
            raise UsageError(
                f"lora_targets={self.lora_targets!r} was given.",
                todo="Name modules, as in q_proj,v_proj, or all-linear.",
            )
        if self.task == "train" and self.new_tokens is not None:
            raise UsageError("new_tokens was given for training.", todo="It goes with the task generate.")
        training_options = [name for name in _TRAINING_ONLY if getattr(self, name) is not None]
        if self.task == "generate" and training_options:
            raise UsageError(
                f"{' and '.join(training_options)} was given for generating.", todo="It goes with the task train."
            )
        if self.task == "generate" and self.precision in ("bf16-mixed", "fp16-mixed"):
            raise UnsupportedError(
                f"Cannot generate in {self.precision}.", "Autocast is modelled for training only.",
                "Use bf16 or fp32.",
            )  # fmt: skip
        if self.task == "train" and self.precision in _FROZEN and self.method != "lora":
            raise UsageError(
                f"Cannot train in precision {self.precision}.",
                "Quantized weights take no gradient.",
                "Train adapters on them with method lora, or use bf16 or fp8.",
            )

    @property
    def given(self) -> dict[str, int | str]:
        """Settings that differ from the defaults."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def resolved(self, *, seq: int | None, precision: str, new_tokens: int | None) -> Workload:
        """Fill in every setting of the task. ``seq`` and ``precision`` apply where none was given."""
        training = self.task == "train"
        return dataclasses.replace(
            self,
            seq=self.seq or seq,
            precision=self.precision or precision,
            optimizer=(self.optimizer or "adamw") if training else None,
            method=(self.method or "full") if training else None,
            checkpointing=(self.checkpointing or "none") if training else None,
            new_tokens=new_tokens,
        )

    def describe(self) -> str:
        """``train, batch 4, 4,096 tokens, bf16, adamw, full, no checkpointing``."""
        parts = [self.task, f"batch {self.batch:,}"]
        parts += [f"{self.seq:,} tokens"] if self.seq else []
        parts += [f"{self.new_tokens:,} new tokens"] if self.new_tokens else []
        optimizer = _FULL_NAMES.get(self.optimizer or "", self.optimizer)
        parts += [value for value in (self.precision, optimizer, self.method) if value]
        parts += [f"rank {self.lora_rank:,}"] if self.lora_rank else []
        parts += [f"in {', '.join(self.lora_targets)}"] if self.lora_targets else []
        parts += [f"checkpointing {self.checkpointing}"] if self.checkpointing not in (None, "none") else []
        return ", ".join(parts)


def _unknown(name: str, value: object, choices: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(str(value), choices, n=2, cutoff=0.3)
    hint = f"Nearest: {', '.join(near)}." if near else ""
    return UsageError(f"{name}={value!r} was given.", f"It must be one of {', '.join(choices)}.", hint)
