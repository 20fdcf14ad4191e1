"""One contender on one workload in a process of its own. Started by streaming_gpu.py."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import _gpu_model as models
from _checkpoint import Shape
from peers.gpu import Task, gpu_contender

_COPY_BYTES = 1 << 30
# Beside the weights: workspaces, and for 8192 tokens three activations of [8192, 13824] in bf16 and more.
_WORKING_BYTES = {"decode": 1 << 30, "prefill": 3 << 30}


def main() -> None:
    request = json.loads(sys.argv[1])
    device = torch.device("cuda", 0) if request["device"] == "cuda" else torch.device(request["device"])
    shape = Shape(**request["shape"])
    with contextlib.redirect_stdout(sys.stderr), torch.no_grad():
        module = models.shared_model(request["descriptor"], shape)
        if request["contender"] == "link":
            document = link_rates(device, _COPY_BYTES if not request["tiny"] else 1 << 24)
        else:
            document = measure(module, device, request)
    Path(request["result"]).write_text(json.dumps(document))


def link_rates(device: torch.device, size: int) -> dict[str, float]:
    """Host to device, pinned, the best of five: what no copy engine here goes beyond."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    best_s = min(_timed(device, lambda: target.copy_(host, non_blocking=True), 1)[1] for _ in range(5))
    return {"h2d_bytes_per_s": size / best_s}


def measure(module: Any, device: torch.device, request: dict[str, Any]) -> dict[str, Any]:
    runner = gpu_contender(request["contender"])
    workload, budget_bytes = request["workload"], request["budget_bytes"]
    if device.type == "cuda":
        if runner.CAPPED:
            share = budget_bytes / torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(share, device)
        torch.zeros(1, device=device)  # the context, before anything is counted
        torch.cuda.reset_peak_memory_stats(device)
    working_bytes = 1 << 20 if request["tiny"] else _WORKING_BYTES[workload]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, module.config.vocab_size, (1, request["tokens"]), generator=generator).to(device)
    inputs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    task = Task(
        module=module, device=device, budget_bytes=budget_bytes, example=inputs, working_bytes=working_bytes
    )  # fmt: skip
    start_s = time.perf_counter()
    applied = runner.apply(task)
    document: dict[str, Any] = {"setup_s": time.perf_counter() - start_s}

    def forward() -> torch.Tensor:
        logits: torch.Tensor = module(**inputs).logits
        return logits

    _timed(device, forward, runner.WARMUP)
    before = applied.facts().get("streamed_bytes", 0)
    logits, document["forward_s"] = _timed(device, forward, request["forwards"])
    facts = applied.facts()
    if "streamed_bytes" in facts:
        document["streamed_bytes_per_forward"] = (facts["streamed_bytes"] - before) / request["forwards"]
    document |= {"facts": facts.get("facts", {}), **_memory(device)}
    save_file({"logits": logits.float().cpu().contiguous()}, request["logits"])
    applied.remove()
    return document


def _memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "device_used_bytes": total_bytes - free_bytes,  # contexts and other processes included
    }


def _timed(device: torch.device, call: Any, count: int) -> tuple[Any, float]:
    """The last result and the mean seconds of ``count`` calls in a row, all work on the device done."""
    _synchronize(device)
    start_s = time.perf_counter()
    for _ in range(count):
        given = call()
    _synchronize(device)
    return given, (time.perf_counter() - start_s) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
