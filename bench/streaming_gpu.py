"""A model in host memory on a device that cannot hold it: brim against its peers, device memory capped.

    python bench/streaming_gpu.py --output measurements/streaming_gpu.jsonl
    python bench/streaming_gpu.py --device cpu --tiny --rounds 1          the logic, without a GPU

15 B parameters in bf16 (29.8 GB, random) in host memory that all processes share; 12 GiB of device memory by
``set_per_process_memory_fraction``. Two workloads: ``decode``, a forward of one token (bound by the link), and
``prefill``, 8192 tokens (bound by compute). Each contender runs in a fresh process per round; rounds are interleaved;
numbers are medians. eta = T_bound / T_measured, T_bound = max(T_compute, (weights - resident) / H2D rate), both
measured in the same rounds. One JSON line per run is appended to --output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import _gpu_model as models
import _harness as harness
from brim.measure.nvml import driver_version
from brim.units import format_bytes, parse_bytes
from peers.gpu import GPU_NAMES

HERE = Path(__file__).resolve().parent
PACKAGES = ("brim", "torch", "transformers", "accelerate", "diffusers", "mmgp", "flextensor")
Rounds = list[dict[str, dict[str, Any]]]


def main() -> None:
    options = _options()
    shape = models.TINY if options.tiny else replace(models.FULL, layers=options.layers)
    weights_bytes = models.weights_bytes(shape)
    options.vram = options.vram or (int(0.4 * weights_bytes) if options.tiny else parse_bytes("12GiB"))
    say("weights", format_bytes(weights_bytes))
    descriptor = models.make_shared(shape)
    rounds: Rounds = []
    try:
        for _ in range(options.rounds):
            rounds.append(one_round(options, shape, descriptor))
    finally:
        document = summarize(rounds, options, weights_bytes) if rounds else {}
        if options.output and document:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a") as handle:
                handle.write(json.dumps(document) + "\n")
    show(document)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--vram", type=parse_bytes, help="device memory each contender may take (12GiB; tiny: 40 %%)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=("decode", "prefill"), default=["decode", "prefill"])
    parser.add_argument("--only", nargs="+", choices=GPU_NAMES, help="these contenders (the reference always runs)")
    parser.add_argument("--layers", type=int, default=models.FULL.layers, help="of 634 MB each")
    parser.add_argument("--tiny", action="store_true", help="a model of 3 MB")
    parser.add_argument("--output", type=Path, help="append one JSON line here")
    return parser.parse_args()


def _workload(options: argparse.Namespace, name: str) -> dict[str, int]:
    if name == "decode":
        return {"tokens": 1, "forwards": 5}
    return {"tokens": 64 if options.tiny else 8192, "forwards": 2}


def one_round(options: argparse.Namespace, shape: Any, descriptor: int) -> dict[str, Any]:
    """The link's rate, then every contender on every workload."""
    names = ["gpu_resident", *(n for n in options.only or GPU_NAMES if n != "gpu_resident")]
    common = {
        "device": options.device,
        "tiny": options.tiny,
        "shape": asdict(shape),
        "descriptor": descriptor,
        "budget_bytes": options.vram,
    }
    results: dict[str, Any] = {"link": _work({**common, "contender": "link"})}
    say("link", str(results["link"]))
    for workload in options.workloads:
        reference = None
        for name in names:
            request = {**common, "contender": name, "workload": workload, **_workload(options, workload)}
            document = _work(request)
            logits = document.pop("logits", None)
            reference = logits if reference is None else reference
            if logits is not None and reference is not None:
                document["difference"] = float((logits - reference).abs().max() / reference.abs().max())
                document["logits_equal"] = torch.equal(logits, reference)
            results[f"{workload}/{name}"] = document
            say(f"{workload} {name}", document.get("problem") or f"{document['forward_s'] * 1e3:.1f} ms a forward")
    return results


