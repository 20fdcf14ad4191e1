"""A program that makes what brim keeps, in children that it kills at random moments, and prints what came of it.

killed_caches.py generate MODEL ROOT KILLS: ``brim generate --precision int8``, which converts the model once.
killed_caches.py rehearse PACKAGES ROOT KILLS: the device that ``brim rehearse`` builds for the PyTorch in PACKAGES.

After each kill it is done again in the same cache, unhindered: it ends as in a fresh one, and nothing else is left.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from brim.cli import main
from support.forked import forked, was_killed

PROBED = "hardware"  # what the machine does: measured once, for all caches


class Killer:
    """Runs ``work``, which prints what is to be the same each time, with a cache of its own for each kill."""

    def __init__(self, root: Path, work: Callable[[Path], object]) -> None:
        self._root, self._work, self._choose = root, work, random.Random(0)
        begin_s = time.monotonic()
        self.told, self.kept = self.whole(root / "fresh")
        self.whole_s = time.monotonic() - begin_s

    def _begin(self, cache: Path) -> int:
        def child() -> None:
            os.dup2(os.open(self._root / "told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            sys.stdout = os.fdopen(1, "w")
            os.environ["XDG_CACHE_HOME"] = str(cache)
            self._work(cache)
            sys.stdout.flush()

        if not cache.exists():
            shutil.copytree(self._root / "warm", cache)
        return forked(child, leads=True)

    def whole(self, cache: Path) -> tuple[str, dict[str, int]]:
        """What it prints, and the files that it keeps, with their sizes."""
        assert not was_killed(self._begin(cache))
        return (self._root / "told").read_text(), _files(cache)

    def killed(self, number: int) -> dict[str, Any]:
        cache = self._root / f"cache-{number}"
        pid = self._begin(cache)
        time.sleep(self._choose.uniform(0, self.whole_s))
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet a group
                continue
        killed, left = was_killed(pid), _files(cache)
        told, kept = self.whole(cache)
        return {
            "killed": killed, "left": sorted(left.keys() - self.kept.keys()), "whole": told == self.told,
            "kept": {name: kept.get(name) for name in self.kept} == self.kept,
        }  # fmt: skip


def _files(cache: Path) -> dict[str, int]:
    found = {str(path.relative_to(cache)): path for path in cache.rglob("*") if path.is_file()}
    return {name: path.stat().st_size for name, path in found.items() if PROBED not in name}


def generating(model: str) -> Callable[[Path], object]:
    command = ["generate", model, "--precision", "int8", "--prompt", "hi", "--max-new-tokens", "4"]

    def work(cache: Path) -> None:
        assert main(command) == 0

    return work


def building(site_packages: str) -> Callable[[Path], object]:
    from brim.rehearsal import build

    def work(cache: Path) -> None:
        print(sorted(path.name for path in build.build(Path(site_packages)).iterdir()))

    return work


def run(kind: str, subject: str, root: Path, kills: int) -> dict[str, Any]:
    work = generating(subject) if kind == "generate" else building(subject)
    (root / "warm").mkdir()
    os.environ["XDG_CACHE_HOME"] = str(root / "warm")
    if kind == "generate":
        work(root)  # what libraries import late is here now, and the machine is measured
        shutil.rmtree(root / "warm" / "brim" / "quantized")
    gc.collect()
    gc.freeze()
    killer = Killer(root, work)
    ends: list[dict[str, Any]] = []
    while sum(end["killed"] for end in ends) < kills:
        ends.append(killer.killed(len(ends)))
    return {
        "kills": kills,
        "runs": len(ends),
        "whole": sum(end["whole"] and end["kept"] for end in ends),
        "ends": ends,
    }


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout
    print(json.dumps(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))), file=out, flush=True)
