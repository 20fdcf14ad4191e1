"""A program that trains by ``brim train`` in children of its own, which it interrupts (SIGINT) while they write
checkpoints, and prints how each ended as JSON.

interrupted_saves.py MODEL DATA ROOT COUNT [--write]. Every child ends as an interpreter ends: that is where a thread
that nobody waited for aborts the process. With --write, what came of it is kept in measurements/kills.json.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch._dynamo  # every optimizer imports it, and it takes a while
from kills import asked, keep

from brim.cli import main
from brim.run.checkpoint.reading import latest, steps
from support.trainings import BATCH, LR, SEQ, remember_predictions

COMMAND = ["--save-every", "1", "--seq", str(SEQ), "--batch", str(BATCH), "--lr", str(LR), "--ram", "1GiB"]
COMMAND += ["--device", "cpu"]
MOST_S = 60.0


def interrupted(command: list[str], output: Path, moment: random.Random) -> dict[str, object]:
    """How a training ended that was interrupted at a random moment of one of its first checkpoints."""
    told, step = output.with_suffix(".told"), moment.randint(1, 3)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.exit(main([*command, "--steps", "50", "--output", str(output)]))
    stop_s = time.monotonic() + MOST_S
    while not list(output.glob(f".step-{step:06d}*")) and time.monotonic() < stop_s:
        time.sleep(0.0005)
    time.sleep(moment.uniform(0, 0.1))
    os.kill(pid, signal.SIGINT)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > stop_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"code": None, "told": told.read_text()}
        time.sleep(0.002)
    whole = not steps(output) or latest(output).step >= step - 1
    return {"code": os.waitstatus_to_exitcode(ended[1]), "whole": whole, "told": told.read_text()[-1500:]}


def run(model: str, data: str, root: Path, count: int) -> list[dict[str, object]]:
    remember_predictions()
    command, moment = ["train", model, "--data", data, *COMMAND], random.Random(0)
    assert main([*command, "--steps", "2", "--output", str(root / "warm"), "--json"]) == 0
    gc.collect()
    gc.freeze()  # or each child would look through all of it again
    return [interrupted(command, root / f"run-{number}", moment) for number in range(count)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout
    is_kept = asked()
    found = run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(found), file=out, flush=True)
    if is_kept:
        whole = sum(end["code"] == 130 and bool(end["whole"]) for end in found)
        keep("interrupted_saves.py", kills=len(found), runs=len(found), whole=whole, wrong=len(found) - whole)
