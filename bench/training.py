"""Train a model in less memory: brim against plain PyTorch and its peers, on the CPU, in one run.

    python bench/training.py                     the table, 3 rounds; about 20 minutes
    python bench/training.py --tiny --rounds 1   the same with a model of 20 MB, to see that it works

A Llama of 134 M parameters with random weights, full fine-tuning by fused AdamW in float32. Each contender runs in a
fresh process per round; rounds are interleaved; numbers are medians. The peers run once before the first round, not
counted, so that it is known what each takes; brim then runs at every one of those budgets ("equal memory": tokens/s)
and at shares of what plain PyTorch takes; the smallest of its peaks at which it is as fast as a peer is its memory at
"equal speed". As fast: at least 97 % of the tokens/s, as the same program twice differs by more than 1 %.

Memory is the growth of the resident set's high water over the process before the model was opened: from the end of
the setup on, of ``brim train`` from the opening on. brim runs inside a memory cgroup of its budget plus that baseline
where we may make one. Losses must be plain PyTorch's: bit for bit where a contender is lossless, and 1e-4 where
brim computes the loss in pieces; where they are not, this ends with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _checkpoint as checkpoints
import _harness as harness
import _training_report as report
from brim.units import format_bytes, parse_bytes
from peers.training import PEERS, TRAINING_NAMES

HERE = Path(__file__).resolve().parent
PACKAGES = ("brim", "torch", "transformers", "torchao", "ramtorch")
FULL = checkpoints.Shape(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=12, vocabulary=32_000)
TINY = checkpoints.TINY
SHARES = (0.80, 0.65, 0.50, 0.40, 0.30)
FIT_SHARES = (0.65, 0.40)
_SAME_BUDGET = 0.03  # budgets closer than this are one


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contender, at one budget where it has one (else 0)."""

    label: str
    name: str
    budget_bytes: int = 0


def main() -> None:
    options = _options()
    shape = TINY if options.tiny else FULL
    folder = options.directory / ("train-tiny" if options.tiny else "train-134M")
    say("checkpoint", str(folder))
    checkpoints.write_checkpoint(folder, shape)
    options.checkpoint, options.data = folder, write_data(folder / "data.txt", options)
    peers = [Job(label=name, name=name) for name in PEERS if name in options.only]
    first = one_round(options, peers)
    jobs = peers + brim_jobs(first, options)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        rounds.append(one_round(options, [job for job in jobs if "problem" not in first.get(job.label, {})]))
    missing = {label: found["problem"] for label, found in first.items() if "problem" in found}
    document = report.summarize(rounds, missing, {job.label: job.budget_bytes for job in jobs}, _tokens(options))
    document |= {"machine": harness.machine_facts(PACKAGES), "settings": _settings(options)}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")
    report.show(document)
    wrong = report.wrong(document)
    if wrong:
        raise SystemExit("losses differ from plain PyTorch's: " + "; ".join(wrong))


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=cache, help="where the checkpoint and scratch files go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="a run; the first is not timed")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=TRAINING_NAMES, default=TRAINING_NAMES)
    parser.add_argument("--budgets", nargs="+", type=parse_bytes, help="brim at these budgets instead of the usual")
    parser.add_argument("--tiny", action="store_true", help="a model of 20 MB")
    parser.add_argument("--no-limit", action="store_true", help="no cgroup")
    parser.add_argument("--output", type=Path, help="append one JSON line here")
    options = parser.parse_args()
    if "train_plain" not in options.only:
        parser.error("--only: train_plain is what the others are compared with")
    return options


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if not isinstance(value, Path)}


def _tokens(options: argparse.Namespace) -> int:
    return int(options.batch * options.seq)


def write_data(file: Path, options: argparse.Namespace) -> Path:
    """Enough words for all steps, of the three that the checkpoint's tokenizer knows."""
    words = random.Random(0).choices("abc", k=(options.steps + 1) * _tokens(options))
    text = " ".join(words) + "\n"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return file


def brim_jobs(first: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Job]:
    """brim at the peak of every peer, and at shares of plain PyTorch's."""
    plain_bytes = first["train_plain"]["peak_growth_bytes"]
    shares, fit_shares = ((0.8,), (0.8,)) if options.tiny else (SHARES, FIT_SHARES)
    peaks = [found["peak_growth_bytes"] for found in first.values() if "peak_growth_bytes" in found]
    by_name = {
        "train_brim": options.budgets or [*peaks, *(int(share * plain_bytes) for share in shares)],
        "train_brim_fit": options.budgets or [plain_bytes, *(int(share * plain_bytes) for share in fit_shares)],
    }
    return [
        Job(label=f"{name} {format_bytes(budget)}", name=name, budget_bytes=budget)
        for name, budgets in by_name.items()
        if name in options.only
        for budget in _apart(budgets)
    ]


def _apart(budgets: Sequence[int]) -> list[int]:
    """From large to small; of those that hardly differ, the smallest."""
    found: list[int] = []
    for budget in sorted(budgets, reverse=True):
        if found and budget > (1 - _SAME_BUDGET) * found[-1]:
            found.pop()
        found.append(budget)
    return found


def one_round(options: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Every job once."""
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        found, problem = _work(options, job)
        results[job.label] = found if not problem else {"problem": problem}
        last = f"{found['step_s'][-1]:.2f} s a step, RSS +{format_bytes(found['peak_growth_bytes'])}" if found else ""
        say(job.label, problem or last)
    return results


def _work(options: argparse.Namespace, job: Job) -> tuple[dict[str, Any], str]:
    """One worker process; its document, or what went wrong."""
    limit = None
    if job.budget_bytes and not options.no_limit:
        limit = harness.MemoryLimit.make(f"brim-bench-{os.getpid()}-{time.monotonic_ns()}")
    scratch = Path(tempfile.mkdtemp(prefix="train-", dir=options.directory))
    try:
        request = _request(options, job, scratch, limit)
        code, killed = _run(request, scratch / "log", limit)
        if code != 0:
            return {}, _reason(code, killed, (scratch / "log").read_text(errors="replace"))
        document: dict[str, Any] = json.loads((scratch / "result.json").read_text())
        return document, ""
    finally:
        shutil.rmtree(scratch)


def _request(
    options: argparse.Namespace, job: Job, scratch: Path, limit: harness.MemoryLimit | None
) -> dict[str, Any]:
    return {
        "contender": job.name,
        "threads": options.threads,
        "result": str(scratch / "result.json"),
        "limit_folder": str(limit.folder) if limit else "",
        "limit_kind": limit.kind if limit else "",
        "setting": {
            "checkpoint": str(options.checkpoint),
            "data": str(options.data),
            "scratch": str(scratch),
            "budget_bytes": job.budget_bytes,
            **{key: getattr(options, key) for key in ("batch", "seq", "steps")},
        },
    }


def _run(request: dict[str, Any], log: Path, limit: harness.MemoryLimit | None) -> tuple[int, bool]:
    """The worker's exit status, and whether it was killed for want of memory."""
    with log.open("w") as handle:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "_training_worker.py"), json.dumps(request)], stdout=handle, stderr=handle
        )
        try:
            return process.wait(), limit.killed() if limit else False
        finally:  # Ctrl-C as well
            process.kill()
            process.wait()
            if limit:
                limit.remove()


def _reason(code: int, killed: bool, log: str) -> str:
    if killed:
        return "killed: held more than the budget"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"exit {code}: {lines[-1][:300] if lines else 'no output'}"


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
