"""The user's cache folder: what was measured or made once is found again there.

A container may have a home that cannot be written, or none, and a disk is full some day. Nothing stops for that: what
cannot be kept is known to this process alone, and said once.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from brim.errors import TransferError

_unkept: dict[Path, tuple[str, float]] = {}  # what no disk took: text, and when it was made
_told: set[Path] = set()
_own_folders: dict[int, Path] = {}  # process -> its temporary folder, as forked ones have their own


def cache_folder() -> Path:
    """Where brim keeps what it can make again: ``$XDG_CACHE_HOME/brim``, else ``~/.cache/brim``.

    It may not exist, and it may be a folder that cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():  # the XDG specification: a relative path is to be ignored
        return Path(base) / "brim"
    try:
        return Path.home() / ".cache" / "brim"
    except RuntimeError:  # a user without an entry, as in many containers
        return Path(os.devnull) / "brim"


def kept(path: Path) -> tuple[str, float] | None:
    """The text that was kept at ``path`` and its age in seconds; None where nothing is, or nothing can be read.

    Raises UnicodeDecodeError for a file that is not text.
    """
    if path in _unkept:
        text, made_s = _unkept[path]
        return text, time.time() - made_s
    try:
        return path.read_text(encoding="utf-8"), time.time() - path.stat().st_mtime
    except OSError:
        return None


def keep(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and move it there, so that no other process reads half of it.

    Where that cannot be, this process remembers it, with a warning for the first.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            temporary = file.name
            file.write(text)
        Path(temporary).replace(path)
        _unkept.pop(path, None)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        _unkept[path] = text, time.time()
        _tell(path.parent, error)


def make_folder(parent: Path, make: Callable[[Path], Path]) -> Path:
    """``make(parent)``, once ``parent`` is there; in a temporary folder of this process where that cannot be.

    Such a folder is removed at the process's exit. Raises OSError where that cannot be made either, and what ``make``
    raises, unless it is a TransferError that another disk may not have.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return make(parent)
    except (OSError, TransferError) as error:
        own = _own_folder()
        if parent.is_dir() and parent.stat().st_dev == own.stat().st_dev and os.access(parent, os.W_OK | os.X_OK):
            raise  # it would be no better there
        _tell(parent, error)
    return make(own)


def fingerprint(files: Iterable[Path], *facts: object) -> str:
    """A name that changes when one of the files (path, size, time of change) or one of the facts does."""
    digest = hashlib.sha256(json.dumps([str(fact) for fact in facts]).encode())
    for file in files:
        real = file.resolve()
        status = real.stat()
        digest.update(json.dumps([str(real), status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()[:16]


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``fill`` in a temporary folder beside it and renamed when complete.

    On any error, Ctrl-C included, nothing is left, and what a killed process left half-made is removed. Of two
    processes at it at once, one makes it and the other waits for it. Where the cache cannot be written, or its disk
    is full, the folder is one of this process, and is gone when that ends: then ``fill`` is called twice.
    """
    own = own_folder()
    for candidate in (folder, *([own / folder.name] if own is not None else [])):
        if _is_folder(candidate):
            return candidate
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
        for left in parent.glob(f".{name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent))
        try:
            fill(beside)
            beside.rename(parent / name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return parent / name


def discard(folder: Path) -> None:
    """Let ``folder``, which ``build_once`` has made, be made again: it is damaged. Raises TransferError."""
    hidden = folder.with_name(f".{folder.name}.partial-{os.getpid()}")  # out of sight as a whole
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
    """Holds a lock on that file, which is gone afterwards. A process that ends, however it ends, holds none."""
    import fcntl  # not there on Windows

    while True:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The process that held the lock before has removed the file: then another process has a new one, or none.
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
    except OSError:  # in a folder that is not for us to look into
        return False


def own_folder() -> Path | None:
    """The temporary folder that stands for the cache folder in this process, if there is one."""
    return _own_folders.get(os.getpid())


def _own_folder() -> Path:
    process = os.getpid()
    if process not in _own_folders:
        folder = _own_folders[process] = Path(tempfile.mkdtemp(prefix="brim-cache-"))
        atexit.register(_remove, process, folder)
    return _own_folders[process]


def _remove(process: int, folder: Path) -> None:
    if os.getpid() == process:  # a forked one leaves it alone
        shutil.rmtree(folder, ignore_errors=True)


def _tell(folder: Path, error: OSError | TransferError) -> None:
    root = cache_folder()
    if root in _told:
        return
    _told.add(root)
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else error.found.rstrip(".")
    warnings.warn(
        f"Files for later runs could not be kept in {folder} ({reason}): the next run makes them again. "
        "Set XDG_CACHE_HOME to a folder that can be written.",
        stacklevel=4,
    )


__all__ = ["build_once", "cache_folder", "discard", "fingerprint", "keep", "kept", "make_folder", "own_folder"]
