"""A program that makes what brim keeps, in children that it kills at random moments, and prints what came of it.

killed_caches.py generate MODEL ROOT KILLS: ``brim generate --precision int8``, which converts the model once.
killed_caches.py rehearse PACKAGES ROOT KILLS: the device that ``brim rehearse`` builds for the PyTorch in PACKAGES.
killed_caches.py rehearsal KEPT ROOT KILLS: ``brim rehearse`` of a small program, with the PyTorch and the device in
KEPT (``.rehearsal``). The command alone is killed, five times before it is done again: its program ends by itself.

After each kill it is done again in the same cache, unhindered: it ends as in a fresh one, and nothing else is left.
With --write, what came of it is kept in measurements/kills.json.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kills import asked, keep

from brim.cli import main
from support.forked import forked, was_killed

PROBED = "hardware"  # what the machine does: measured once, for all caches
TEMPORARY = "temporary"
PROGRAM = """
import torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(3):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Killer:
    """Runs ``work``, which prints what is to be the same each time, with a cache of its own for each kill.

    ``group``: with the processes that it started. ``times``: kills before it is done again."""

    def __init__(self, root: Path, work: Callable[[Path], object], *, group: bool = True, times: int = 1) -> None:
        self._root, self._work, self._choose = root, work, random.Random(0)
        self._group, self._times = group, times
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
            shutil.copytree(self._root / "warm", cache, symlinks=True)
        return forked(child, leads=True)

    def whole(self, cache: Path) -> tuple[str, dict[str, int]]:
        """What it prints, and the files that it keeps, with their sizes."""
        assert not was_killed(self._begin(cache))
        return (self._root / "told").read_text(), _files(cache)

    def killed(self, number: int) -> dict[str, Any]:
        cache = self._root / f"cache-{number}"
        killed = sum(self._kill(cache) for _ in range(self._times))
        survivors, left = _survivors(cache), _files(cache)
        told, kept = self.whole(cache)
        behind = [name for name in kept.keys() - self.kept.keys() if name.startswith(TEMPORARY)]
        return {
            "killed": killed, "left": sorted(left.keys() - self.kept.keys()), "whole": told == self.told,
            "kept": {name: kept.get(name) for name in self.kept} == self.kept, "behind": sorted(behind) + survivors,
        }  # fmt: skip

    def _kill(self, cache: Path) -> bool:
        pid = self._begin(cache)
        time.sleep(self._choose.uniform(0, self.whole_s))
        for kill in (os.killpg, os.kill) if self._group else (os.kill,):
            with contextlib.suppress(ProcessLookupError):  # not yet a group
                kill(pid, signal.SIGKILL)
        return was_killed(pid)


def _survivors(cache: Path, within_s: float = 20.0) -> list[str]:
    """Programs that were started with this cache and still run after a while."""
    stop_s = time.monotonic() + within_s
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{cache}\0".encode() in (process / "environ").read_bytes():
                    found.append(f"process {process.name}")
        if not found or time.monotonic() > stop_s:
            return found
        time.sleep(0.1)


def _files(cache: Path) -> dict[str, int]:
    found = {str(path.relative_to(cache)): path for path in cache.rglob("*") if path.is_file()}
    return {name: path.stat().st_size for name, path in found.items() if PROBED not in name}


def generating(model: str) -> Callable[[Path], object]:
    command = ["generate", model, "--precision", "int8", "--prompt", "hi", "--max-new-tokens", "4"]

    def work(cache: Path) -> None:
        assert main(command) == 0

    return work


def building(site_packages: str) -> Callable[[Path], object]:
    from brim.device import build

    def work(cache: Path) -> None:
        print(sorted(path.name for path in build.build(Path(site_packages)).iterdir()))

    return work


def rehearsing(kept: str) -> Callable[[Path], object]:
    def work(cache: Path) -> None:
        temporary, users, program = cache / TEMPORARY, cache / "brim" / "rehearsal", cache / "program.py"
        program.write_text(PROGRAM)
        temporary.mkdir(exist_ok=True)
        users.parent.mkdir(exist_ok=True)
        if not users.exists():
            users.symlink_to(Path(kept).resolve())
        os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            assert main(["rehearse", "--gpu", "L40S", "--json", str(program)]) == 0
        (process,) = json.loads(told.getvalue())["processes"]
        print([process[name] for name in ("ended", "steps", "devices", "fits")])
        print(sorted(path.name for path in temporary.glob("brim-*")))

    return work


def run(kind: str, subject: str, root: Path, kills: int) -> dict[str, Any]:
    work = {"generate": generating, "rehearse": building, "rehearsal": rehearsing}[kind](subject)
    (root / "warm").mkdir()
    os.environ["XDG_CACHE_HOME"] = str(root / "warm")
    if kind != "rehearse":
        work(root / "warm")  # what libraries import late is here now, and the machine is measured
    if kind == "generate":
        shutil.rmtree(root / "warm" / "brim" / "quantized")
    gc.collect()
    gc.freeze()
    killer = Killer(root, work) if kind != "rehearsal" else Killer(root, work, group=False, times=5)
    ends: list[dict[str, Any]] = []
    while sum(end["killed"] for end in ends) < kills:
        ends.append(killer.killed(len(ends)))
    return {
        "kills": sum(end["killed"] for end in ends),
        "runs": len(ends),
        "whole": sum(end["whole"] and end["kept"] for end in ends),
        "ends": ends,
    }


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout
    is_kept = asked()
    made = run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(made), file=out, flush=True)
    if is_kept:
        keep(
            f"killed_caches.py {sys.argv[1]}", kills=made["kills"], runs=made["runs"], whole=made["whole"],
            wrong=made["runs"] - made["whole"], left_behind=sum(len(end["behind"]) for end in made["ends"]),
        )  # fmt: skip
