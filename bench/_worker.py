"""One contender in a process of its own: load, run, measure, write one JSON document. Started by streaming.py."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import _harness as harness
from peers import Contender, Loaded, Setting, contender

PROMPT_SEED = 7
_LONG_S = 5.0


def main() -> None:
    request = json.loads(sys.argv[1])
    paths = {key: Path(request["setting"][key]) for key in ("checkpoint", "scratch")}
    setting = Setting(**request["setting"] | paths)
    limit = None
    if request["limit_folder"]:
        limit = harness.MemoryLimit(Path(request["limit_folder"]), request["limit_kind"])
        limit.add(os.getpid())
    torch.set_num_threads(request["threads"])
    with contextlib.redirect_stdout(sys.stderr):
        runner = contender(request["contender"])
        if request["prepare"]:
            runner.prepare(setting)
            document: dict[str, Any] = {}
        else:
            document = measure(runner, setting, request, limit)
    Path(request["result"]).write_text(json.dumps(document))


def measure(
    runner: Contender, setting: Setting, request: dict[str, Any], limit: harness.MemoryLimit | None
) -> dict[str, Any]:
    """Load, one forward with a cold page cache, some in a row, a few tokens where asked; with what each took."""
    ids = prompt(setting.checkpoint, request["prompt_tokens"])
    importlib.import_module("transformers.models.llama.modeling_llama")  # code is no part of what a contender holds
    torch.nn.functional.linear(torch.ones(16, 64), torch.ones(64, 64))  # nor is the thread pool
    files = [setting.checkpoint, setting.scratch]
    harness.drop_page_cache(files)
    document: dict[str, Any] = {"baseline_rss_bytes": harness.status_bytes("VmRSS")}
    document["baseline_anonymous_bytes"] = harness.status_bytes("RssAnon")
    harness.reset_rss_peak()
    limit_bytes = setting.budget_bytes + document["baseline_rss_bytes"]
    if limit is not None and not runner.CONVERTS_IN_LOAD:
        limit.set_bytes(limit_bytes)
    read_bytes, start_s = harness.disk_read_bytes(), time.perf_counter()
    loaded = runner.load(setting)
    document |= {"load_s": time.perf_counter() - start_s, "load_read_bytes": harness.disk_read_bytes() - read_bytes}
    if runner.CONVERTS_IN_LOAD:
        harness.drop_page_cache(files)
        harness.reset_rss_peak()
        if limit is not None:
            limit.set_bytes(limit_bytes)
    with torch.inference_mode():
        document |= _forwards(loaded, ids, files, request)
    document["peak_rss_bytes"] = harness.status_bytes("VmHWM")
    document |= loaded.facts()
    loaded.close()
    return document


def _forwards(loaded: Loaded, ids: torch.Tensor, files: list[Path], request: dict[str, Any]) -> dict[str, Any]:
    harness.drop_page_cache(files)
    document: dict[str, Any] = {"cached_before_bytes": harness.cached_bytes(files)}
    logits, document["cold_s"], document["cold_read_bytes"] = _timed(lambda: loaded.forward(ids))
    save_file({"logits": logits.float().contiguous()}, request["logits"])
    # One is enough of a contender that takes long: its spread is small beside what it takes.
    count = request["steady"] if document["cold_s"] < _LONG_S else 1

    def several() -> None:
        for _ in range(count):
            loaded.forward(ids)

    _, elapsed_s, read_bytes = _timed(several)
    document |= {"steady_s": elapsed_s / count, "steady_read_bytes": read_bytes // count}
    if request["decode"] and loaded.generate is not None:
        generate, tokens = loaded.generate, request["decode"]
        _, elapsed_s, read_bytes = _timed(
            lambda: generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, use_cache=True)
        )
        document |= {"token_s": elapsed_s / tokens, "token_read_bytes": read_bytes // tokens}
    return document


def _timed(call: Any) -> tuple[Any, float, int]:
    """What the call gave, its seconds, and the bytes that it made the disk read."""
    read_bytes, start_s = harness.disk_read_bytes(), time.perf_counter()
    given = call()
    return given, time.perf_counter() - start_s, harness.disk_read_bytes() - read_bytes


def prompt(checkpoint: Path, tokens: int) -> torch.Tensor:
    """Token ids [1, tokens], the same in every process."""
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    return torch.randint(0, vocabulary, (1, tokens), generator=generator)


if __name__ == "__main__":
    main()
