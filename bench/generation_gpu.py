"""Loading a checkpoint and decoding: brim beside transformers, with all of the weights on the GPU and with less.

    python bench/generation_gpu.py --output measurements/generation_gpu.jsonl
    python bench/generation_gpu.py --device cpu --tiny --rounds 1          the logic, without a GPU

A Llama of 3 B parameters in bf16 with random weights, written to --directory first; a prompt of 64 tokens, greedy,
batch 1. ``resident``: all of VRAM, where brim replays a CUDA graph for a token, or ``without-graphs`` launches each
kernel; ``budget``: half of the bytes of the weights, for transformers by
``device_map="auto"``. Each way runs in a process of its own; rounds take turns; numbers are medians. The bound of a
token's seconds is one reading of the weights at the GPU's rate, or of those that do not fit over the link. One JSON
line per run is appended to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import _gpu_checkpoint
import _harness as harness
import brim
from _checkpoint import TINY, Shape
from brim.processes import python_command

SHAPE = Shape(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, vocabulary=32_000)
WAYS = (
    "transformers resident", "brim resident", "brim-without-graphs resident", "transformers budget", "brim budget",
)  # fmt: skip
PROMPT_TOKENS, NEW_TOKENS = 64, 65


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Load and decode in one way, in this process."""
    from transformers import AutoModelForCausalLM

    device, folder = request["device"], request["folder"]
    peer, memory = request["way"].split()
    in_budget = memory == "budget"
    budget_bytes = max(request["weights_bytes"] // 2, 80 << 20)  # the program itself takes 64 MiB
    start = time.perf_counter()
    promised_bytes: Any = None
    if peer != "transformers":
        kind = device if device == "cuda" or not in_budget else "emulated"
        model: Any = brim.load(
            folder, device=kind, vram=budget_bytes if in_budget else None, cuda_graphs=peer == "brim"
        )
        promised_bytes = dict(model.brim.plan.promise.peak_bytes)
    elif in_budget:
        limits = {0 if device == "cuda" else "cpu": budget_bytes if device == "cuda" else 1 << 40, "cpu": 1 << 40}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="auto", max_memory=limits)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    load_s = time.perf_counter() - start

    prompt = torch.arange(3, 3 + PROMPT_TOKENS)[None] % request["vocabulary"]
    prompt = prompt.to(device if device == "cuda" else "cpu")

    def generate(tokens: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False,
        )  # fmt: skip
        ids: list[int] = made[0, PROMPT_TOKENS:].tolist()
        return time.perf_counter() - start, ids

    first_s, _ = generate(1)
    one_s, _ = generate(1)
    all_s, ids = generate(NEW_TOKENS)
    return {
        "load_s": load_s,
        "first_call_s": first_s,
        "token_s": (all_s - one_s) / (NEW_TOKENS - 1),
        "reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "promised_bytes": promised_bytes,
        "graph_replays": model.brim.timeline().facts.get("graph_replays") if peer != "transformers" else None,
        "tokens": ids,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All ways in turns; medians by way."""
    shape = TINY if options.tiny else SHAPE
    folder = options.directory / ("llama-bf16-tiny" if options.tiny else "llama-bf16-3B")
    weights_bytes = _gpu_checkpoint.write_bf16(folder, shape)
    request = {
        "device": options.device, "folder": str(folder), "weights_bytes": weights_bytes,
        "vocabulary": shape.vocabulary,
    }  # fmt: skip
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in options.only}
    for _ in range(options.rounds):
        for way in options.only:
            done = subprocess.run(
                python_command(__file__, "--work", json.dumps(request | {"way": way})),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            row = {"problem": " ".join(done.stderr.split())[-300:]} if done.returncode else _last(done.stdout)
            rounds[way].append(row)
            print(f"{way}: {row.get('problem') or format_row(row)}", file=sys.stderr, flush=True)
    rows = {way: _median(several) for way, several in rounds.items()}
    reference = rows.get("transformers resident", {}).get("tokens")
    for row in rows.values():
        row["tokens_equal"] = reference is not None and row.pop("tokens", None) == reference
    bounds = {}
    if options.device == "cuda":
        hardware = brim.probe(device="cuda")
        bounds = {
            "resident": weights_bytes / hardware.tier("vram").bytes_per_s,
            "budget": weights_bytes / 2 / hardware.link("ram", "vram").bytes_per_s,
        }
    return {
        "benchmark": "generation_gpu",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine_facts(("brim", "torch", "transformers", "accelerate")),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "weights_bytes": weights_bytes,
        "bounds_s": bounds,
        "rows": rows,
    }


def format_row(row: dict[str, Any]) -> str:
    """Return a line on a row."""
    reserved = row.get("reserved_bytes")
    memory = "" if reserved is None else f", {reserved / 2**20:,.0f} MiB reserved"
    replays = row.get("graph_replays")
    memory += f", {replays:.0f} passes by a graph" if replays else ""
    return f"loaded in {row['load_s']:.1f} s, first call {row['first_call_s']:.2f} s, " + (
        f"{row['token_s'] * 1e3:.1f} ms a token{memory}"
    )


def _last(text: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(text.splitlines()[-1])
    return row


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    problem = next((row for row in rows if "problem" in row), None)
    if problem is not None:
        return problem
    medians = {key: statistics.median(row[key] for row in rows) for key in ("load_s", "first_call_s", "token_s")}
    return rows[0] | medians


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--directory", type=Path, default=cache, help="where the weights go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB")
    parser.add_argument("--output", type=Path, help="append one JSON line here")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        print(json.dumps(work(options.work)))
        return
    document = measure(options)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")
    for way, row in document["rows"].items():
        print(f"{way:28} {row.get('problem') or format_row(row)}")


if __name__ == "__main__":
    main()
