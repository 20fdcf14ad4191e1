"""One contender of training.py in a process of its own: set up, train, measure, write one JSON document."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import _harness as harness
from peers.training import Outcome, Setting, training_contender


def main() -> None:
    request = json.loads(sys.argv[1])
    paths = {key: Path(request["setting"][key]) for key in ("checkpoint", "data", "scratch")}
    setting = Setting(**request["setting"] | paths)
    limit = None
    if request["limit_folder"]:
        limit = harness.MemoryLimit(Path(request["limit_folder"]), request["limit_kind"])
        limit.add(os.getpid())
    torch.set_num_threads(request["threads"])
    with contextlib.redirect_stdout(sys.stderr):
        runner = training_contender(request["contender"])
        document = measure(runner, setting, limit)
    Path(request["result"]).write_text(json.dumps(document))


def measure(runner: Any, setting: Setting, limit: harness.MemoryLimit | None) -> dict[str, Any]:
    """Losses, seconds of each step, by how much the resident set grew, and what the parameters are in the end."""
    _warm_up()
    baseline_bytes = harness.status_bytes("VmRSS")

    def begin() -> None:
        trim()
        harness.reset_rss_peak()
        if limit is not None:
            limit.set_bytes(baseline_bytes + setting.budget_bytes)

    outcome: Outcome = runner.run(replace(setting, begin=begin))
    peak_bytes = outcome.peak_growth_bytes
    document = {
        "losses": outcome.losses,
        "step_s": outcome.step_s,
        "baseline_rss_bytes": baseline_bytes,
        "peak_growth_bytes": harness.status_bytes("VmHWM") - baseline_bytes if peak_bytes is None else peak_bytes,
        "parameters": digest(outcome, setting.checkpoint),
        "limited": limit.kind if limit else "no",
        "facts": outcome.facts,
    }
    outcome.close()
    return document


def trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library kept of the setup is not what training takes


def digest(outcome: Outcome, checkpoint: Path) -> str:
    """Of all parameters, one in memory at a time."""
    names = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        found.update(outcome.value(name).contiguous().numpy().data)
    return found.hexdigest()


def _warm_up() -> None:
    """A step of a tiny model of the same kind: libraries' code, threads and their buffers are nobody's growth."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(1, 16, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    large = torch.ones(512, 512)
    (large @ large).softmax(-1)
    del model, optimizer, large
    trim()


if __name__ == "__main__":
    main()
