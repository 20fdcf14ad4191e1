"""The closed forms of a model and workload, with their arithmetic: no trace, no allocator."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from brim.errors import BrimError, ModelError, UsageError
from brim.estimation.models import Source, short
from brim.estimation.quantization import SCHEMES
from brim.estimation.quiet import quiet
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from brim.predict.formulas import Result, explain_generation, explain_training

_DTYPES = {"bf16": "bfloat16"}


def closed_forms(source: Source, workload: Workload) -> dict[str, Result]:
    """What a person would work out on paper, by name. Raises UsageError where there is nothing to work out."""
    if source.library == "python":
        raise UsageError(
            f"The closed forms of {source.name} were asked for.", "It is a program, not a configuration."
        )
    if workload.method == "lora":
        raise UsageError("The closed forms of LoRA were asked for.", "They are of full training.")
    if workload.precision in SCHEMES:
        raise UsageError(
            f"The closed forms of {workload.precision} were asked for.", "They are of floating-point weights.",
            "Leave --explain-formula out: the trace counts what the quantized layers take.",
        )  # fmt: skip
    job = Job(source, workload)
    try:
        with quiet(), FakeTensorMode():
            model: Any = job.module()
    except BrimError:
        raise
    except Exception as error:
        raise ModelError(f"{source.name} was to be built.", short(error), "Correct its configuration.") from error
    done = job.workload
    dtype, tokens = _DTYPES.get(done.precision or "", "float32"), done.seq or 1
    if done.task == "generate":
        total = tokens + (done.new_tokens or 0)
        return explain_generation(model, source.config, batch=done.batch, tokens=total, dtype=dtype)
    return explain_training(
        model, source.config, batch=done.batch, sequence=tokens, dtype=dtype, optimizer=done.optimizer or "adamw"
    )
