"""The user's cache folder, for measurements and for files that are expensive to build.

If it cannot be written (a container without a home, a full disk), contents stay in this process or in a temporary
folder, with one warning.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from brim.core.files import open_to_write, special_file
from brim.errors import TransferError

_unwritten: dict[Path, str] = {}  # texts that could not be written
_MOST_TEXT_BYTES = 64 << 20
_warned: set[Path] = set()
_own_folders: dict[int, Path] = {}  # process -> its temporary folder; a forked process has its own


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/brim``, else ``~/.cache/brim``. It may not exist, or be impossible to create."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # the XDG specification says to ignore a relative path
        return Path(base) / "brim"
    try:
        return Path.home() / ".cache" / "brim"
    except RuntimeError:  # a user without an entry, as in many containers
        return Path(os.devnull) / "brim"


def load_text(path: Path) -> str | None:
    """Return the text stored at ``path``; None if there is no readable regular file.

    Raises UnicodeDecodeError for a file that is not text.
    """
    if path in _unwritten:
        return _unwritten[path]
    try:
        # Does not follow links or wait for the writer of a pipe: ``store_text`` creates neither.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, encoding="utf-8") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_TEXT_BYTES:
                return None
            return file.read()
    except OSError:
        return None


def store_text(path: Path, text: str) -> None:
    """Replace the file ``path`` atomically by ``text``; on failure, keep it in this process and warn once."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            temporary = file.name
            file.write(text)
        Path(temporary).replace(path)
        _unwritten.pop(path, None)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        _unwritten[path] = text
        _warn(path.parent, error)


def make_folder(parent: Path, make: Callable[[Path], Path]) -> Path:
    """Call ``make`` with ``parent``, else with a temporary folder that is removed when the process ends.

    Raises OSError if that cannot be created either, and what ``make`` raises, unless it is a TransferError that may
    not happen on another disk.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return make(parent)
    except (OSError, TransferError) as error:
        own = _own_folder()
        if parent.is_dir() and parent.stat().st_dev == own.stat().st_dev and os.access(parent, os.W_OK | os.X_OK):
            raise  # the same disk
        _warn(parent, error)
    return make(own)


def fingerprint(files: Iterable[Path], *facts: object) -> str:
    """Return a name that changes with the files (path, size, time of change) and the facts."""
    digest = hashlib.sha256(json.dumps([str(fact) for fact in facts]).encode())
    for file in files:
        real = file.resolve()
        status = real.stat()
        digest.update(json.dumps([str(real), status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()[:16]


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``, built by ``fill`` in a temporary folder beside it and renamed when complete.

    On any error, Ctrl-C included, nothing is left; the remains of killed processes are removed. Of two processes at
    once, one builds and the other waits. If the cache cannot be written, or its disk is full, ``fill`` is called
    again for a temporary folder of this process.
    """
    own = own_folder()
    for candidate in (folder, *([own / folder.name] if own is not None else [])):
        if _is_folder(candidate):
            if special_file(candidate) is None:
                return candidate
            discard(candidate)
    try:
        return make_folder(folder.parent, partial(_filled, folder.name, fill))
    except OSError as error:
        raise TransferError(
            f"Cannot write {folder}.",
            f"{error.strerror or error}.",
            "Free some disk space, or set XDG_CACHE_HOME to a folder with room.",
        ) from error


def _filled(name: str, fill: Callable[[Path], None], parent: Path) -> Path:
    with _alone(parent / f".{name}.lock"):
        if (parent / name).is_dir():
            return parent / name
        for remains in parent.glob(f".{name}.partial-*"):
            shutil.rmtree(remains, ignore_errors=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent))
        try:
            fill(beside)
            beside.rename(parent / name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return parent / name


def discard(folder: Path) -> None:
    """Delete the damaged ``folder`` of ``build_once``, to be built again. Raises TransferError."""
    hidden = folder.with_name(f".{folder.name}.partial-{os.getpid()}")  # disappears at once
    try:
        folder.rename(hidden)
        shutil.rmtree(hidden)
    except FileNotFoundError:  # another process was faster
        return
    except OSError as error:
        raise TransferError(
            f"Cannot delete {folder}, which is damaged.", f"{error.strerror}.", "Delete it by hand."
        ) from error


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the file ``path`` for the block, then delete it. The system releases the lock if the process ends."""
    import fcntl  # missing on Windows

    while True:
        with os.fdopen(open_to_write(path), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The previous holder of the lock has deleted the file, and another process may have created a new one.
            try:
                same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                same = False
            if not same:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no permission
        return False


def own_folder() -> Path | None:
    """Return the temporary folder that replaces the cache folder in this process, if there is one."""
    return _own_folders.get(os.getpid())


def _own_folder() -> Path:
    process = os.getpid()
    if process not in _own_folders:
        folder = _own_folders[process] = Path(tempfile.mkdtemp(prefix="brim-cache-"))
        atexit.register(_remove, process, folder)
    return _own_folders[process]


def _remove(process: int, folder: Path) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)


def _warn(folder: Path, error: OSError | TransferError) -> None:
    root = cache_folder()
    if root in _warned:
        return
    _warned.add(root)
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else error.reason.rstrip(".")
    warnings.warn(
        f"brim could not save its cache in {folder} ({reason}), so the next run measures and computes again. "
        "Set XDG_CACHE_HOME to a writable folder.",
        stacklevel=4,
    )
