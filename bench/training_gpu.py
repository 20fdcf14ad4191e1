"""Train what does not fit the GPU: each claim about it measured, device memory capped where it says so.

    python bench/training_gpu.py --output measurements/training_gpu.jsonl          everything; about 20 minutes
    python bench/training_gpu.py --cases adam activations                          some of it
    python bench/training_gpu.py --tiny --device cpu --rounds 1                    the logic, without a GPU

    full        3 B parameters, full AdamW by ``brim train``, 12 GiB of VRAM
    lora        7 B parameters, LoRA by ``brim train``, 8 GiB of VRAM; the same with all of VRAM: at least 0.95 of it
    adam        1.1 B parameters, states in RAM, stepped beside backward by the GPU and by the CPU; the same in VRAM:
                at least 0.90 of it at large batches; torchao's CPUOffloadOptimizer beside it
    activations two stacks of blocks, activations in RAM: at most 3 % slower where compute covers the copies, and at
                least 90 % of the bytes that left saved at the peak

Weights are random, written to --directory first (6 and 14 GB). Each run is a fresh process; rounds are interleaved;
numbers are medians. ``set_per_process_memory_fraction`` holds PyTorch to the budget. Without a GPU a pool in RAM
plays VRAM. One JSON line per case is appended to --output as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import _gpu_checkpoint
import _gpu_model as models
import _harness as harness
from _checkpoint import Shape
from brim.measure.nvml import driver_version
from brim.units import format_bytes
from training import write_data

HERE = Path(__file__).resolve().parent
PACKAGES = ("brim", "torch", "transformers", "peft", "torchao")
GIB = 1 << 30
SHAPES = {
    "1.1B": Shape(hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, vocabulary=32_000),
    "3B": Shape(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, vocabulary=32_000),
    "7B": Shape(hidden=4096, intermediate=11_008, layers=32, heads=32, kv_heads=32, vocabulary=32_000),
}
# What a program takes of VRAM beside the model (64 MiB and workspaces) leaves no room for a smaller one to matter.
TINY = Shape(hidden=256, intermediate=704, layers=6, heads=4, kv_heads=2, vocabulary=1000)
Claim = dict[str, Any]
_ADAM = ("in_vram", "brim", "brim_cpu", "torchao")


def main() -> None:
    options = _options()
    options.directory.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.cases:
        begin_s = time.perf_counter()
        rows, claims = CASES[name](options)
        document = {
            "benchmark": "training_gpu",
            "case": name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "took_s": time.perf_counter() - begin_s,
            "tiny": options.tiny,
            "machine": harness.machine_facts(PACKAGES) | _device_facts(options.device),
            "claims": claims,
            "rows": rows,
        }
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a") as handle:
                handle.write(json.dumps(document) + "\n")
        show(document)
        failed |= any("problem" in row for label, row in rows.items() if "torchao" not in label)
    if failed:
        raise SystemExit("some runs failed; see above")


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--directory", type=Path, default=cache, help="where weights and outputs go")
    parser.add_argument("--rounds", type=int, default=2, help="of adam and activations")
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first ones are not timed")
    parser.add_argument("--batches", nargs="+", type=int, help="of adam: sequences of 1024 tokens")
    parser.add_argument("--tiny", action="store_true", help="models of a few MB")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    options.seq = 32 if options.tiny else 1024
    options.batches = options.batches or ([2] if options.tiny else [8, 32, 96])
    return options


# -- the cases


def full(options: argparse.Namespace) -> tuple[dict[str, Any], list[Claim]]:
    """3 B in 12 GiB."""
    budget_bytes = (176 << 20) if options.tiny else 12 * GIB
    row = _train(options, "3B", budget_bytes, method="full", batch=2 if options.tiny else 16)
    return {"full": row}, [_fits("3B full AdamW in 12 GiB of VRAM", row, budget_bytes)]


def lora(options: argparse.Namespace) -> tuple[dict[str, Any], list[Claim]]:
    """7 B in 8 GiB, and with everything resident."""
    budget_bytes, batch = (128 << 20, 2) if options.tiny else (8 * GIB, 32)
    rows = {
        "streamed": _train(options, "7B", budget_bytes, method="lora", batch=batch),
        "resident": _train(options, "7B", None, method="lora", batch=batch),
    }
    claims = [_fits("7B LoRA in 8 GiB of VRAM", rows["streamed"], budget_bytes)]
    ratio = _ratio(rows["streamed"], rows["resident"])
    claims.append(_claim("LoRA streamed: tokens/s of resident", ">=", 0.95, ratio))
    return rows, claims


def adam(options: argparse.Namespace) -> tuple[dict[str, Any], list[Claim]]:
    """The step with states in VRAM against that with states in RAM, by the GPU and by the CPU."""
    shape = models.TINY if options.tiny else SHAPES["1.1B"]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for batch in options.batches:
            for contender in _ADAM:
                request = {"contender": contender, "batch": batch, "seq": options.seq, "steps": options.steps}
                row = _work(options, "adam", None, {**request, "shape": asdict(shape)})
                found.setdefault(f"{contender} batch {batch}", []).append(row)
    rows = {label: _median(rows) for label, rows in found.items()}
    claims = []
    for batch in options.batches:
        for contender in _ADAM[1:]:
            ratio = _ratio(rows[f"{contender} batch {batch}"], rows[f"in_vram batch {batch}"], "step_s")
            largest = contender == "brim" and batch == max(options.batches)
            wanted = 0.90 if largest else None
            claims.append(_claim(f"{contender}: speed of in-VRAM Adam, batch {batch}", ">=", wanted, ratio))
        same = rows[f"brim batch {batch}"].get("losses") == rows[f"in_vram batch {batch}"].get("losses")
        claims.append(_claim(f"brim: losses equal those in VRAM, batch {batch}", ">=", 1, float(same)))
    return rows, claims


def activations(options: argparse.Namespace) -> tuple[dict[str, Any], list[Claim]]:
    """Time and memory of activation offload."""
    rows = _work(options, "activations", None, {"rounds": options.rounds, "folder": str(options.directory)})
    if "problem" in rows:
        return {"activations": rows}, []
    claims = []
    for name, row in rows.items():
        covered = "copies" not in row["bound_by"].values()
        slower = row["contenders"]["brim"]["slower_than_plain"]
        claims.append(_claim(f"{name}: slower than no offload", "<=", 0.03 if covered else None, slower))
        claims.append(_claim(f"{name}: share of the offloaded bytes saved", ">=", 0.90, row["saving"]))
        claims.append(_claim(f"{name}: gradients equal plain", ">=", 1, float(row["gradients_equal_plain"])))
    return rows, claims


CASES: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], list[Claim]]]] = {
    "full": full,
    "lora": lora,
    "adam": adam,
    "activations": activations,
}


def _train(
    options: argparse.Namespace, size: str, budget_bytes: int | None, *, method: str, batch: int
) -> dict[str, Any]:
    """``brim train`` of random weights; what it writes goes as soon as it has ended."""
    folder = options.directory / ("llama-bf16-tiny" if options.tiny else f"llama-bf16-{size}")
    say("weights", f"{folder}, {format_bytes(_gpu_checkpoint.write_bf16(folder, _shape(options, size)))}")
    options.batch = batch
    output = Path(tempfile.mkdtemp(prefix="train-", dir=options.directory))
    try:
        train = {
            "model": str(folder),
            "data": str(write_data(folder / "data.txt", options)),
            "output": str(output / "model"),
            "method": method,
            "vram": budget_bytes,
            "batch": batch,
            "seq": options.seq,
            "steps": options.steps,
        }
        return _work(options, "train", budget_bytes, {"train": train})
    finally:
        shutil.rmtree(output)


def _shape(options: argparse.Namespace, size: str) -> Shape:
    return TINY if options.tiny else SHAPES[size]


def _work(options: argparse.Namespace, kind: str, cap_bytes: int | None, request: dict[str, Any]) -> dict[str, Any]:
    """One process; its document, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        request |= {"kind": kind, "cap_bytes": cap_bytes, "result": str(result)}
        request |= {"device": options.device, "tiny": options.tiny}
        command = [sys.executable, str(HERE / "_training_gpu_worker.py"), json.dumps(request)]
        with log.open("w") as handle:
            code = subprocess.run(command, stdout=handle, stderr=handle).returncode
        what = f"{kind} {request.get('contender', '')} {request.get('batch', '')}".strip()
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            problem = f"exit {code}: {' | '.join(lines[-3:])[-600:] if lines else 'no output'}"
            say(what, problem)
            return {"problem": problem}
        document: dict[str, Any] = json.loads(result.read_text())
        say(what, f"{document['step_s']:.3f} s a step" if "step_s" in document else "done")
        return document


