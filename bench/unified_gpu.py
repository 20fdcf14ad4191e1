"""A working set larger than VRAM, three ways: planned streaming, page-locked memory behind RMM, managed memory.

    python bench/unified_gpu.py [--vram 4GiB] [--set 8GiB] [--rounds 5] [--output measurements/unified_gpu.jsonl]

A stack of linear layers in bf16 of ``--set`` bytes; forward passes of one token (bound by the link) and of 2,048.
Managed memory is measured only where the whole set is below what the card has free: more has hung drivers. Each way
runs in a fresh process per round, rounds are interleaved, numbers are medians; ``times`` is the time of unified
memory over that of streaming. One JSON line per run is appended to --output. Needs an NVIDIA GPU, and RMM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _harness import machine_facts
from brim.units import format_seconds, parse_bytes

WIDTH = 8192
WAYS = ("stream", "pinned", "managed")
WORK = """
import json, statistics, sys, time
way, vram, total, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
import torch
from torch import nn
from brim.run.launch import Settings
width = {width}
count = total // (2 * width * width)
unified = None
if way != "stream":
    from brim.run.unified import Unified
    settings = Settings(vram=vram, ram=total, mode="unified", managed=way == "managed")
    unified = Unified.for_process(settings)
place = "cpu" if way == "stream" else "cuda"
torch.manual_seed(0)
with torch.no_grad():
    model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=place)
                            for _ in range(count)])
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    if way == "stream":
        import brim
        brim.fit(model, vram=vram, ram=2 * total, example=(x,))
    took = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = model(x)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    print(json.dumps({{"step_s": statistics.median(took[2:]), "sum": y.float().sum().item(),
                       "unified": None if unified is None else unified.statistics()}}))
"""


def once(way: str, vram: int, total: int, tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-c", WORK.format(width=WIDTH), way, str(vram), str(total), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vram", type=parse_bytes, default=parse_bytes("4GiB"))
    parser.add_argument("--set", dest="total", type=parse_bytes, default=parse_bytes("8GiB"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"vram_bytes": options.vram, "set_bytes": options.total, "tokens": {}}
    for tokens in (1, 2048):
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                runs[way].append(once(way, options.vram, options.total, tokens))
        found: dict[str, Any] = {"runs": runs}
        for way, made in runs.items():
            times = [one["step_s"] for one in made if "step_s" in one]
            if times:
                found[way] = statistics.median(times)
                print(f"{tokens:5} tokens, {way:8} {format_seconds(found[way])} a pass")
            else:
                print(f"{tokens:5} tokens, {way:8} {made[0]['error']}")
        if "stream" in found and "pinned" in found:
            found["times"] = found["pinned"] / found["stream"]
            print(f"{tokens:5} tokens: streaming is {found['times']:.2f} times as fast as unified memory")
        document["tokens"][tokens] = found
    if options.output:
        import torch

        document |= {"gpu": torch.cuda.get_device_name(), **machine_facts(("torch", "brim", "rmm-cu12", "rmm-cu13"))}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
