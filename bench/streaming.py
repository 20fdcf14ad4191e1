"""Run a model that does not fit: brim against its peers, same budget, same run, on the CPU with the weights on disk.

    python bench/streaming.py                     the table, 5 rounds
    python bench/streaming.py --partial           brim at 25, 50 and 75 % of the model against the formula
    python bench/streaming.py --bound             only what bounds it: compute and disk
    python bench/streaming.py --tiny --rounds 1   the same with a model of 20 MB, to see that it works

Each contender runs in a fresh process per round, inside a memory cgroup of the budget plus what the process held
before loading (where we may make one), after its files were put out of the page cache. Rounds are interleaved;
numbers are medians. eta = T_bound / T_measured, T_bound = max(T_compute, (weights - resident) / read rate), with
T_compute (all weights resident) and the read rate (O_DIRECT, the better of one and two readers) of the same rounds.
"beside_reads" is the limit of any overlap on this machine: the resident model, while the disk reads those same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _checkpoint as checkpoints
import _harness as harness
import _report as report
from brim.units import format_bytes, parse_bytes
from peers import NAMES, Setting

HERE = Path(__file__).resolve().parent
PACKAGES = ("brim", "torch", "transformers", "safetensors", "accelerate", "airllm", "ramtorch")
PARTIAL_SHARES = (0.25, 0.50, 0.75)
_UNLIMITED = ("resident", "beside_reads")  # what the others are measured against


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contender at one budget."""

    label: str
    name: str
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """What holds for the whole run."""

    checkpoint: Path
    scratch: Path
    shape: checkpoints.Shape
    weights_bytes: int
    options: argparse.Namespace

    def setting(self, job: Job) -> Setting:
        shape = self.shape
        attention = 2 * shape.hidden * shape.hidden * (1 + shape.kv_heads / shape.heads)
        block = int(attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden) * 4
        return Setting(
            checkpoint=self.checkpoint,
            scratch=self.scratch / job.name,
            budget_bytes=job.budget_bytes,
            weights_bytes=self.weights_bytes,
            largest_bytes=shape.vocabulary * shape.hidden * 4,
            block_bytes=block,
        )


def main() -> None:
    options = _options()
    shape = checkpoints.TINY if options.tiny else checkpoints.FULL
    folder = options.directory / ("llama-tiny" if options.tiny else "llama-6.6GB")
    say("checkpoint", str(folder))
    weights_bytes = checkpoints.write_checkpoint(folder, shape)
    scratch = options.directory / ("peers-tiny" if options.tiny else "peers")
    run = Run(checkpoint=folder, scratch=scratch, shape=shape, weights_bytes=weights_bytes, options=options)
    jobs = _jobs(run)
    missing = prepare(run, jobs)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        rounds.append(one_round(run, [job for job in jobs if job.label not in missing]))
        document = report.summarize(rounds, missing, weights_bytes, {job.label: job.budget_bytes for job in jobs})
        document |= {"machine": harness.machine_facts(PACKAGES), "settings": _settings(run)}
        if options.output:  # after every round: a run that is cut short still says what it saw
            harness.write_json(options.output, document)
    report.show(document)


def _options() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=cache, help="where the checkpoint and peers' files go")
    parser.add_argument("--budget", type=parse_bytes, help="bytes each contender may hold (3GiB; tiny: 40 %%)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steady", type=int, default=4, help="forwards in a row after the cold one")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--decode", type=int, default=0, help="greedy tokens to time as well")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these contenders (resident always runs)")
    parser.add_argument("--partial", action="store_true", help="brim at 25, 50 and 75 %% of the model")
    parser.add_argument("--bound", action="store_true", help="only what bounds the run")
    parser.add_argument("--tiny", action="store_true", help="a model of 20 MB")
    parser.add_argument("--no-limit", action="store_true", help="no cgroup: the page cache may use all memory")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    return parser.parse_args()


def _settings(run: Run) -> dict[str, Any]:
    options = {key: value for key, value in vars(run.options).items() if not isinstance(value, Path)}
    return options | {"shape": asdict(run.shape), "weights_bytes": run.weights_bytes}


