"""Many sequences per pass of the weights: tokens per second by batch, for a model that streams from disk.

    python bench/throughput.py                     batches of 1, 2, 4, 8, 16 and as many as fit; 3 rounds
    python bench/throughput.py --tiny --rounds 1   the same with a model of 20 MB, to see that it works

Each run is ``brim generate --prompts FILE --batch N --json`` in a fresh process, its files out of the page cache
before. Rounds are interleaved; numbers are medians. Tokens per second are those of all sequences together, the
prompts' passes included, loading not. The first prompt's tokens must be the same in every run.
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

from rich.console import Console
from rich.table import Table

import _checkpoint as checkpoints
import _harness as harness
from brim.processes import python_command
from brim.units import format_bytes, parse_bytes

MODEL = checkpoints.Shape(hidden=2048, intermediate=5632, layers=10, heads=32, kv_heads=8, vocabulary=16_000)
BATCHES = ("1", "2", "4", "8", "16", "auto")
PACKAGES = ("brim", "torch", "transformers")
_SHARE = 0.35  # of the weights, what the budget is unless told


def main() -> None:
    options = _options()
    shape = checkpoints.TINY if options.tiny else MODEL
    folder = options.directory / ("llama-tiny" if options.tiny else "llama-2GB")
    weights_bytes = checkpoints.write_checkpoint(folder, shape)
    budget_bytes = options.budget or int(_SHARE * weights_bytes) + (200 << 20 if options.tiny else 0)
    runs: dict[str, list[dict[str, Any]]] = {batch: [] for batch in options.batches}
    for _ in range(options.rounds):
        for batch in options.batches:
            runs[batch].append(_run(folder, batch, budget_bytes, options))
            _say(batch, f"{runs[batch][-1]['tokens_per_s']:.3g} tokens/s")
        document = _document(runs, weights_bytes, budget_bytes, options)
        if options.output:  # after every round: a run that is cut short still says what it saw
            harness.write_json(options.output, document)
    _show(document)


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=cache, help="where the checkpoint goes")
    parser.add_argument("--budget", type=parse_bytes, help="RAM that brim may take (35 %% of the weights)")
    parser.add_argument("--batches", nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=64, help="how many there are for the largest batch that fits")
    parser.add_argument("--tiny", action="store_true", help="a model of 20 MB")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    return parser.parse_args()


def _run(folder: Path, batch: str, budget_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One process; its summary and the tokens of its first prompt."""
    harness.drop_page_cache([folder])
    count = options.prompts if batch == "auto" else int(batch)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "prompts.txt")
        words = " ".join("abc"[number % 3] for number in range(options.prompt_tokens))
        file.write_text(f"{words}\n" * count)
        command = python_command("-m", "brim", "generate", folder, "--prompts", file, "--json")
        command += [
            "--no-chat",
            "--batch",
            batch,
            "--ram",
            str(budget_bytes),
            "--max-new-tokens",
            str(options.new_tokens),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"batch {batch}: {done.stderr.strip()}")
    first, *_, last = [json.loads(line) for line in done.stdout.splitlines()]
    return last["summary"] | {"first_tokens": first["token_ids"]}


def _document(
    runs: dict[str, list[dict[str, Any]]], weights_bytes: int, budget_bytes: int, options: argparse.Namespace
) -> dict[str, Any]:
    rows = {batch: _row(found) for batch, found in runs.items() if found}
    alone = rows.get("1", {}).get("tokens_per_s")
    for row in rows.values():
        row["times_batch_1"] = row["tokens_per_s"] / alone if alone else None
    tokens = {tuple(run["first_tokens"]) for found in runs.values() for run in found}
    return {
        "rows": rows,
        "same_tokens": len(tokens) == 1,
        "weights_bytes": weights_bytes,
        "budget_bytes": budget_bytes,
        "settings": {key: value for key, value in vars(options).items() if not isinstance(value, Path)},
        "machine": harness.machine_facts(PACKAGES),
    }


def _row(found: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [run["tokens_per_s"] for run in found]
    steps = [run["s_per_token"] for run in found]
    return {
        "batch": found[0]["batch"],
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_range": [min(rates), max(rates)],
        "s_per_step": statistics.median(steps),
        "promised_s_per_step": found[0]["plan"]["promise"]["step_s"],
        "limited_by": found[0]["plan"]["promise"]["limited_by"],
        "promised_bytes": found[0]["promised_bytes"]["ram"],
        "measured_bytes": max(run["measured_bytes"]["ram"] for run in found),
    }


def _show(document: dict[str, Any]) -> None:
    budget = format_bytes(document["budget_bytes"])
    table = Table(title=f"{format_bytes(document['weights_bytes'])} of weights in {budget} of RAM")
    for column in ("batch", "tokens/s", "of batch 1", "s/step", "promised", "limited by", "RAM promised", "measured"):
        table.add_column(column, justify="right")
    for label, row in document["rows"].items():
        table.add_row(
            label if label == str(row["batch"]) else f"{label}: {row['batch']}",
            f"{row['tokens_per_s']:.3g}",
            f"{row['times_batch_1']:.1f}x" if row["times_batch_1"] else "-",
            f"{row['s_per_step']:.3f}",
            f"{row['promised_s_per_step']:.3f}",
            row["limited_by"],
            format_bytes(row["promised_bytes"]),
            format_bytes(row["measured_bytes"]),
        )
    console = Console()
    console.print(table)
    console.print(f"the first prompt's tokens are the same in all runs: {document['same_tokens']}")


def _say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} batch {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
