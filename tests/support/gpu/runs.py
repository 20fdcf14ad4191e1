"""A case of the zoo, predicted for a GPU or measured on the device that is here: the record of it."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from support.gpu.process_memory import process_bytes
from support.gpu.zoo import Case, build, initialized, weights_key

_TIMED_STEPS = 3

Record = dict[str, Any]


# -- prediction -----------------------------------------------------------------------------------------------------


def predict(case: Case, capability: tuple[int, int], device: str) -> Record:
    """Peaks, seconds and upper bound of a case on the GPU of that name and capability."""
    from brim import catalog
    from brim.estimation.bounds import margins
    from brim.estimation.simulation import place_of, simulate
    from brim.predict import cost
    from brim.predict.tracer import trace

    start_s = time.perf_counter()
    record: Record = {"case": asdict(case)}
    try:
        known = device if device in catalog.gpu_names() else None
        place = place_of(known)
        made = trace(lambda: build(case, "cuda"), steps=case.steps, capability=capability)
        crowded = None
        if "routing" in made.notes:  # a mixture of experts: the bound is for all tokens at the same ones
            crowded = trace(lambda: build(case, "cuda"), steps=case.steps, capability=capability, routing="crowded")
        timeline = simulate(made, place)
        peaks = timeline.peak_bytes
        added = sum(margin.bytes for margin in margins(made, timeline, place, "", crowded))
        seconds = cost.step_s(made, catalog.gpu(known).hardware()) if known else None
        record["predicted"] = {
            "allocated": peaks.allocated, "reserved": peaks.reserved, "process": peaks.process, "step_s": seconds,
            "context": place.context.bytes, "upper_bound": peaks.process + added,
        }  # fmt: skip
        record["not_modelled"] = list(made.not_modelled)
    except Exception as error:
        record["error"] = _told(error)
    record["prediction_s"] = time.perf_counter() - start_s
    return record


# -- measurement ----------------------------------------------------------------------------------------------------


class Weights:
    """The last model's weights: drawing a billion numbers takes longer than the steps that are measured."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._model: nn.Module | None = None

    def of(self, case: Case) -> nn.Module:
        if self._model is None or weights_key(case) != self._key:
            self._model = None
            torch.manual_seed(0)
            self._key, self._model = weights_key(case), initialized(case)
        return self._model


def measure(case: Case, device: str, position: int, predicted: Record, weights: Weights) -> Record:
    record: Record = {"case": asdict(case), "position": position, **_machine(device)}
    record["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        record["measured"] = _run(case, device, weights.of(case))
    except Exception as error:
        record["error"] = _told(error)
    _reset(device)
    bound = predicted.get("predicted")
    if bound and not record.get("error"):
        record["capped"] = _run_capped(case, device, bound, record["measured"], weights.of(case))
        _reset(device)
    return record


def _run(case: Case, device: str, weights: nn.Module) -> Record:
    """Peaks after ``case.steps`` steps, then seconds. On a CPU there are no peaks: the path alone is tried."""
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    step = build(case, device, weights)
    for _ in range(case.steps):
        step()
    found: Record = {"before": before}
    if device == "cuda":
        torch.cuda.synchronize()
        found |= _peaks()
    timed = [_timed(step, device) for _ in range(_TIMED_STEPS)]
    found["step_s"], found["host_s"] = (median(seconds) for seconds in zip(*timed, strict=True))
    del step
    return found


def _peaks() -> Record:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    held = process_bytes(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    if held is None:  # a container hides process ids: the device's own count, where nobody else uses it
        free, total = torch.cuda.mem_get_info()
        held = total - free
    reserved, now = torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
    context = held - now
    return {
        "allocated": torch.cuda.max_memory_allocated(), "reserved": reserved, "process": context + reserved,
        "context": context,
    }  # fmt: skip


def _timed(step: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds of a step, and of the host until all of it was launched."""
    if device == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    step()
    host_s = time.perf_counter() - start_s
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s, host_s


def _run_capped(case: Case, device: str, bound: Record, measured: Record, weights: nn.Module) -> Record:
    """The same steps with what the upper bound leaves to tensors; the bound's own context is not theirs."""
    room = bound["upper_bound"] - bound["context"]
    slack = bound["upper_bound"] / measured["process"] - 1 if measured.get("process") else None
    found: Record = {"upper_bound": bound["upper_bound"], "slack": slack, "ok": True}
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0))
    try:
        step = build(case, device, weights)
        for _ in range(case.steps):
            step()
        del step
    except torch.OutOfMemoryError as error:
        found |= {"ok": False, "error": _told(error)}
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    return found


def _reset(device: str) -> None:
    """As near to a fresh process as one gets: nothing held, nothing cached, workspaces and peaks forgotten."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _machine(device: str) -> Record:
    import platform

    import transformers

    from brim.measure.nvml import driver_version

    found: Record = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__,
        "python": platform.python_version(), "driver": driver_version(), "device": "cpu", "capability": [8, 0],
    }  # fmt: skip
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name, "capability": list(torch.cuda.get_device_capability(0)),
            "memory_bytes": properties.total_memory, "cudnn": torch.backends.cudnn.version(),
        }  # fmt: skip
    return found


def _told(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300} ({Path(where.filename).name}:{where.lineno})"
