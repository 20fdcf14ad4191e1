"""Children by fork, to be killed: starting Python and PyTorch anew takes seconds each time."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(child: Callable[[], object]) -> int:
    """The process id of a copy of this process that calls ``child`` and ends: with 0, or 1 after an exception."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return pid


def was_killed(pid: int) -> bool:
    """Wait for it. Whether a signal ended it; anything else but success is an error."""
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)
