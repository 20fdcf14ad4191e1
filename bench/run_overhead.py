"""What ``brim run`` costs a program that fits: at its start, and in each step.

    python bench/run_overhead.py [--rounds 9] [--steps 300] [--output measurements/run_overhead_cpu.jsonl]

Two programs. ``import``: imports PyTorch and ends; its wall time beside plain ``python``. ``train``: a small
transformer under AdamW whose steps time themselves; the time of its first step, and the median of the later ones.
Plain and ``brim run`` take turns in fresh processes; ratios are of the two runs of one round, and their median is
printed. One JSON line per run is appended to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import Spread, machine_facts
from brim.units import format_seconds

IMPORTS = "import torch\n"
TRAINS = """
import json, statistics, sys, time
begin = time.perf_counter()
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
imported = time.perf_counter()
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(4, 32, 128)
took = []
for _ in range(int(sys.argv[1])):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    took.append(time.perf_counter() - start)
print(json.dumps({"first_s": took[0], "step_s": statistics.median(took[5:]), "import_s": imported - begin}))
"""


def once(script: Path, arguments: list[str], *, with_brim: bool) -> dict[str, float]:
    """One run in a fresh process: its wall time, and what it says of itself."""
    command = [sys.executable, *(["-m", "brim", "run"] if with_brim else []), str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wall_s = time.perf_counter() - start_s
    return {"wall_s": wall_s, **(json.loads(done.stdout) if done.stdout else {})}


def pairs(script: Path, arguments: list[str], rounds: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(plain, under brim run) of each round, who goes first taking turns; a round to warm up is not kept."""
    found = []
    for number in range(rounds + 1):
        order = (False, True) if number % 2 else (True, False)
        made = {with_brim: once(script, arguments, with_brim=with_brim) for with_brim in order}
        found.append((made[False], made[True]))
    return found[1:]


def measure(rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        imports, trains = Path(folder) / "imports.py", Path(folder) / "trains.py"
        imports.write_text(IMPORTS)
        trains.write_text(TRAINS)
        started = pairs(imports, [], rounds)
        trained = pairs(trains, [str(steps)], rounds)

    def spread(values: list[float]) -> dict[str, float]:
        return vars(Spread.of(values))

    return {
        "start_plain_s": spread([plain["wall_s"] for plain, _ in started]),
        "start_added_s": spread([brim["wall_s"] - plain["wall_s"] for plain, brim in started]),
        "first_step_plain_s": spread([plain["first_s"] for plain, _ in trained]),
        "first_step_added_s": spread([brim["first_s"] - plain["first_s"] for plain, brim in trained]),
        "step_plain_s": spread([plain["step_s"] for plain, _ in trained]),
        "step_ratio": spread([brim["step_s"] / plain["step_s"] for plain, brim in trained]),
        # Both runs of a round are as noisy as this: how far two plain medians are apart.
        "step_noise": statistics.pstdev([plain["step_s"] for plain, _ in trained])
        / statistics.mean([plain["step_s"] for plain, _ in trained]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = measure(options.rounds, options.steps)
    for name in ("start_plain_s", "start_added_s", "first_step_plain_s", "first_step_added_s", "step_plain_s"):
        one = found[name]
        print(f"{name:20} {format_seconds(one['median']):>9}  ({one['least']:.4f} to {one['most']:.4f} s)")
    ratio = found["step_ratio"]
    print(f"{'step_ratio':20} {ratio['median']:9.4f}  ({ratio['least']:.4f} to {ratio['most']:.4f})")
    print(f"{'step_noise':20} {found['step_noise']:9.4f}")
    if options.output:
        document = {**found, "rounds": options.rounds, "steps": options.steps, **machine_facts(("torch", "brim"))}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
