"""What ``brim.watch`` costs: a training step with and without it, and the time to write the file.

``python bench/watch.py [--rounds 15] [--seconds 4] [--json FILE]`` takes two and a half minutes of an idle machine
and adds a line to ``measurements/watch_cpu.jsonl`` (``watch_cuda.jsonl`` where there is a GPU). On a machine with
CUDA it is PyTorch's recorder that is measured (stacks of Python, a ring of 100,000 events); elsewhere the sampling of
resident memory. Rounds with and without take turns, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import brim
from _harness import Spread, machine_facts
from brim.core import Timeline
from brim.memory.tiers import cpu_memory
from brim.planning.seconds.spans import ComputeSpans

MEASUREMENTS = Path(__file__).resolve().parents[1] / "measurements"


def training_step(device: str) -> Callable[[], None]:
    """One step of a small transformer, of many small allocations: what a recorder of allocations finds hardest."""
    torch.manual_seed(0)
    width = 512 if device == "cuda" else 128
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True), 6, enable_nested_tensor=False
    ).to(device)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4, foreach=False)
    inputs = torch.randn(4, 64, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        layers(inputs).square().mean().backward()
        optimizer.step()

    return step


def steps_per_s(step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Steps for each second of the clock, and of all threads' time, which busy neighbours disturb less."""
    count, start, start_cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        step()
        count += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start), count / (time.process_time() - start_cpu)


def write_s(step: Callable[[], None], path: Path, seconds: float) -> tuple[float, int]:
    """Seconds that leaving the block takes when the ring is full and the file is asked for, and the file's bytes."""
    with brim.watch(path, on_exit=True):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            step()
        start = time.perf_counter()
    return time.perf_counter() - start, path.stat().st_size


def span_s(calls: int = 4_000) -> float:
    """What recording when a block computed costs, for each call of a block (``brim generate`` and ``brim train``)."""
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    nothing = torch.zeros(1)

    def took_s() -> float:
        start = time.process_time()
        for _ in range(calls // 10):
            model(nothing)
        return time.process_time() - start

    plain = min(took_s() for _ in range(3))
    memory = cpu_memory(Timeline("spans", measured=True), ram_bytes=1 << 30)
    found = []
    for _ in range(3):
        with ComputeSpans(model, [str(number) for number in range(10)], memory):
            found.append(took_s())
    memory.close()
    return (min(found) - plain) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = training_step(device)
    steps_per_s(step, 2.0)
    slower: dict[str, list[float]] = {"wall": [], "cpu": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.brim"
        for number in range(options.rounds):
            rates = {}
            for watched in (True, False) if number % 2 else (False, True):
                if watched:
                    with brim.watch(path):
                        rates[watched] = steps_per_s(step, options.seconds)
                else:
                    rates[watched] = steps_per_s(step, options.seconds)
            for kind, with_it, without in zip(slower, rates[True], rates[False], strict=True):
                slower[kind].append(without / with_it - 1)
        took_s, size = write_s(step, path, 4 * options.seconds)
    for kind, found in slower.items():
        overhead = Spread.of(found)
        print(f"{device}, {kind}: {overhead.median:+.2%} a step ({overhead.least:+.2%} to {overhead.most:+.2%})")
    per_span_s = span_s()
    print(f"recording when a block computed: {per_span_s * 1e6:.1f} us for each call of one")
    print(f"written in {took_s:.2f} s: {size / 1e6:.1f} MB")
    output = options.json or MEASUREMENTS / f"watch_{device}.jsonl"
    with output.open("a", encoding="utf-8") as file:
        medians = {kind: statistics.median(found) for kind, found in slower.items()}
        row = {"device": device, "overhead": slower, "overhead_median": medians}
        facts = machine_facts(["brim", "torch"])
        row |= {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "write_s": took_s,
            "file_bytes": size,
            "span_s": per_span_s,
        }
        file.write(json.dumps(row | {"machine": facts}) + "\n")


if __name__ == "__main__":
    main()
