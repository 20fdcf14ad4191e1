"""Pipelines of diffusers in less GPU memory than their weights take: brim.fit beside diffusers' own offloading.

    python bench/pipelines.py [--only sdxl flux wan] [--rounds 3] [--json rows.json]
    python bench/pipelines.py --cards [--only sdxl wan]

SDXL, FLUX.1-dev and Wan 2.1 1.3B with random weights, as wide as the original on a GPU and a quarter or an eighth as
wide without one: then PyTorch's CUDA build runs on the rehearsal device, whose operators the CPU computes and whose
memory is counted as on a GPU. Each way runs in a process of its own; rounds take turns. brim gets 40 % of the bytes
of the weights, and once more what each way reserved that took more than that. Medians of the seconds of a picture,
peak bytes reserved, and whether the picture equals that of the pipeline on the GPU as a whole.

``--cards``: as wide as the original in bf16, fitted into cards of 8, 12 and 24 GB on the rehearsal device, which
computes no values then: bytes promised and reserved by two calls. A pipeline that needs values is named with its
error. The device's convolutions take no workspaces, so none are predicted here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARE = 0.4
STEPS = 4
WIDTHS = {"sdxl": 4, "flux": 8, "wan": 4}
CARDS = ("RTX 4060", "RTX 3060", "RTX 4090")
PICTURES = 2  # timed ones, after one that is not


def _group(**settings: Any) -> Callable[[Any, int, Any], None]:
    def apply(pipe: Any, _vram_bytes: int, _call: Any) -> None:
        pipe.enable_group_offload(onload_device="cuda", use_stream=True, non_blocking=True, **settings)

    return apply


def _fit(pipe: Any, vram_bytes: int, call: Any) -> None:
    import brim

    brim.fit(pipe, vram=vram_bytes, device="cuda", example=call)


WAYS: dict[str, Callable[[Any, int, Any], Any]] = {
    "resident": lambda pipe, _vram_bytes, _call: pipe.to("cuda"),
    "model_cpu_offload": lambda pipe, _vram_bytes, _call: pipe.enable_model_cpu_offload(),
    "sequential_cpu_offload": lambda pipe, _vram_bytes, _call: pipe.enable_sequential_cpu_offload(),
    "group_offload_blocks": _group(offload_type="block_level", num_blocks_per_group=1),
    "group_offload_leaves": _group(offload_type="leaf_level"),
    "brim": _fit,
}


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Time one way in this process."""
    import torch

    import _pipeline_models as models

    torch.manual_seed(0)
    name, width = request["pipeline"], request["width"]
    pipe = models.PIPELINES[name](width)
    pipe.set_progress_bar_config(disable=True)
    call = (models.CALLS if width == 1 else models.SMALL_CALLS)[name]
    call = call | {"num_inference_steps": STEPS, "output_type": "pt"}
    weights_bytes = models.weights_bytes(pipe)
    WAYS[request["way"]](pipe, request.get("vram_bytes") or int(SHARE * weights_bytes), call)
    times_s: list[float] = []
    output: Any = None
    for _ in range(1 + PICTURES):
        start = time.perf_counter()
        output = pipe(**call, generator=torch.Generator().manual_seed(1))[0]
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start)
    picture = output.float().cpu().numpy() if isinstance(output, torch.Tensor) else output
    return {
        "weights_bytes": weights_bytes,
        "picture_s": statistics.median(times_s[1:]),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "picture": hashlib.sha256(picture.tobytes()).hexdigest(),
    }


