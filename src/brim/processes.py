"""Child processes that do not outlive the one that started them, and folders that a killed one does not leave."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_LENGTH_BYTES = 8  # of an answer, before it
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
def copied(work: Callable[[], bytes]) -> Iterator[Callable[[], bytes | None]]:
    """Call ``work`` in a copy of this process while the block runs in this one.

    What is given waits for the copy and tells what ``work`` returned; None: it raised, its process was killed, or
    none can be started here. The copy ends with the block at the latest. Other threads are not in it, so there
    should be none that hold a lock.
    """
    parent, child, read, write = os.getpid(), 0, -1, -1
    with contextlib.suppress(OSError):
        read, write = os.pipe()

    def answer() -> bytes | None:
        if not child:
            return None
        with open(read, "rb", closefd=False) as pipe:
            told = pipe.read()
        length = int.from_bytes(told[:_LENGTH_BYTES], "little")
        return told[_LENGTH_BYTES:] if len(told) == _LENGTH_BYTES + length else None

    try:
        if write >= 0 and hasattr(os, "fork"):
            with contextlib.suppress(OSError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's threads wait for work, of which a copy has none
                child = os.fork()
        if child == 0 and os.getpid() != parent:
            os.close(read)
            end_with_parent(parent)
            made = work()
            with open(write, "wb") as pipe:
                pipe.write(len(made).to_bytes(_LENGTH_BYTES, "little") + made)
            os._exit(0)
        if write >= 0:
            os.close(write)
        yield answer
    finally:
        if os.getpid() != parent:
            os._exit(1)
        if read >= 0:
            os.close(read)
        if child:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


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
