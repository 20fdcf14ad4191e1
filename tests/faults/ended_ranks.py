"""A program that forks two ranks again and again, which train by ``brim train``, and prints what came of each.

ended_ranks.py MODEL DATA ROOT: two steps, each saved; then rates that spoil the weights of every shard; then the
first again, to more steps; then a batch that no machine has memory for. As JSON: exit code, words, saved steps.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from brim.cli import main
from brim.run.checkpoint.reading import steps
from support.forked import as_ranks, forked
from support.trainings import BATCH, LR, SEQ, course

COMMAND = ["--save-every", "1", "--seq", str(SEQ), "--batch", str(2 * BATCH), "--lr", str(LR), "--zero", "3"]
COMMAND += ["--timeout", "60"]
RUNS = {
    "saved": ["--steps", "2"],
    "spoiled": ["--steps", "6", "--resume", "--change-settings", "--lr", "1e38"],
    "no number": ["--steps", "6", "--resume", "--change-settings", "--lr", "1e36", "--save-every", "5"],
    "gone on": ["--steps", "6", "--resume"],
    "absurd": ["--steps", "6", "--overwrite", "--batch", str(10**9)],
}


def run(model: str, data: str, root: Path) -> dict[str, Any]:
    importlib.import_module("brim.run.ranks.train")
    gc.freeze()
    output, told, found = root / "output", root / "told", {}
    for name, options in RUNS.items():

        def child(options: list[str] = options) -> None:
            fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            command = ["train", model, "--data", data, "--output", str(output), *COMMAND, *options]
            os._exit(as_ranks(2, lambda: main(command)))

        begin_s = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(forked(child), 0)[1])
        found[name] = {
            "code": code, "told": told.read_text(), "saved": steps(output), "course": course(output),
            "took_s": time.monotonic() - begin_s,
        }  # fmt: skip
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))), file=out)
