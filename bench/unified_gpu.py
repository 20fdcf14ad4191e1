"""A working set larger than VRAM, three ways: planned streaming, page-locked memory behind RMM, managed memory.

    python bench/unified_gpu.py [--vram 4GiB] [--set 8GiB] [--rounds 3] [--output measurements/unified_gpu.jsonl]

A stack of linear layers in bf16 of ``--set`` bytes; forward passes of one token (bound by the link) and of 2,048.
Managed memory is measured only where the whole set is below what the card has free: more has hung drivers. Each way
runs in a fresh process per round, rounds are interleaved, numbers are medians; ``times`` is the time of unified
memory over that of streaming. The outputs are compared, bit for bit. One JSON line per run is appended to --output,
and every process tells on stderr when it is done. Needs an NVIDIA GPU, and RMM (rmm-cu12 or rmm-cu13, from 25.12).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _harness import machine_facts
from brim.processes import python_command
from brim.units import format_seconds, parse_bytes

WIDTH = 8192
WAYS = ("stream", "pinned", "managed")
TOKENS = (1, 2048)
PASSES, WARM_UP = 8, 3
WORK = """
import json, statistics, sys, time
way, vram, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tokens = json.loads(sys.argv[4])
import torch
from torch import nn
from brim.run.script.settings import Settings
width = {width}
count = total // (2 * width * width)
unified = None
if way != "stream":
    from brim.run.script.unified import Unified
    settings = Settings(vram=vram, ram=total, mode="unified", managed=way == "managed")
    unified = Unified.for_process(settings)
torch.manual_seed(0)
# Values neither grow nor vanish from layer to layer.
tile = (torch.randn(width, width) / width**0.5).bfloat16()
found = {{}}
with torch.no_grad():
    model = nn.Sequential()
    for number in range(count):
        layer = nn.utils.skip_init(nn.Linear, width, width, bias=False, dtype=torch.bfloat16)
        layer.weight.copy_(tile.roll(number, 0))
        model.append(layer if way == "stream" else layer.to("cuda"))
    if way == "stream":
        import brim
    for rows in tokens:
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        if way == "stream":
            handle = brim.fit(model, vram=vram, ram=2 * total, example=(x,), device="cuda")
        x = x.to("cuda")
        took = []
        for _ in range({passes}):
            torch.cuda.synchronize()
            start = time.perf_counter()
            y = model(x)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        found[rows] = {{"step_s": statistics.median(took[{warm_up}:]), "sum": y.double().sum().item()}}
        if way == "stream":
            handle.remove()
print(json.dumps({{"tokens": found, "unified": None if unified is None else unified.statistics()}}))
"""


def once(way: str, vram: int, total: int) -> dict[str, Any]:
    """What one process found: by tokens, seconds a pass and the sum of the output; or the error it ended with."""
    work = WORK.format(width=WIDTH, passes=PASSES, warm_up=WARM_UP)
    command = python_command("-c", work, way, str(vram), str(total), json.dumps(TOKENS))
    begin_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(
        f"{way}: exit code {done.returncode} after {time.perf_counter() - begin_s:.0f} s", file=sys.stderr, flush=True
    )
    if done.returncode:
        return {"error": f"exit code {done.returncode}", "stderr": done.stderr[-4000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(runs: dict[str, list[dict[str, Any]]], rows: int) -> dict[str, Any]:
    """Of one number of tokens: median seconds of each way, how many times streaming is faster, whether all agree."""
    found: dict[str, Any] = {}
    sums = set()
    for way, made in runs.items():
        rounds = [one["tokens"][str(rows)] for one in made if "tokens" in one]
        sums |= {one["sum"] for one in rounds}
        if rounds:
            found[way] = statistics.median(one["step_s"] for one in rounds)
            print(f"{rows:5} tokens, {way:8} {format_seconds(found[way])} a pass")
        else:
            print(f"{rows:5} tokens, {way:8} {made[0]['error']}\n{made[0]['stderr']}")
    found["same_output"] = len(sums) == 1
    if "stream" in found and "pinned" in found:
        found["times"] = found["pinned"] / found["stream"]
        print(f"{rows:5} tokens: streaming is {found['times']:.2f} times as fast as unified memory")
    if not found["same_output"]:
        print(f"{rows:5} tokens: the outputs differ: {sorted(sums)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vram", type=parse_bytes, default=parse_bytes("4GiB"))
    parser.add_argument("--set", dest="total", type=parse_bytes, default=parse_bytes("8GiB"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            runs[way].append(once(way, options.vram, options.total))
    document: dict[str, Any] = {"vram_bytes": options.vram, "set_bytes": options.total, "runs": runs}
    document["tokens"] = {rows: summary(runs, rows) for rows in TOKENS}
    if options.output:
        import torch

        document |= {"gpu": torch.cuda.get_device_name(), **machine_facts(("torch", "brim", "rmm-cu12", "rmm-cu13"))}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
