"""Trainings over ranks: torchrun as a user starts it, and (run by it) several splits in one group of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SEQ, BATCH, LR, STEPS = 32, 12, 1e-3, 5
_TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
]


def command(ranks: int, *words: str, restarts: int = 0) -> list[str]:
    """torchrun with a port that the system chooses."""
    return [*_TORCHRUN, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def torchrun(ranks: int, *words: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(ranks, *words), env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def brim_train(model: Path, data: Path, output: Path, *words: str) -> list[str]:
    """The command of one training, to be given to torchrun."""
    settings = {"--seq": SEQ, "--batch": BATCH, "--steps": STEPS, "--lr": LR, "--timeout": 60}
    given = [str(word) for pair in settings.items() for word in pair if pair[0] not in words]
    return ["-m", "brim", "train", str(model), "--data", str(data), "--output", str(output), *given, *words]


def trained(ranks: int, model: Path, data: Path, output: Path, *splits: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of each split (fields of ``SplitRequest`` and of its training), one after the other in one group.

    Of split k, ``output/k`` has what it wrote.
    """
    words = [json.dumps(split) for split in splits]
    done = torchrun(ranks, str(Path(__file__)), str(model), str(data), str(output), *words, timeout_s=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def signal_rank(process: subprocess.Popen[str], rank: int, output: Path, lines: int, number: int) -> None:
    """Send signal ``number`` to the process that is ``rank`` once the log has so many lines."""
    log = output / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) >= lines):
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "it takes no steps"
        time.sleep(0.02)
    for child in _children(process.pid):
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            os.kill(child, number)
            return
    raise AssertionError(f"rank {rank} is not there")


def _children(parent: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def main(model: str, data: str, output: str, *splits: str) -> None:
    """On every rank."""
    from brim.run.ranks.request import SplitRequest
    from brim.run.ranks.train import train
    from brim.run.train.request import Request

    of_split = {"zero", "tp", "pp", "interleave", "sequence_parallel", "stage_layers"}
    of_split |= {"offload_shards", "ep", "cp"}
    for number, text in enumerate(splits):
        given = json.loads(text)
        split = {name: value for name, value in given.items() if name in of_split}
        if "stage_layers" in split:
            split["stage_layers"] = tuple(split["stage_layers"])
        own = {name: value for name, value in given.items() if name not in of_split}
        if own.pop("rank_without_data", None) == int(os.environ["RANK"]):
            own["data"] = "nowhere.txt"
        settings = {"batch": BATCH, "seq": SEQ, "steps": STEPS, "lr": LR, "output": Path(output) / str(number)}
        training = Request(**{"model": model, "data": data, **settings, **own})
        made = train(SplitRequest(training=training, timeout_s=60, **split))
        if made is not None:
            print(json.dumps(made.to_json()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
