"""Start ranks on this machine without torchrun: brim runs itself N times with torchrun's environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence

from brim.errors import TransferError
from brim.processes import bound, python_command, temporary_folder
from brim.run.ranks.group import STORE

_POLL_S = 0.05
_GRACE_S = 15.0  # for the other ranks to end by themselves after a failure
_STOP_S = 5.0


def start(ranks: int, words: Sequence[str]) -> int:
    """Run ``brim WORDS`` on so many ranks; returns the exit code of the first that fails, 0 if none does.

    They meet in a file that only this user can read: nothing listens, and no other user can take part. No rank
    outlives this call. Raises TransferError if a rank was ended by a signal and no other rank has reported it.
    """
    with temporary_folder("brim-ranks-") as folder:
        shared = {
            **os.environ, STORE: str(folder / "store"), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": "brim", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        shared.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
        command = bound(python_command("-m", "brim", *words))
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
                children.append(subprocess.Popen(command, env={**shared, **own}))
            return _ended(children)
        finally:
            _stop(children)


def _ended(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or until a grace period after the first failure; returns the exit code."""
    failed_s: float | None = None
    while any(child.poll() is None for child in children):
        if failed_s is None and any(child.returncode for child in children):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() > failed_s + _GRACE_S:
            break
        time.sleep(_POLL_S)
    failures = [child.returncode for child in children if child.returncode and child.returncode > 0]
    killed = [(rank, -child.returncode) for rank, child in enumerate(children) if (child.returncode or 0) < 0]
    if killed and (not failures or killed[0][0] == 0):  # else rank 0 has reported it
        rank, number = killed[0]
        raise TransferError(
            f"{len(children)} ranks were started.", f"Rank {rank} was ended by {signal.Signals(number).name}.",
            "If nobody sent that signal, the system's log tells whether memory ran out.",
        )  # fmt: skip
    return failures[0] if failures else 0


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
