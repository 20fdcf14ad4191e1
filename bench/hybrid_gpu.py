"""What does not fit VRAM, at batch 1: brought by the link, computed by the CPU, or both at once.

    python bench/hybrid_gpu.py --output measurements/hybrid_gpu.jsonl
    python bench/hybrid_gpu.py --device emulated --tiny --rounds 1        the logic, without a GPU

15 B parameters in bf16 (29.8 GB, random) in host memory, 12 GiB of device memory; a forward of one token. Contenders,
all with as many residents as fit: ``streaming`` brings the rest through the ring; ``cpu`` computes it in RAM, with
the ring's room given to residents (what llama.cpp does with layers that are not on the GPU); ``hybrid`` does both,
split at the rates that the first two show (``split``) and at two shares beside that. Rounds are interleaved, numbers
are medians; the least a step can take is overflow / (link + RAM), with the rates of the same rounds. One JSON line
per run is appended to --output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import _gpu_model as models
import _harness as harness
from brim.core import Plan
from brim.core.hardware import RAM, VRAM
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.techniques.blocks import Partition
from brim.techniques.streaming.placement import loading_triggers
from brim.techniques.streaming.weight_streaming import COMPUTE_RAM, FROM_RAM, NAME, RESIDENT, RING_SLOTS, Weights
from brim.units import format_bytes, parse_bytes
from support.hybrid import compute_some_in_ram, split

_STEP_BYTES = 1 << 30  # workspaces, and the activations of one token
_BESIDE = (0.8, 1.25)  # of the split's share, tried too: the rates of one alone are not those beside the other


def main() -> None:
    options = _options()
    shape = models.TINY if options.tiny else models.FULL
    size = models.weights_bytes(shape)
    options.vram = options.vram or (int(0.5 * size) if options.tiny else parse_bytes("12GiB"))
    model = models.shared_model(models.make_shared(shape), shape)
    document = run(model, options, size)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")
    show(document)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulated"))
    parser.add_argument("--vram", type=parse_bytes, help="device memory (12GiB; tiny: half of the model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forwards", type=int, default=5, help="forwards per round")
    parser.add_argument("--tiny", action="store_true", help="a model of 3 MB")
    parser.add_argument("--output", type=Path, help="append one JSON line here")
    return parser.parse_args()


def run(model: Any, options: argparse.Namespace, size: int) -> dict[str, Any]:
    """All rounds: streaming and CPU alone first, which say where to split."""
    if options.device == "cuda":
        share = options.vram / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    partition, plan = _plan(model, options, size)
    rows: dict[str, list[dict[str, Any]]] = {}
    shares: dict[str, float] = {"streaming": 0.0, "cpu": 1.0}
    for number in range(options.rounds):
        for name, share in list(shares.items()):
            rows.setdefault(name, []).append(_measure(model, partition, _way(plan, partition, name, share), options))
            say(name, f"{rows[name][-1]['forward_s'] * 1e3:.1f} ms a forward")
        if number == 0:
            shares |= _hybrids(rows)
            for name in list(shares)[2:]:  # so that every contender has every round
                rows[name] = [_measure(model, partition, _way(plan, partition, name, shares[name]), options)]
                say(name, f"{rows[name][-1]['forward_s'] * 1e3:.1f} ms a forward")
    return _document(rows, shares, options, size)


def _plan(model: Any, options: argparse.Namespace, size: int) -> tuple[Partition, Plan]:
    budget = {VRAM: options.vram, RAM: size + (256 << 20)}
    need = Need(step_bytes=0 if options.tiny else _STEP_BYTES)
    return make_plan(model, machine(options.device), budget, need, Weights(), task="forward")


def _way(plan: Plan, partition: Partition, name: str, share: float) -> Plan:
    made = compute_some_in_ram(plan, partition, share)
    return _ring_for_residents(made) if name == "cpu" else made


def _ring_for_residents(plan: Plan) -> Plan:
    """Nothing passes through the ring: as many blocks as it has slots stay instead."""
    kept = [d.block for d in plan.decisions if d.choice == COMPUTE_RAM][: plan.settings[RING_SLOTS]]
    return replace(
        plan, decisions=tuple(replace(d, choice=RESIDENT) if d.block in kept else d for d in plan.decisions)
    )


def _hybrids(rows: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The split that the two alone suggest, and two beside it."""
    link, host = (rows[name][0]["overflow_bytes"] / rows[name][0]["forward_s"] for name in ("streaming", "cpu"))
    overflow = rows["streaming"][0]["overflow_bytes"]
    best = split(overflow, link_bytes_per_s=link, host_bytes_per_s=host).host_bytes / overflow
    return {f"hybrid {share:.2f}": share for share in (best, *(min(0.95, best * factor) for factor in _BESIDE))}


