"""A program that trains by ``brim train``, in children of its own that it kills, and prints what came of it as JSON.

killed_trainings.py MODEL DATA ROOT KILLS [--ranks N] [OPTION...] [--write]: a run that nobody kills, then runs that
are killed at random moments and resumed until they are done, until there were KILLS of them; each as the command line
runs it. Only what a step takes is predicted before forking, once: the children begin with the plan's figures in
memory. One kill in eight falls into a new process that has to import, measure and plan first, with an empty cache.
With ranks, each run is N processes that train together, and all are killed at once. With --write, what came
of it is kept in measurements/kills.json.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kills import asked, keep

from brim.cli import main
from brim.errors import ABOVE_BUDGET
from brim.processes import python_command
from brim.run.checkpoint.reading import latest, steps
from support.forked import as_ranks, forked, was_killed
from support.trainings import BATCH, LR, SEQ, course, remember_predictions, same_weights

STEPS = 12
COMMAND = ["--steps", str(STEPS), "--save-every", "2", "--seq", str(SEQ), "--batch", str(BATCH), "--lr", str(LR)]
ALONE = ["--ram", "1GiB", "--device", "cpu"]


class Killer:
    """Runs one command line. ``start_s`` is what it takes to begin to train, ``step_s`` a step with its share of the
    checkpoints."""

    def __init__(self, command: list[str], root: Path, ranks: int) -> None:
        self._command, self._ranks = command, ranks
        self._root, self._choose = root, random.Random(0)
        self.reference = root / "whole"
        self.start_s, self.step_s = self._times()
        self.planning = 0  # kills of processes that had not begun to train
        self.new_s = 0.0
        if ranks == 1:
            self.new_s = self._new_until(root / "new", float("inf"))

    def _run(self, output: Path) -> int:
        def one() -> int:
            sys.stdout = sys.stderr
            code = main([*self._command, "--output", str(output), "--resume"])
            return (
                0 if code == ABOVE_BUDGET else code
            )  # a copy of a process maps its libraries anew, and measures that

        def child() -> None:
            assert (as_ranks(self._ranks, one) if self._ranks > 1 else one()) == 0

        return forked(child, leads=True)

    def _times(self) -> tuple[float, float]:
        begin_s = time.monotonic()
        pid = self._run(self.reference)
        _wait_for(lambda: (self.reference / "metrics.jsonl").exists())
        started_s = time.monotonic()
        _wait_for(lambda: any(self.reference.glob("*model.safetensors")))
        trained_s = time.monotonic()
        assert not was_killed(pid)
        return started_s - begin_s, (trained_s - started_s) / STEPS

    def _new_until(self, output: Path, seconds: float) -> float:
        """Start the command as a shell does, with nothing remembered, and kill it after ``seconds``, or as soon as it
        trains. The seconds that it lived."""
        before, begin_s = _inode(output), time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._root) as cache:
            command = python_command("-m", "brim", *self._command, "--output", str(output), "--resume")
            process = subprocess.Popen(
                command, env=os.environ | {"XDG_CACHE_HOME": cache}, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stop_s = begin_s + min(seconds, 180)
            while time.monotonic() < stop_s and _inode(output) == before:
                assert process.poll() is None, process.returncode
                time.sleep(0.001)
            lived_s = time.monotonic() - begin_s
            self.planning += _inode(output) == before
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        return lived_s

    def killed(self, output: Path) -> bool:
        """One run, killed at a random moment while it imports and plans (one in eight), while it begins (as many), or
        of one of the next steps, which it reaches sooner or later on a busy machine, or of what comes after the last.
        Whether it was still there."""
        before, done = _inode(output), max(steps(output), default=0)
        phase = self._choose.random()
        if self.new_s and phase >= 0.875:
            self._new_until(output, self._choose.uniform(0, self.new_s))
            return True
        pid = self._run(output)
        if phase < 0.125:
            time.sleep(self._choose.uniform(0, self.start_s))
        else:
            step = self._choose.randint(done, min(done + 4, STEPS))
            _wait_for(lambda: _inode(output) != before)
            _wait_for(lambda: _reached(output) >= step)
            time.sleep(self._choose.uniform(0, self.step_s * (3 if step == STEPS else 1)))
        with contextlib.suppress(ProcessLookupError):  # not yet a group
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        return was_killed(pid)


def _inode(output: Path) -> int:
    """Of the metrics file, which each run makes anew."""
    path = output / "metrics.jsonl"
    return path.stat().st_ino if path.exists() else 0


def _reached(output: Path) -> int:
    return (output / "metrics.jsonl").read_text().count('"loss"')


def _wait_for(ready: Any) -> None:
    stop_s = time.monotonic() + 180
    while not ready():
        assert time.monotonic() < stop_s
        time.sleep(0.001)


def run(model: str, data: str, root: Path, kills: int, options: list[str]) -> dict[str, Any]:
    remember_predictions()
    ranks = int(options[1]) if options[:1] == ["--ranks"] else 1
    command = ["train", model, "--data", data, *COMMAND]
    assert (
        main([*command, *ALONE, "--output", str(root / "warm"), "--json"]) == 0
    )  # what libraries import late is here now
    command += options[2:] if ranks > 1 else [*ALONE, *options]
    if ranks > 1:
        importlib.import_module("brim.run.ranks.train")
    gc.collect()
    gc.freeze()  # or each child would look through all of it again
    killer = Killer(command, root, ranks)
    resumed_at, ends = [], []
    while len(resumed_at) < kills or not ends[-1]["whole"]:
        output = root / f"run-{len(ends)}"
        while killer.killed(output):
            resumed_at.append(latest(output).step if steps(output) else 0)
            if len(resumed_at) >= kills:
                assert not was_killed(killer._run(output))
                break
        whole = course(output) == course(killer.reference) and same_weights(output, killer.reference)
        left = [path.name for path in output.iterdir() if path.name.endswith(".partial")]
        ends.append({"whole": whole, "left": left, "steps": [step for step, _ in course(output)]})
        if not whole:
            break
    return {"resumed_at": resumed_at, "ends": ends, "planning": killer.planning}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout
    is_kept = asked()
    found = run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    print(json.dumps(found), file=out, flush=True)
    if is_kept:
        whole = sum(end["whole"] for end in found["ends"])
        keep(
            " ".join(["killed_trainings.py", *sys.argv[5:]]), kills=len(found["resumed_at"]), runs=len(found["ends"]),
            whole=whole, wrong=len(found["ends"]) - whole, left_behind=sum(len(end["left"]) for end in found["ends"]),
        )  # fmt: skip
