"""What a command writes to a terminal: it runs in a copy of this process, whose standard streams are a terminal."""

from __future__ import annotations

import os
import pty
import sys
import traceback
from collections.abc import Callable

from brim.cli import main


def on_terminal(words: list[str], before: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
    """The exit code of a command, and all that it wrote. ``before`` is called in the copy first."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody answers
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            os.environ.update(TERM="xterm-256color", COLUMNS="400", LINES="50")
            before()
            code = main(words)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    written = b""
    while True:
        try:
            written += (more := os.read(terminal, 1 << 16))
        except OSError:  # the other end is closed
            break
        if not more:
            break
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written
