"""How long plans take: each in a fresh process, as a user types it, and how far from the best they may be."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from brim.processes import python_command
from brim.units import format_seconds

GAP = 0.01


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    words: Sequence[str]
    limit_s: float


CASES = (
    Case(name="8B, generate", words=("llama-3-8b", "--gpu", "RTX 3060", "--seq", "512"), limit_s=10.0),
    Case(
        name="8B, LoRA",
        words=("llama-3-8b", "--gpu", "RTX 3060", "--seq", "512", "--task", "train", "--method", "lora"),
        limit_s=10.0,
    ),
    Case(
        name="8B, full training",
        words=("llama-3-8b", "--gpu", "RTX 4090", "--ram", "128GiB", "--seq", "512", "--task", "train"),
        limit_s=10.0,
    ),
    Case(name="70B, generate", words=("llama-3-70b", "--gpu", "RTX 4090", "--ram", "128GiB"), limit_s=30.0),
    Case(
        name="70B, LoRA",
        words=("llama-3-70b", "--gpu", "A100 80GB", "--ram", "256GiB", "--task", "train", "--method", "lora"),
        limit_s=30.0,
    ),
)


def rows(threads: int) -> Iterator[dict[str, Any]]:
    """One row per case: seconds of wall and of processor, and the largest gap of its plans."""
    for case in CASES:
        yield _row(case, threads)


def _row(case: Case, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = python_command("-m", "brim", "plan", *case.words, "--json")
        done = subprocess.run(command, stdout=out, stderr=err, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        wall_s, after = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        for file in (out, err):
            file.seek(0)
        told = json.loads(out.read()) if done.returncode == 0 else {"plans": [], "problem": err.read()[-300:]}
    plans = told["plans"]
    return {
        "case": case.name,
        "command": " ".join(["brim plan", *case.words]),
        "limit_s": case.limit_s,
        "wall_s": wall_s,
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "plans": len(plans),
        "gap_max": max((plan["gap"] for plan in plans), default=None),
        "problem": told.get("problem", ""),
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    table = Table(title="seconds of a plan")
    for column in ("plan of", "wall", "processor", "limit", "plans", "gap"):
        table.add_column(column, justify="left" if column == "plan of" else "right")
    for row in found:
        gap = "-" if row["gap_max"] is None else f"{row['gap_max']:.2%}"
        cells = (row["wall_s"], row["processor_s"], row["limit_s"])
        table.add_row(row["case"], *map(format_seconds, cells), str(row["plans"]), gap)
    console = Console(highlight=False, width=120)
    console.print(table)
    for row in found:
        late, far = row["wall_s"] > row["limit_s"], (row["gap_max"] or 0.0) > GAP
        if late or far or row["problem"]:
            told = "too late" if late else "too far from the best" if far else row["problem"]
            console.print(f"wrong: {row['case']}: {told}", markup=False)
