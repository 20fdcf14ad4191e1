"""A program that kills children of its own while they write checkpoints, and prints what was left as JSON.

killed_saves.py every ROOT: before every call, which is after every call too.
killed_saves.py random ROOT: at 50 moments.
It forks, because starting Python and PyTorch anew takes seconds each time.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from brim.run.checkpoint.reading import latest
from brim.run.checkpoint.saver import Checkpointer
from support.forked import forked, was_killed
from support.saved_steps import hidden, is_whole, save, save_now, watched


def die(at: int) -> Callable[[int], None]:
    return lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == at else None


def every(root: Path) -> list[dict[str, object]]:
    """Kill a save of step 3 (which deletes step 1), and one of step 2, which takes the place of another."""
    start = root / "start"
    save_now(start, 1, 10)
    save_now(start, 2, 20)
    found = []
    for step in (3, 2):
        for number in itertools.count():
            folder = Path(shutil.copytree(start, root / "killed"))

            def child(folder: Path = folder, step: int = step, number: int = number) -> None:
                with watched(die(number)):
                    save_now(folder, step, 30)

            killed = was_killed(forked(child))
            left = latest(folder)
            report = {"step": step, "call": number, "found": left.state, "whole": is_whole(left)}
            save_now(folder, 4, 40)
            found.append(report | {"hidden": hidden(folder), "then": latest(folder).step})
            shutil.rmtree(folder)
            if not killed:
                break
    return found


def at_random(root: Path) -> list[dict[str, object]]:
    """Kill a process that writes one checkpoint after the other, and start it again from the newest."""
    choose, found = random.Random(0), []
    save_now(root, 1, 1)
    for _ in range(50):
        begin, (read_end, write_end) = latest(root).step, os.pipe()

        def child(begin: int = begin, write_end: int = write_end) -> None:
            keeper = Checkpointer(root, keep=2, staging_bytes=4096)
            for step in itertools.count(begin + 1):
                save(keeper, step, step)
                os.write(write_end, b".")

        pid = forked(child)
        os.close(write_end)
        time.sleep(choose.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert was_killed(pid)
        told = begin + len(os.read(read_end, 1 << 20))
        os.close(read_end)
        left = latest(root)
        found.append({"told": told, "step": left.step, "whole": is_whole(left), "skipped": left.skipped})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each child would look through all of it again
    print(json.dumps({"every": every, "random": at_random}[sys.argv[1]](Path(sys.argv[2]))))