def _work(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, logits, log = Path(folder, "result.json"), Path(folder, "logits.safetensors"), Path(folder, "log")
        request |= {"result": str(result), "logits": str(logits)}
        with log.open("w") as handle:
            code = subprocess.run(
                [sys.executable, str(HERE / "_gpu_worker.py"), json.dumps(request)],
                stdout=handle,
                stderr=handle,
                pass_fds=[request["descriptor"]],
            ).returncode
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return {"problem": f"exit {code}: {lines[-1][:300] if lines else 'no output'}"}
        document: dict[str, Any] = json.loads(result.read_text())
        if logits.exists():
            document["logits"] = load_file(logits)["logits"].clone()
        return document


def summarize(rounds: Rounds, options: argparse.Namespace, weights_bytes: int) -> dict[str, Any]:
    """Medians, eta against the measured bound, ratios to brim."""
    rate = harness.Spread.of([r["link"]["h2d_bytes_per_s"] for r in rounds]).median
    rows: dict[str, dict[str, Any]] = {}
    for label in rounds[0]:
        if label == "link":
            continue
        good = [r[label] for r in rounds if "forward_s" in r[label]]
        row: dict[str, Any] = {"rounds": len(good)}
        problems = [r[label]["problem"] for r in rounds if "problem" in r[label]]
        if problems:
            row["problem"] = problems[0]
        if good:
            row |= _row(good)
        rows[label] = row
    for label, row in rows.items():
        _add_bound(row, rows, label.split("/")[0], weights_bytes, options.vram, rate)
    return {
        "benchmark": "streaming_gpu",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": harness.machine_facts(PACKAGES) | _device_facts(options.device),
        "weights_bytes": weights_bytes,
        "budget_bytes": options.vram,
        "h2d_bytes_per_s": rate,
        "rows": rows,
    }


def _row(good: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"forward_s": vars(harness.Spread.of([d["forward_s"] for d in good]))}
    for key in ("setup_s", "streamed_bytes_per_forward"):
        if key in good[0]:
            row[key] = harness.Spread.of([d[key] for d in good]).median
    for key in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "difference"):
        if key in good[0]:
            row[key] = max(d[key] for d in good)
    return row | {"logits_equal": all(d["logits_equal"] for d in good), "facts": good[0]["facts"]}


def _add_bound(
    row: dict[str, Any], rows: dict[str, Any], workload: str, weights_bytes: int, budget_bytes: int, rate: float
) -> None:
    """``eta``: the bytes that it said it streamed; ``eta_of_budget``: as if all of the budget could hold weights."""
    reference, own = rows[f"{workload}/gpu_resident"], rows.get(f"{workload}/gpu_brim", {})
    if "forward_s" not in row:
        return
    median_s = row["forward_s"]["median"]
    if "forward_s" in own:
        row["over_brim"] = median_s / own["forward_s"]["median"]
    if "forward_s" in reference:  # where the device cannot hold the model T_compute is not known, and eta neither
        compute_s = reference["forward_s"]["median"]
        least_bytes = max(0, weights_bytes - budget_bytes)
        streamed = {"eta_of_budget": least_bytes, "eta": row.get("streamed_bytes_per_forward", least_bytes)}
        row |= {key: max(compute_s, count / rate) / median_s for key, count in streamed.items()}


def _device_facts(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": "cpu"}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver_version()}


def show(document: dict[str, Any]) -> None:
    """The table on stdout."""
    console = Console(width=140)
    console.print(
        f"weights {format_bytes(document['weights_bytes'])}, budget {format_bytes(document['budget_bytes'])}, "
        f"link {document['h2d_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    table = Table("contender", "ms a forward", "/ brim", "setup s", "peak reserved", "eta", "eta of budget", "logits")
    for label, row in document["rows"].items():
        if "forward_s" not in row:
            table.add_row(label, row.get("problem", "did not run"))
            continue
        numbers = [f"{row[key]:.2f}" if key in row else "-" for key in ("over_brim", "setup_s")]
        etas = [f"{row[key]:.2f}" if key in row else "-" for key in ("eta", "eta_of_budget")]
        peak = format_bytes(row["peak_reserved_bytes"]) if "peak_reserved_bytes" in row else "-"
        same = "equal" if row["logits_equal"] else f"differ {row['difference']:.1e}"
        table.add_row(label, f"{row['forward_s']['median'] * 1e3:.1f}", *numbers, peak, *etas, same)
    console.print(table)


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
