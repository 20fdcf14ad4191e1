"""Child processes that do not outlive the one that started them, and folders that a killed one does not leave."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_THEN_RUN = "import os, sys; from brim.processes import end_with_parent; end_with_parent(int(sys.argv[1])); " + (
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def end_with_parent(parent: int) -> None:
    """To be called in a child: however the process ``parent``, which started it, ends, even killed, this one is
    killed too. On Linux; elsewhere nothing happens. A program that takes this one's place (``exec``) is bound too.

    The kernel looks at the parent's thread: the one that started the child has to wait for it.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def bound(command: Sequence[str]) -> list[str]:
    """``command`` (its program with its full path), to be started by this process, and to end with it."""
    source = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {source!r}); {_THEN_RUN}"
    return [sys.executable, "-S", "-c", code, str(os.getpid()), *command]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder among the system's temporary ones, gone at the end. What killed processes left under that prefix is
    removed first.

    Its process holds a lock on it, which ends with the process, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # not there on Windows
        with tempfile.TemporaryDirectory(prefix=prefix) as path:
            yield Path(path)
        return

    def locked(folder: Path, how: int) -> int | None:
        """A descriptor with the folder's lock; None if another process has it, or the folder is not this user's."""
        try:
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if os.fstat(file).st_uid == os.getuid():
                fcntl.flock(file, how)
                return file
        except OSError:
            pass
        os.close(file)
        return None

    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        lock = locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    while True:
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path:
            lock = locked(Path(path), fcntl.LOCK_EX)
            if lock is None or not Path(path).exists():
                if lock is not None:
                    os.close(lock)
                continue  # taken, before it had its lock, for one that was left
            try:
                yield Path(path)
            finally:
                os.close(lock)
            return
