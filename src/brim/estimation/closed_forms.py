"""The closed forms of a model and workload, with their arithmetic: no trace, no allocator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from brim.errors import BrimError, ModelError, UsageError
from brim.estimation.models import Source, short
from brim.estimation.quantization import SCHEMES
from brim.estimation.silence import quiet
from brim.estimation.steps import Job
from brim.estimation.workload import STORED, Workload
from brim.predict.formulas import (
    Result,
    checkpoint_weights,
    explain_generation,
    explain_training,
    parameters_from_size,
)

_STORED = ("fp32", "bf16", "fp8", "int8", "int4")


def closed_forms(source: Source, workload: Workload) -> dict[str, Result]:
    """Compute closed forms by name. Raises UsageError if none applies."""
    if source.library == "python":
        raise UsageError(f"There are no closed forms for {source.name}.", "It is a function, not a configuration.")
    if workload.method == "lora":
        raise UsageError("There are no closed forms for LoRA.", "They describe full training.")
    if workload.precision in (*SCHEMES, STORED):
        raise UsageError(
            f"There are no closed forms for {workload.precision}.", "They describe floating-point weights.",
            "Leave --explain-formula out: the trace counts what the quantized layers take.",
        )  # fmt: skip
    job = Job(source, workload)
    try:
        with quiet(), torch.device("meta"):
            model: Any = job.module()
    except BrimError:
        raise
    except Exception as error:
        raise ModelError(f"Cannot build {source.name}.", short(error), "Correct its configuration.") from error
    done = job.workload
    dtype, tokens = "bfloat16" if done.precision == "bf16" else "float32", done.seq or 1
    if done.task == "generate":
        total = tokens + (done.new_tokens or 0)
        cached = source.config if done.new_tokens else {}  # a model that generates nothing caches nothing
        return explain_generation(model, cached, batch=done.batch, tokens=total, dtype=dtype)
    return explain_training(
        model, source.config if done.seq else {}, batch=done.batch, sequence=tokens, dtype=dtype,
        optimizer=done.optimizer or "adamw", recompute=done.checkpointing or "none",
    )  # fmt: skip


def forms_of_weights(files: Sequence[Path], dtype: str | None) -> dict[str, Result]:
    """Compute the formulas for checkpoint files alone: bytes from headers, or the count from the size and ``dtype``.

    ``dtype`` has the form of ``--precision``. Raises UsageError if it is needed and missing, ModelError for a damaged
    header.
    """
    if all(file.suffix == ".safetensors" for file in files):
        return {"weights": checkpoint_weights(files[0] if len(files) == 1 else files[0].parent)}
    size = sum(file.stat().st_size for file in files)
    if dtype not in _STORED:
        raise UsageError(
            f"Cannot count the parameters of {files[0]}.",
            f"Its size is {size:,} B, and its dtype is not given.",
            f"Give --precision: one of {', '.join(_STORED)}.",
        )
    return {"parameters": parameters_from_size(size, dtype)}