def _measure(model: Any, partition: Partition, plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    choices = plan.choices(NAME)
    # Of a table only rows are needed, wherever it is.
    sizes = {block.name: block.bytes * bool(loading_triggers(block)) for block in partition.blocks}
    handle = put_in_force(model, partition, plan, machine(options.device), Weights(), options.device)
    ids = torch.zeros(1, 1, dtype=torch.long, device=handle.memory.device)
    with torch.inference_mode():
        times = []
        for _ in range(2 + options.forwards):  # two to learn the order and to warm up
            start_s = time.perf_counter()
            logits = model(input_ids=ids, use_cache=False).logits.float().cpu()
            times.append(time.perf_counter() - start_s)
    held = handle.timeline().facts
    handle.remove()
    return {
        "forward_s": harness.Spread.of(times[2:]).median,
        "overflow_bytes": sum(sizes[name] for name, choice in choices.items() if choice != RESIDENT),
        "host_bytes": sum(sizes[name] for name, choice in choices.items() if choice == COMPUTE_RAM),
        "link_bytes": sum(sizes[name] for name, choice in choices.items() if choice == FROM_RAM),
        "held_bytes": {tier: held[f"held_bytes.{tier}"] for tier in (VRAM, RAM)},
        "logits": logits[0, -1, :8].tolist(),
    }


def _document(
    rows: dict[str, list[dict[str, Any]]], shares: dict[str, float], options: argparse.Namespace, size: int
) -> dict[str, Any]:
    medians = {name: harness.Spread.of([row["forward_s"] for row in found]).median for name, found in rows.items()}
    link, host = (rows[name][0]["overflow_bytes"] / medians[name] for name in ("streaming", "cpu"))
    overflow = rows["streaming"][0]["overflow_bytes"]
    best = min((name for name in medians if name.startswith("hybrid")), key=medians.__getitem__)
    return {
        "benchmark": "hybrid_gpu",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine_facts(("brim", "torch", "transformers")),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "weights_bytes": size,
        "budget_bytes": options.vram,
        "link_bytes_per_s": link,
        "host_bytes_per_s": host,
        "bound_s": split(overflow, link_bytes_per_s=link, host_bytes_per_s=host).seconds,
        "over_streaming": medians["streaming"] / medians[best],
        "over_cpu": medians["cpu"] / medians[best],
        "rows": {
            name: {
                "share": shares[name],
                "forward_s": vars(harness.Spread.of([row["forward_s"] for row in found])),
                **{key: value for key, value in found[0].items() if key != "forward_s"},
            }
            for name, found in rows.items()
        },
    }


def show(document: dict[str, Any]) -> None:
    console = Console(width=120)
    console.print(
        f"weights {format_bytes(document['weights_bytes'])}, budget {format_bytes(document['budget_bytes'])}, link "
        f"{document['link_bytes_per_s'] / 1e9:.1f} GB/s, CPU {document['host_bytes_per_s'] / 1e9:.1f} GB/s, least "
        f"{document['bound_s'] * 1e3:.1f} ms"
    )
    table = Table("contender", "ms a forward", "by the CPU", "by the link")
    for name, row in document["rows"].items():
        table.add_row(name, f"{row['forward_s']['median'] * 1e3:.1f}", *_amounts(row))
    console.print(table)
    console.print(f"hybrid: {document['over_streaming']:.2f} x streaming, {document['over_cpu']:.2f} x CPU layers")


def _amounts(row: dict[str, Any]) -> Sequence[str]:
    return [format_bytes(row[key]) for key in ("host_bytes", "link_bytes")]


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