def _jobs(run: Run) -> list[Job]:
    options = run.options
    whole = Job(label="resident", name="resident", budget_bytes=run.weights_bytes)
    if options.bound:
        return [whole]
    if options.partial:
        return [whole] + [
            Job(label=f"{label} at {share:.0%}", name=name, budget_bytes=int(share * run.weights_bytes))
            for share in PARTIAL_SHARES
            for label, name in (("limit", "beside_reads"), ("brim", "brim_load"))
        ]
    budget = options.budget or (int(0.4 * run.weights_bytes) if options.tiny else parse_bytes("3GiB"))
    names = [name for name in options.only or NAMES if name != "resident"]
    return [whole] + [Job(label=name, name=name, budget_bytes=budget) for name in names]


def prepare(run: Run, jobs: list[Job]) -> dict[str, str]:
    """Each contender's own conversion. Returns those that cannot run, with the reason."""
    missing: dict[str, str] = {}
    done: set[str] = set()
    for job in jobs:
        if job.name not in done:
            say("prepare", job.name)
            _, problem = _work(run, job, prepare=True)
            done.add(job.name)
        if problem:
            missing[job.label] = problem
    return missing


def one_round(run: Run, jobs: list[Job]) -> dict[str, dict[str, Any]]:
    """Every contender once, and the raw read of the same bytes."""
    files = checkpoints.weight_files(run.checkpoint)
    harness.drop_page_cache(files)
    seconds = {readers: harness.raw_read_s(files, readers=readers) for readers in (1, 2)}
    rates = {f"readers_{readers}": run.weights_bytes / taken for readers, taken in seconds.items()}
    results: dict[str, dict[str, Any]] = {"raw": {"read_bytes_per_s": max(rates.values()), **rates}}
    say("raw read", f"{results['raw']['read_bytes_per_s'] / 1e9:.2f} GB/s")
    for job in jobs:
        document, problem = _work(run, job, prepare=False)
        results[job.label] = document or {"problem": problem}
        say(
            job.label,
            problem
            or f"load {document['load_s']:.2f} s, cold {document['cold_s']:.2f} s, steady "
            f"{document['steady_s']:.2f} s, RSS +{format_bytes(document['peak_rss_growth_bytes'])}",
        )
    return results


def _work(run: Run, job: Job, *, prepare: bool) -> tuple[dict[str, Any], str]:
    """One worker process; its document, or what went wrong."""
    setting = run.setting(job)
    limit = None
    if not (prepare or job.name in _UNLIMITED or run.options.no_limit):
        limit = harness.MemoryLimit.make(f"brim-bench-{os.getpid()}-{time.monotonic_ns()}")
    with tempfile.TemporaryDirectory() as folder:
        result, logits, log = Path(folder, "result.json"), Path(folder, "logits.safetensors"), Path(folder, "log")
        request = {
            "contender": job.name,
            "setting": {key: str(v) if isinstance(v, Path) else v for key, v in vars(setting).items()},
            "prepare": prepare,
            "limit_folder": str(limit.folder) if limit else "",
            "limit_kind": limit.kind if limit else "",
            "result": str(result),
            "logits": str(logits),
            **{key: getattr(run.options, key) for key in ("threads", "prompt_tokens", "steady", "decode")},
        }
        with log.open("w") as handle:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "_worker.py"), json.dumps(request)], stdout=handle, stderr=handle
            )
            try:
                peak = harness.AnonymousPeak(process.pid)
                code = process.wait()
                anonymous_bytes = peak.stop()
                killed = limit.killed() if limit else False
            finally:  # Ctrl-C as well
                process.kill()
                process.wait()
                if limit:
                    limit.remove()
        if code != 0:
            return {}, _reason(code, killed, log.read_text(errors="replace"))
        document = json.loads(result.read_text())
        if document:
            document["peak_rss_growth_bytes"] = document["peak_rss_bytes"] - document["baseline_rss_bytes"]
            document["peak_anonymous_growth_bytes"] = anonymous_bytes - document["baseline_anonymous_bytes"]
            document["limited"] = limit.kind if limit else "no"
            document |= report.compare_logits(job.label, logits)
        return document, ""


def _reason(code: int, killed: bool, log: str) -> str:
    if killed:
        return "killed: held more than the budget"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"exit {code}: {lines[-1][:200] if lines else 'no output'}"


def say(what: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
