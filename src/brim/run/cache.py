"""The user's cache folder: what brim converted once, it finds again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from brim.errors import TransferError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/brim``, or ``~/.cache/brim``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "brim"


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
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            fill(partial)
            _rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise TransferError(
            f"{folder} was to be written.",
            f"{error.strerror or error}.",
            "Free some disk space, or set XDG_CACHE_HOME to a folder with room.",
        ) from error
    return folder


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
