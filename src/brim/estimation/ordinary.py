"""Differences between the estimated step, that of an ordinary program, and the step of brim's own commands.

An estimate describes a program as in the libraries' manuals: transformers' model and its ``generate``, optimizers by
their defaults, PEFT's adapters, bitsandbytes' and torchao's layers. ``brim train`` and ``brim generate`` differ from
it in some parts; ``brim plan`` predicts those commands.
"""

from __future__ import annotations

from brim.estimation.workload import STORED, Workload
from brim.techniques.optimizers import FUSED

PROGRAM = "an ordinary program"
_STORED = {"bf16": "bfloat16"}  # the weights' type; float32 for every other precision that is not quantized


def differences(workload: Workload, stored: str, *, language_model: bool) -> dict[str, str]:
    """Return differences of brim's own commands from the ordinary step, by part; empty if the steps are equal.

    Args:
        workload: The request, with a value for every setting.
        stored: The type of the model's weights in its files, as in ``"bfloat16"``.
        language_model: True if the model generates text.
    """
    if not language_model:
        return {"command": "brim train and brim generate run language models; others by brim.fit"}
    if workload.task == "generate":
        return _of_generation(workload)
    precision = workload.precision or "fp32"
    parts = {}
    if precision in ("int8", "int4", STORED):
        parts["layers"] = f"brim train has no {precision}"
    elif precision == "fp8":
        parts["layers"] = "brim train takes torchao's own layers"
    if workload.method == "lora" and precision not in ("int8", "int4", "fp8", STORED):
        dtype = _STORED.get(precision, "float32")
        if dtype != stored:
            parts["weights"] = f"brim train keeps weights that are not trained in their stored dtype, {stored}"
        if precision == "bf16":
            parts["adapters"] = "of brim train --precision bf16 are bfloat16, PEFT's float32"
    if workload.optimizer in (None, *FUSED):
        parts["optimizer"] = "brim train uses PyTorch's fused optimizer, which allocates nothing in its step"
    elif workload.optimizer == "adamw8bit":
        parts["optimizer"] = "brim train takes torchao's own"
    if workload.checkpointing == "alternate":
        parts["checkpointing"] = "brim train has no alternate"
    return parts


def _of_generation(workload: Workload) -> dict[str, str]:
    parts = {"cache": "brim generate allocates the cache once, for all tokens"}
    if workload.precision in ("int8", "int4", "fp8"):
        parts["layers"] = f"brim generate uses its own {workload.precision} layers"
    return parts
