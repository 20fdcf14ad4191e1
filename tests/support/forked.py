"""Children by fork, to be killed: starting Python and PyTorch anew takes seconds each time."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable


def forked(child: Callable[[], object], *, leads: bool = False) -> int:
    """The process id of a copy of this process that calls ``child`` and ends: with 0, or 1 after an exception.

    ``leads``: with those that it forks it is a group, to be killed at once.
    """
    pid = os.fork()
    if pid == 0:
        try:
            if leads:
                os.setpgid(0, 0)
            child()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return pid


def as_ranks(world: int, child: Callable[[], object]) -> int:
    """Call ``child`` in ``world`` processes as torchrun would start them. The first exit code that is not 0, or 0.

    Where one fails, torchrun ends the others; here they end by themselves, as rank 0 hears of it.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forked",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            code = 1
            try:
                made = child()
                code = made if isinstance(made, int) else 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        pids.append(pid)
    from torch.distributed import TCPStore

    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # torchrun has it, not rank 0
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del store
    return next((code for code in codes if code), 0)


def was_killed(pid: int) -> bool:
    """Wait for it. Whether a signal ended it; anything else but success is an error."""
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)
