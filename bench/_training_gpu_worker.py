"""One run of training_gpu.py in a process of its own, device memory capped where the run says so."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import _gpu_model as models
import activation_offload
from _checkpoint import Shape
from brim.core import Timeline
from brim.core.hardware import RAM
from brim.memory.tiers import Memory, device_memory, emulated_memory
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.step import bytes_at_once
from brim.techniques.optimizer_offload import technique as optimizer_offload

_LR = 1e-4


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["cap_bytes"] and request["device"] == "cuda":
        share = request["cap_bytes"] / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    with contextlib.redirect_stdout(sys.stderr):
        document = _KINDS[request["kind"]](request)
    Path(request["result"]).write_text(json.dumps(document))


# -- brim train, as the command line runs it


def run_train(request: dict[str, Any]) -> dict[str, Any]:
    """``request["train"]`` are fields of brim.run.train.loop.Request."""
    from brim.run.train.loop import Request, train
    from brim.run.train.report import StepReport

    reports: list[StepReport] = []
    asked = Request(device="cuda" if request["device"] == "cuda" else "emulated", lr=_LR, **request["train"])
    begin_s = time.perf_counter()
    result = train(asked, on_step=reports.append)
    steps = [report.step_s for report in reports[1:]] or [report.step_s for report in reports]
    return {
        "losses": result.losses,
        "step_s": statistics.median(steps),
        "tokens_per_s": reports[0].tokens / statistics.median(steps),
        "all_s": time.perf_counter() - begin_s,
        "promised_bytes": dict(result.promised_bytes),
        "measured_bytes": dict(result.measured_bytes),
        "moved_bytes_per_step": dict(reports[-1].moved_bytes),
        "settings": dict(result.plan.settings),
        "choices": sorted({f"{d.technique}: {d.choice}" for d in result.plan.decisions}),
        "notes": result.notes,
        **_device_memory(request),
    }


# -- the optimizer's step, in VRAM and away


def run_adam(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps of one contender at one batch: weights float32, computing in bfloat16, blocks checkpointed."""
    device = torch.device(request["device"])
    model = _random_model(Shape(**request["shape"]), device)
    shape = request["batch"], request["seq"]
    ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(device)
    losses, seconds = [], []
    with _CONTENDERS[request["contender"]](model, device) as step:
        for _ in range(request["steps"]):
            _synchronize(device)
            begin_s = time.perf_counter()
            losses.append(step(lambda: _loss(model, ids)).item())
            _synchronize(device)
            seconds.append(time.perf_counter() - begin_s)
    steady = seconds[2:] or seconds[-1:]  # the first makes the states, the second warms up what the first did not use
    return {"losses": losses, "step_s": statistics.median(steady), "seconds": seconds, **_device_memory(request)}


def _random_model(shape: Shape, device: torch.device) -> Any:
    model = models.empty_model(shape).to(torch.float32).to_empty(device="cpu").requires_grad_(True).train()
    pattern = models.make_pattern()
    for name, parameter in model.named_parameters():
        models.fill(name, parameter.data, pattern)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers were made on the way, and lost
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    return model.to(device)


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


Step = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


@contextlib.contextmanager
def _in_vram(model: Any, device: torch.device) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    yield lambda loss_of: _usual(optimizer, loss_of, contextlib.nullcontext)


@contextlib.contextmanager
def _brim(model: Any, device: torch.device, sixteenths: int = 6) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    memory = _memory(device)
    size = bytes_at_once(model, Choice(gpu_sixteenths=sixteenths))
    handle = optimizer_offload.apply(
        model, optimizer, memory, states=RAM, block_bytes=size, gpu_sixteenths=sixteenths
    )
    yield lambda loss_of: _usual(optimizer, loss_of, handle.final)
    handle.remove()
    memory.close()


@contextlib.contextmanager
def _torchao(model: Any, device: torch.device) -> Iterator[Step]:
    from torchao.optim import CPUOffloadOptimizer

    if device.type != "cuda":
        raise SystemExit("torchao's CPUOffloadOptimizer needs a CUDA device")
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=_LR, fused=True)
    yield lambda loss_of: _usual(optimizer, loss_of, contextlib.nullcontext)


_CONTENDERS = {"in_vram": _in_vram, "brim": _brim, "brim_cpu": partial(_brim, sixteenths=0), "torchao": _torchao}


def _usual(optimizer: Any, loss_of: Callable[[], torch.Tensor], around: Callable[[], Any]) -> torch.Tensor:
    loss = loss_of()
    with around():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _memory(device: torch.device) -> Memory:
    timeline = Timeline("bench", measured=True)
    if device.type == "cuda":
        return device_memory(timeline, vram_bytes=1 << 40, ram_bytes=1 << 40, device=torch.device("cuda", 0))
    return emulated_memory(timeline, vram_bytes=1 << 40, ram_bytes=1 << 40)


# -- activations


def run_activations(request: dict[str, Any]) -> dict[str, Any]:
    """The stacks of activation_offload.py; ``saving`` is the share of what left that the peak fell by."""
    options = argparse.Namespace(
        device=request["device"], tiny=request["tiny"], rounds=request["rounds"], directory=Path(request["folder"])
    )
    shapes = activation_offload.shapes_for(options)
    found = {shape.name: activation_offload.measure(shape, options) for shape in shapes}
    for result in found.values():
        peaks = {name: one["peak_growth_bytes"] for name, one in result["contenders"].items()}
        result["saving"] = (peaks["plain"] - peaks["brim"]) / result["moved_bytes"]
    return found


_KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "train": run_train,
    "adam": run_adam,
    "activations": run_activations,
}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_memory(request: dict[str, Any]) -> dict[str, int]:
    if request["device"] != "cuda":
        return {}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


if __name__ == "__main__":
    main()
