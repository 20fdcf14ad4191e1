"""A program that trains by ``brim train`` in children of its own, in each of which one call of the C library fails
once, and prints what came of it as JSON.

failed_calls.py MODEL DATA ROOT KINDS MOST [OPTION...] [--write]: of each of KINDS (``write,mmap``) every call, or
MOST that lie evenly, in random order. A child whose call fails ends as a run without faults does, or by one error;
then it is resumed, once for all that left the same files, and ends like that run. It is to be started with the
library of failing_calls.c preloaded. With --write, what came of it is kept in measurements/kills.json.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from kills import asked, keep

from brim.cli import main
from brim.errors import ABOVE_BUDGET
from support.trainings import BATCH, LR, SEQ, course, remember_predictions, same_weights

# EIO for writes: what a full disk does is tested beside it, and both are told the same way.
KINDS = {
    "write": errno.ENOSPC, "pwrite": errno.EIO, "rename": errno.EIO, "fsync": errno.EIO, "mmap": errno.ENOMEM,
    "allocation": errno.ENOMEM,
}  # fmt: skip
COMMAND = ["--steps", "2", "--save-every", "1", "--seq", str(SEQ), "--batch", str(BATCH), "--lr", str(LR)]
COMMAND += ["--ram", "1GiB", "--device", "cpu"]
MOST_S = 120.0  # until a run counts as one that hangs


class Failer:
    def __init__(self, model: str, data: str, root: Path, options: list[str]) -> None:
        self._command = ["train", model, "--data", data, *COMMAND, *options]
        self._root = root
        self._library = ctypes.CDLL(None)
        self._library.brim_counted.restype = ctypes.c_long
        self._resumed: set[str] = set()  # states from which a run ended as it should
        self.reference = root / "whole"
        assert self.run(self.reference)[0] == 0

    def run(self, output: Path, kind: str = "", number: int = 0, then: Callable[[], None] = lambda: None) -> Any:
        """(exit code, what it wrote) of a run in a child; no code: it hung."""
        told = self._root / "told"
        pid = os.fork()
        if pid == 0:
            fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            if kind:
                self._library.brim_arm(kind.encode(), ctypes.c_long(number), KINDS[kind])
            code = main([*self._command, "--output", str(output), *(["--resume"] if not kind else [])])
            then()
            _end(code)
        stop_s = time.monotonic() + MOST_S
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > stop_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None, told.read_text()
            time.sleep(0.002)
        code, said = os.waitstatus_to_exitcode(ended[1]), told.read_text(errors="replace")
        if code == ABOVE_BUDGET and "Error: " not in said:
            code = 0  # a copy of a process maps its libraries anew, and measures that
        return code, said

    def count(self, kind: str) -> int:
        """How many calls of this kind a run makes."""
        counted = self._root / "counted"
        output = self._root / f"counted-{kind}"
        assert self.run(output, kind, 0, lambda: _write(counted, self._library.brim_counted()))[0] == 0
        return int(counted.read_text())

    def fail(self, kind: str, number: int) -> str:
        """What came of one failed call: "finished", "refused", or in which way it was wrong."""
        output = self._root / "output"
        shutil.rmtree(output, ignore_errors=True)
        code, told = self.run(output, kind, number)
        if code is None:
            return "hung"
        if code not in (0, 1, 2, 3) or "Traceback" in told or (code and "Error: " not in told):
            return f"wrong: it ended with {code}: {told[-1500:]}"
        state = _state(output) if code else ""
        if state and state in self._resumed:
            return "refused"
        if code and (resumed := self.run(output))[0] != 0:
            return f"wrong: resumed, it ended with {resumed[0]}: {resumed[1][-1500:]} (first: {told[-500:]})"
        if not (course(output) == course(self.reference) and same_weights(output, self.reference)):
            return f"wrong: another course or other weights ({code})"
        left = [path.name for path in output.iterdir() if path.name.endswith((".partial", ".lock"))]
        if left and code:  # what a failure leaves, a later run takes away
            return f"wrong: {left} is left"
        if not code:
            return "finished"
        self._resumed.add(state)
        return "refused"


def _state(output: Path) -> str:
    """A digest of all that a resumed run may find, but for what was measured. What it finds twice, it does twice."""
    found = hashlib.sha256()
    for path in sorted(output.rglob("*")):
        if path.is_file() and path.parent.name != "tensorboard":
            told = path.name == "metrics.jsonl"
            found.update(repr((str(path), str(course(output)).encode() if told else path.read_bytes())).encode())
    return found.hexdigest()


def _end(code: int) -> None:
    """As the interpreter does it, but for taking all modules down, which costs twice what the training does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write(path: Path, number: int) -> None:
    path.write_text(str(number))


def run(model: str, data: str, root: Path, kinds: list[str], most: int, options: list[str]) -> dict[str, Any]:
    remember_predictions()
    warm = ["train", model, "--data", data, *COMMAND, *options, "--output", str(root / "warm")]
    assert main([*warm, "--json"]) == 0  # what libraries import late is here now
    gc.collect()
    gc.freeze()  # or each child would look through all of it again
    failer, found = Failer(model, data, root, options), {}
    for kind in kinds:
        calls = failer.count(kind)
        step = max(1, -(-calls // most))
        numbers = range(1, calls + 1, step)
        ends = {}
        for number in random.Random(0).sample(
            numbers, len(numbers)
        ):  # what is cut short has tried some of everywhere
            begin_s = time.monotonic()
            ends[number] = end = failer.fail(kind, number)
            print(
                f"{kind} {number} of {calls}: {end} ({time.monotonic() - begin_s:.1f} s)", file=sys.stderr, flush=True
            )
        found[kind] = {
            "calls": calls, "failed": len(numbers),
            **{end: sum(one == end for one in ends.values()) for end in ("finished", "refused", "hung")},
            "wrong": {number: end for number, end in ends.items() if end.startswith("wrong")},
        }  # fmt: skip
        print(kind, found[kind], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout
    is_kept = asked()
    named, limit = sys.argv[4].split(","), int(sys.argv[5])
    made = run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), named, limit, sys.argv[6:])
    print(json.dumps(made), file=out, flush=True)
    for name, ends in made.items() if is_kept else ():
        keep(f"failed_calls.py {name}", **{**ends, "wrong": len(ends["wrong"])})
