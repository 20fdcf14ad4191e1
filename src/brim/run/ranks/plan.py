"""Plan file for several ranks: ``brim plan --gpus N --output FILE`` writes it, ``brim train --plan FILE`` reads
it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brim.core import codec
from brim.core.files import write_text
from brim.core.options import build
from brim.errors import FormatError, UnsupportedError, UsageError
from brim.estimation.ranks.split import Split
from brim.run.ranks.request import SplitRequest

VERSION = 3
RUNS = "torch"  # the engine whose plans brim train runs


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """A mesh and its promise under ``engine`` in ``precision``: bytes of the worst rank's process, and seconds of a
    step."""

    brim: str
    model: str
    gpu: str
    engine: str
    precision: str
    sequence: int
    split: Split
    checkpointing: str
    peak_bytes: int
    step_s: float

    def to_json(self) -> dict[str, Any]:
        return codec.to_json(self, VERSION)


def write(path: str | Path, plan: SplitPlan) -> None:
    """Write the plan file. Raises UsageError where that is impossible."""
    try:
        write_text(path, json.dumps(plan.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"Cannot write a plan to {path}.", f"{error}.", "Name another file.") from error


def read(path: str | Path) -> SplitPlan:
    """Read a plan file. Raises FormatError for a file that ``write`` did not write."""
    try:
        return codec.read(SplitPlan, path, VERSION)
    except FormatError as error:
        raise FormatError(
            f"{path} is not a valid plan for several ranks.", f"{error.request} {error.reason}",
            "Make one: brim plan MODEL --task train --gpus N --gpu NAME --output FILE.",
        ) from error  # fmt: skip


def with_plan(request: SplitRequest, ranks: int) -> SplitRequest:
    """``request`` with the decisions of its plan, if it has one. Raises UsageError for another number of ranks, and
    for a split or a precision given beside the plan; UnsupportedError for a plan of an engine that does not run
    here."""
    training = request.training
    if training.plan is None:
        return request
    plan = read(training.plan)
    _check_runs(training.plan, plan)
    split = plan.split
    if split.gpus != ranks:
        raise UsageError(
            f"Cannot follow {training.plan}.", f"It is for {split.gpus} ranks, and torchrun has started {ranks}.",
            f"Start {split.gpus}, or make a plan for {ranks}: brim plan {plan.model} --task train --gpus {ranks} ...",
        )  # fmt: skip
    if replace(request, training=training, timeout_s=0.0) != SplitRequest(training=training, timeout_s=0.0):
        raise UsageError(
            f"Cannot combine the plan {training.plan} with options that split the work, such as --zero and --tp.",
            "The plan decides these.", "Leave out those options, or --plan.",
        )  # fmt: skip
    if training.precision not in (None, plan.precision):
        raise UsageError(
            f"Cannot use --precision {training.precision} with the plan {training.plan}.",
            f"The plan is for {plan.precision}.", "Leave out --precision, or --plan.",
        )  # fmt: skip
    followed = replace(
        training, plan=None, precision=plan.precision, batch=split.global_batch, micro_batch=split.micro_batch,
        seq=plan.sequence, checkpointing=plan.checkpointing,
    )  # fmt: skip
    return build(SplitRequest, vars(split) | {"training": followed, "timeout_s": request.timeout_s})


def _check_runs(path: str | Path, plan: SplitPlan) -> None:
    """Raise UnsupportedError if the promise was made for another engine."""
    if plan.engine == RUNS:
        return
    raise UnsupportedError(
        f"Cannot follow {path}.",
        f"It was made for the engine {plan.engine}, and brim train uses {RUNS}.",
        f"Make one for that: brim plan {plan.model} --task train --gpus {plan.split.gpus} --gpu "
        f"{shlex.quote(plan.gpu)} --engine {RUNS} --output FILE.",
    )  # fmt: skip