# -- results


def _claim(what: str, how: str, wanted: float | None, found: float | None) -> Claim:
    """``wanted`` None: reported, not claimed. ``met`` None: it could not be measured, or nothing is claimed."""
    met = None
    if wanted is not None and found is not None:
        met = found >= wanted if how == ">=" else found <= wanted
    return {"claim": what, "how": how, "wanted": wanted, "found": found, "met": met}


def _fits(what: str, row: dict[str, Any], budget_bytes: int) -> Claim:
    """That it ran to its end inside of the budget."""
    measured = row.get("peak_reserved_bytes")  # without a GPU there is none
    return _claim(f"{what}: peak over budget", "<=", 1.0, None if measured is None else measured / budget_bytes)


def _ratio(row: dict[str, Any], reference: dict[str, Any], key: str = "step_s") -> float | None:
    """How fast ``row`` is, as a share of how fast ``reference`` is."""
    return reference[key] / row[key] if key in row and key in reference else None


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if "step_s" in row]
    if not good:
        return rows[0]
    spread = harness.Spread.of([row["step_s"] for row in good])
    return good[0] | {"step_s": spread.median, "step_s_spread": vars(spread), "rounds": len(good)}


def _device_facts(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": "VRAM played by RAM"}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver_version()}


def show(document: dict[str, Any]) -> None:
    """The tables on stdout."""
    console = Console(width=130)
    rows = Table("run", "s a step", "peak of VRAM", "", title=document["case"], title_justify="left")
    for label, row in document["rows"].items():
        peak = row.get("peak_reserved_bytes", row.get("measured_bytes", {}).get("vram"))
        step = f"{row['step_s']:.3f}" if "step_s" in row else "-"
        rows.add_row(label, step, "-" if peak is None else format_bytes(peak), row.get("problem", ""))
    console.print(rows)
    for claim in document["claims"]:
        found = "not measured" if claim["found"] is None else f"{claim['found']:.3f}"
        wanted = "" if claim["wanted"] is None else f" (wanted {claim['how']} {claim['wanted']})"
        console.print(f"{claim['claim']}: {found}{wanted}{'' if claim['met'] is not False else '  NOT MET'}")


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
