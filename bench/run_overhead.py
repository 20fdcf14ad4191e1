"""What `brim run` costs a program that fits: at its start, at its first call of a model, and in each step.

    python bench/run_overhead.py [--rounds 9] [--steps 300] [--output measurements/run_overhead_cpu.jsonl]

Four runs of three programs. ``import``: imports PyTorch and ends. ``train``: a small transformer under AdamW, with
the default budget, which is ample for it. ``tight``: the same in ``TIGHT``, 1.2 times what it takes, where no rough
bound will do. ``forward``: forward passes of a small network in 1.2 times what it takes. Seconds are of CPU, user
and system, of one thread: whoever else uses the machine counts less. ``added_s`` is that of the whole process,
start and first call together, beyond plain ``python``; ``step_ratio`` is of the medians of the steps but the first
ones; ``added_wall_s`` is ``added_s`` by the clock. Plain and `brim run` take turns in fresh processes, bytecode
compiled before; differences and ratios are of the two runs of one round. One JSON line per run is appended to
--output.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import Spread, machine_facts
from brim.processes import python_command
from brim.units import format_seconds

IMPORTS = "import torch\n"
TIGHT, TIGHT_FORWARD = "30MiB", "26MiB"
TRAINS = """
import json, statistics, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(4, 32, 128)
took = []
for _ in range(int(sys.argv[1])):
    start = time.process_time()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    took.append(time.process_time() - start)
print(json.dumps({"step_s": statistics.median(took[5:]), "later_s": sum(took[1:])}))
"""
FORWARD = """
import json, statistics, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024))
x = torch.randn(64, 1024)
took = []
with torch.no_grad():
    for _ in range(int(sys.argv[1])):
        start = time.process_time()
        model(x)
        took.append(time.process_time() - start)
print(json.dumps({"step_s": statistics.median(took[5:]), "later_s": sum(took[1:])}))
"""


def once(script: Path, arguments: list[str], options: list[str] | None, folder: Path) -> dict[str, float]:
    """A run in a fresh process, without brim where ``options`` is None: its CPU time, and what it says of itself."""
    brim = [] if options is None else ["-m", "brim", "run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # brim and the program alike are compiled once, as installed ones
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = python_command(*brim, script, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    after, end_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    if done.stderr:
        raise SystemExit(f"It was to be left alone, and is not: {done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "wall_s": end_s - begin_s, **(json.loads(done.stdout) if done.stdout else {})}


def pairs(
    script: Path, arguments: list[str], options: list[str], folder: Path, rounds: int
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(plain, under brim run) of each round, who goes first taking turns; a round to warm up is not kept."""
    found = []
    for number in range(rounds + 1):
        order = (None, options) if number % 2 else (options, None)
        made = {one is None: once(script, arguments, one, folder) for one in order}
        found.append((made[True], made[False]))
    return found[1:]


def measure(rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        imports, trains, forward = (folder / f"{name}.py" for name in ("imports", "trains", "forward"))
        imports.write_text(IMPORTS)
        trains.write_text(TRAINS)
        forward.write_text(FORWARD)
        runs = {
            "import": pairs(imports, [], [], folder, rounds),
            "train": pairs(trains, [str(steps)], [], folder, rounds),
            "tight": pairs(trains, [str(steps)], ["--ram", TIGHT], folder, rounds),
            "forward": pairs(forward, [str(steps)], ["--ram", TIGHT_FORWARD], folder, rounds),
        }
    found: dict[str, Any] = {}
    for name, made in runs.items():
        columns = {"plain_s": [plain["cpu_s"] for plain, _ in made]}
        columns["added_wall_s"] = [_beside(brim, "wall_s") - _beside(plain, "wall_s") for plain, brim in made]
        if name == "import":
            columns["added_s"] = [brim["cpu_s"] - plain["cpu_s"] for plain, brim in made]
        else:  # less what more or fewer seconds in the steps are due to
            columns["added_s"] = [_beside(brim) - _beside(plain) for plain, brim in made]
            columns["step_s"] = [plain["step_s"] for plain, _ in made]
            columns["step_ratio"] = [brim["step_s"] / plain["step_s"] for plain, brim in made]
        found[name] = {key: vars(Spread.of(values)) for key, values in columns.items()}
        if "step_s" in columns:  # both runs of a round are as noisy as this
            found[name]["step_noise"] = statistics.pstdev(columns["step_s"]) / statistics.mean(columns["step_s"])
    return found


def _beside(run: dict[str, float], clock: str = "cpu_s") -> float:
    """Seconds of everything but the steps after the first."""
    return run[clock] - run.get("later_s", 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = measure(options.rounds, options.steps)
    for name, columns in found.items():
        for key, one in columns.items():
            if isinstance(one, float):
                print(f"{name:8} {key:12} {one:9.4f}")
                continue
            told = f"{one['median']:9.4f}" if key == "step_ratio" else f"{format_seconds(one['median']):>9}"
            print(f"{name:8} {key:12} {told}  ({one['least']:.4f} to {one['most']:.4f})")
    if options.output:
        document = {**found, "rounds": options.rounds, "steps": options.steps, **machine_facts(("torch", "brim"))}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