def fit_card(request: dict[str, Any]) -> dict[str, Any]:
    """Fit a pipeline without values into this process's card, and call it twice."""
    from unittest import mock

    import torch

    import _pipeline_models as models
    import brim
    from brim.predict.lowering.cuda import convolution

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        pipe = models.PIPELINES[request["pipeline"]](1)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to_empty(device="cpu")  # of no RAM until it is written to
    torch.set_default_dtype(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    call = models.CALLS[request["pipeline"]] | {"num_inference_steps": 2, "output_type": "pt"}
    start = time.perf_counter()
    with mock.patch.object(convolution, "_workspace_bytes", lambda *_: 0):
        handle = brim.fit(pipe, device="cuda", example=call)
    fit_s = time.perf_counter() - start
    for _ in range(2):
        pipe(**call)
    return {
        "weights_bytes": models.weights_bytes(pipe),
        "fit_s": fit_s,
        "budget_bytes": handle.plan.budget_bytes["vram"],
        "promised_bytes": handle.plan.promise.peak_bytes["vram"],
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _run(request: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "pipelines.py"), "--work", json.dumps(request)],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"problem": " ".join(done.stderr.split())[-300:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _rehearsed(card: str = "H100", *, computing: bool = True) -> dict[str, str]:
    """Return the environment of the rehearsal device; ``computing``: every operator is computed."""
    from brim.device.environment import prepare
    from brim.device.settings import DeviceSettings
    from brim.rehearsal import force

    python = prepare(None, confirm=lambda what: not print(what))
    variables = python.variables(DeviceSettings.of(card))
    return variables | (force.environment("all", variables) if computing else {}) | {"OMP_NUM_THREADS": "1"}


def measure(name: str, rounds: int, width: int, variables: dict[str, str]) -> dict[str, Any]:
    """All ways for one pipeline; rows by way, and for brim also by the way whose memory it was given."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for way in WAYS:
            request = {"pipeline": name, "way": way, "width": width}
            row = _run(request, variables)
            rows.setdefault(way, []).append(row)
            print(f"{name} {number + 1}: {way}: {_said(row)}", flush=True)
            if way != "resident" and row.get("reserved_bytes", 0) > SHARE * row.get("weights_bytes", 0):
                request |= {"way": "brim", "vram_bytes": row["reserved_bytes"]}
                row = _run(request, variables)
                rows.setdefault(f"brim as {way}", []).append(row)
                print(f"{name} {number + 1}: brim in as much: {_said(row)}", flush=True)
    return {way: _summary(several) for way, several in rows.items()}


def fit_cards(names: list[str]) -> dict[str, Any]:
    """Fit pipelines into the cards; rows by pipeline and card."""
    rows = {}
    for name in names:
        for card in CARDS:
            request = {"pipeline": name, "card": card}
            row = rows[f"{name} on {card}"] = _run(request, _rehearsed(card, computing=False))
            if "problem" in row:
                print(f"{name} on {card}: {row['problem']}", flush=True)
                continue
            promised, reserved = row["promised_bytes"], row["reserved_bytes"]
            print(f"{name} on {card}: weights {row['weights_bytes'] / 2**30:.1f} GiB, "
                  f"promised {promised / 2**20:,.0f} MiB, reserved {reserved / 2**20:,.0f} MiB "
                  f"({reserved / promised - 1:+.2%}), fitted in {row['fit_s']:.0f} s", flush=True)  # fmt: skip
    return rows


def _said(row: dict[str, Any]) -> str:
    return row.get("problem") or f"{row['picture_s']:.2f} s, {row['reserved_bytes'] / 2**20:,.0f} MiB"


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    problems = [row for row in rows if "problem" in row]
    if problems:
        return problems[0]
    return rows[0] | {
        "picture_s": statistics.median(row["picture_s"] for row in rows),
        "reserved_bytes": max(row["reserved_bytes"] for row in rows),
    }


def show(name: str, rows: dict[str, Any]) -> None:
    """Print the rows of one pipeline."""
    resident = rows["resident"]
    print(f"\n{name}: weights {resident['weights_bytes'] / 2**20:,.0f} MiB, 40 % of them "
          f"{SHARE * resident['weights_bytes'] / 2**20:,.0f} MiB")  # fmt: skip
    for way, row in rows.items():
        if "problem" in row:
            print(f"  {way:36} {row['problem']}")
            continue
        same = "the same picture" if row["picture"] == resident["picture"] else "ANOTHER PICTURE"
        beside = row["picture_s"] / rows["brim"]["picture_s"] if "picture_s" in rows["brim"] else float("nan")
        print(f"  {way:36} {row['picture_s']:8.2f} s  {beside:5.2f} of brim's  "
              f"{row['reserved_bytes'] / 2**20:8,.0f} MiB reserved  {same}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cards", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        print(json.dumps((fit_card if "card" in options.work else work)(options.work)))
        return
    if options.cards:
        results = fit_cards(options.only)
    else:
        import torch

        on_gpu = torch.cuda.is_available()
        variables = dict(os.environ) if on_gpu else _rehearsed()
        results = {
            name: measure(name, options.rounds, 1 if on_gpu else WIDTHS[name], variables) for name in options.only
        }
        for name, rows in results.items():
            show(name, rows)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
