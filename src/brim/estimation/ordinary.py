"""Where the step of an ordinary program, which an estimate is of, is not the one that brim's own commands make.

An estimate is of a program as the libraries' manuals have it: transformers' model and its ``generate``, optimizers by
their defaults, PEFT's adapters, bitsandbytes' and torchao's layers. ``brim train`` and ``brim generate`` make some of
that otherwise; what they take, ``brim plan`` says.
"""

from __future__ import annotations

from brim.estimation.workload import Workload
from brim.techniques.optimizers import FUSED

PROGRAM = "an ordinary program"
_STORED = {"bf16": "bfloat16"}  # what weights are held in; float32 by every other precision that is not quantized


def differences(workload: Workload, stored: str, *, language_model: bool) -> dict[str, str]:
    """What brim's own commands make otherwise, by part of the step; empty where they make this very step.

    Args:
        workload: What was asked, with what was left open filled in.
        stored: The type of the model's weights in its files, as in ``"bfloat16"``.
        language_model: Whether the model generates text.
    """
    if not language_model:
        return {"command": "brim train and brim generate run language models; others by brim.fit"}
    if workload.task == "generate":
        return _of_generation(workload)
    precision = workload.precision or "fp32"
    parts = {}
    if precision in ("int8", "int4"):
        parts["layers"] = f"brim train has no {precision}"
    elif precision == "fp8":
        parts["layers"] = "brim train takes torchao's own layers"
    if workload.method == "lora" and precision not in ("int8", "int4", "fp8"):
        dtype = _STORED.get(precision, "float32")
        if dtype != stored:
            parts["weights"] = f"brim train keeps what is not trained as it is stored, in {stored}"
        if precision == "bf16":
            parts["adapters"] = "of brim train --precision bf16 are bfloat16, PEFT's float32"
    if workload.optimizer in (None, *FUSED):
        parts["optimizer"] = "brim train takes PyTorch's fused one, which allocates nothing in its step"
    elif workload.optimizer == "adamw8bit":
        parts["optimizer"] = "brim train takes torchao's own"
    if workload.checkpointing == "alternate":
        parts["checkpointing"] = "brim train has no alternate"
    return parts


def _of_generation(workload: Workload) -> dict[str, str]:
    parts = {"cache": "brim generate allocates the cache once, for all tokens"}
    if workload.precision in ("int8", "int4", "fp8"):
        parts["layers"] = f"brim generate has {workload.precision} layers of its own"
    return parts
