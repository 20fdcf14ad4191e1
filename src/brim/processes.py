"""Child processes that end with their parent, and temporary folders that a killed process does not leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_BIND_AND_EXEC = (
    "import os, sys; from brim.processes import end_with_parent; end_with_parent(int(sys.argv[1])); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def end_with_parent(parent: int) -> None:
    """Kill this child process when its ``parent`` ends, however it ends. Holds across ``exec``; Linux only.

    The kernel watches the thread that started the child, so that thread has to wait for it.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def python_command(
    *arguments: str | os.PathLike[str], interpreter: str | os.PathLike[str] | None = None
) -> list[str]:
    """Return the command that starts Python without importing from the current folder.

    Modules (``-m``) and code (``-c``) get ``-P``, as Python would import from the current folder first. A file
    imports its neighbours from its own folder, as always.

    Args:
        arguments: Python's options with ``-m`` or ``-c``, or a file; then the program's arguments.
        interpreter: The Python to start. None: this one.
    """
    words = [os.fspath(argument) for argument in arguments]
    safe = ["-P"] if words[0].startswith("-") else []
    return [os.fspath(interpreter or sys.executable), *safe, *words]


def bound(command: Sequence[str]) -> list[str]:
    """Return ``command`` (its program with its full path) wrapped to end with this process."""
    source = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {source!r}); {_BIND_AND_EXEC}"
    return python_command("-S", "-c", code, str(os.getpid()), *command)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Bind process groups created within the block to the loopback, unless the user has named their interfaces.

    Gloo does not authenticate, and by default listens on the interface of the host's name.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)][:1]
    variables = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    os.environ.update({variable: name for variable in variables for name in names})
    try:
        yield
    finally:
        for variable in variables:
            os.environ.pop(variable, None)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder for the block, and first remove those with this prefix that killed processes left.

    The process holds a lock on its folder, which the system releases however the process ends.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        with tempfile.TemporaryDirectory(prefix=prefix) as path:
            yield Path(path)
        return

    def locked(folder: Path, how: int) -> int | None:
        """Lock the folder; None if another process holds the lock, or the folder is not this user's."""
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
                continue  # another process took it for a folder left behind, before it was locked
            try:
                yield Path(path)
            finally:
                os.close(lock)
            return
