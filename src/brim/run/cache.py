"""Folders in the user's cache: what brim converted once, it finds again."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from brim.errors import TransferError
from brim.measure.cache import cache_folder, make_folder, own_folder

__all__ = ["build_once", "cache_folder", "fingerprint"]


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

    On any error, Ctrl-C included, nothing is left. Of two processes at it at once, one wins and both get the result.
    Where the cache cannot be written, or its disk is full, the folder is one of this process, and is gone when that
    ends: then ``fill`` is called twice.
    """
    own = own_folder()
    for made in (folder, *([own / folder.name] if own is not None else [])):
        if _is_folder(made):
            return made
    try:
        return make_folder(folder.parent, partial(_filled, folder.name, fill))
    except OSError as error:
        raise TransferError(
            f"{folder} was to be written.",
            f"{error.strerror or error}.",
            "Free some disk space, or set XDG_CACHE_HOME to a folder with room.",
        ) from error


def _filled(name: str, fill: Callable[[Path], None], parent: Path) -> Path:
    beside = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    try:
        fill(beside)
        _rename(beside, parent / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return parent / name


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # in a folder that is not for us to look into
        return False


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
