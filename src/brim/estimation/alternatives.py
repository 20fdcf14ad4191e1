"""Other settings under which a step that does not fit would fit; each one is estimated."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from brim.core.options import STORED
from brim.errors import BrimError
from brim.estimation.estimate import Study
from brim.estimation.simulation import Replay
from brim.estimation.workload import Workload
from brim.techniques import optimizers

_SHOWN, _TRACED = 3, 6  # the most suggested settings, and the most steps traced to find them
_SHORTEST = 128  # tokens
_BITS = {"fp32": 32, "bf16-mixed": 32, "fp16-mixed": 32, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, STORED: 4}
_FLOATING = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")  # precisions of all weights


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Changed options of ``brim estimate``, and the peak of the process with them."""

    options: str
    process_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def alternatives(study: Study, parameters_bytes: int, largest_batch: int | None) -> tuple[Alternative, ...]:
    """The first settings that fit where ``study`` does not, smallest changes first.

    ``parameters_bytes`` are those of its parameters. ``largest_batch``, the largest batch known to fit, is among the
    settings. A program and a user's own step contain their settings, so they get no suggestions.
    """
    available = study.place.available_bytes
    if study.source.library == "python" or available is None:
        return ()
    count, found, traced = _parameters(study.workload, parameters_bytes), list[Alternative](), 0
    for changes in _changes(study.workload, largest_batch):
        workload = _changed(study.workload, changes)
        if workload is None or _least_bytes(workload, count) > available:
            continue
        if len(found) == _SHOWN or traced == _TRACED:
            break
        traced += 1
        process_bytes = _process_bytes(study, workload, checked=bool(changes.keys() - {"batch", "seq"}))
        if process_bytes is not None:
            found.append(Alternative(options=_options(changes), process_bytes=process_bytes))
    return tuple(found)


def _changes(workload: Workload, largest_batch: int | None) -> Iterator[dict[str, Any]]:
    """Yield changes of a workload, the smallest first."""
    lower = [name for name in ("bf16", "fp8", "int8", "int4") if _BITS[name] < _BITS[workload.precision or "fp32"]]
    batch = [{"batch": largest_batch}] if largest_batch and largest_batch < workload.batch else []
    shorter = [{"seq": workload.seq // part} for part in (2, 4) if workload.seq and workload.seq // part >= _SHORTEST]
    if workload.task == "generate":
        yield from batch
        yield from ({"precision": name} for name in lower)
        yield from shorter
        return
    yield from batch
    full = {"checkpointing": "full"} if workload.checkpointing != "full" else {}
    if full:
        yield full
    if "bf16" in lower:
        yield {"precision": "bf16"}
        yield {**full, "precision": "bf16"}
    yield from shorter
    if workload.method == "full":
        half = {"precision": "bf16"} if "bf16" in lower else {}
        yield {**half, "optimizer": "adamw8bit", **full}
        yield {"method": "lora", **half}
        yield {"method": "lora", **half, **full}
        yield {"method": "lora", "precision": "int4", **full}
    elif "int4" in lower:
        yield {"precision": "int4"}
        yield {"precision": "int4", **full}


def _changed(workload: Workload, changes: dict[str, Any]) -> Workload | None:
    """Apply ``changes`` to the workload; None if they conflict with other settings, or change nothing."""
    try:
        changed = replace(workload, **changes)
    except BrimError:
        return None
    return None if changed == workload else changed


def _parameters(workload: Workload, bytes: int) -> int:
    """The model's number of parameters; 0 if some are quantized, because their bytes do not show it."""
    return bytes * 8 // _BITS[workload.precision] if workload.precision in _FLOATING else 0


def _least_bytes(workload: Workload, parameters: int) -> int:
    """A lower bound for the trace of ``workload``: weights, and in full training gradients and states."""
    weights = parameters * _BITS[workload.precision or "fp32"] // 8
    if workload.task == "generate" or workload.method == "lora":
        return weights
    dtype = torch.float32 if _BITS[workload.precision or "fp32"] == 32 else torch.bfloat16
    held = torch.empty(parameters, dtype=dtype, device="meta")
    return 2 * held.nbytes + optimizers.state_bytes(workload.optimizer or "adamw", [held])


def _process_bytes(study: Study, workload: Workload, *, checked: bool) -> int | None:
    """The peak of the process under ``workload``; None if it does not fit or the model does not support it.

    ``checked``: as of ``traced``; only sizes repeat as those of ``study`` do.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first estimate has warned already
            trace = Study(study.source, workload, study.place, None, study.alloc_conf, checked=checked).trace
    except BrimError:
        return None
    peaks = Replay(trace, study.alloc_conf).peaks(None, study.place, ends=True)
    return None if peaks.out_of_memory else peaks.reserved_bytes + study.place.context.bytes


def _options(changes: dict[str, Any]) -> str:
    return shlex.join(word for name, value in changes.items() for word in (f"--{name}", str(value)))
