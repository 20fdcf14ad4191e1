"""Files that take the place of others: what lies under the name is whole at any moment, the old file or the new."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

Identity = tuple[int, int]  # device and inode: one file, whatever its names


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file beside ``path``, to be written, that takes its place when the block ends well and is gone when it fails.

    A symbolic link stays, and what it leads to is replaced; another name of the same file (a hard link) keeps the old
    content. A pipe or a device is given as it is. Raises OSError.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield beside
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """``text`` in UTF-8 as the file ``path``, as ``replacing`` does. Raises OSError."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def identities(paths: Iterable[Path]) -> dict[Identity, Path]:
    """Each file that is there, and each folder with what is in it, by what it is: links and mounts are seen through.

    Folders within folders are not looked into.
    """
    paths_by_identity: dict[Identity, Path] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            paths_by_identity.setdefault(_identity(path), path)
            if path.is_dir():
                for entry in path.iterdir():
                    with contextlib.suppress(OSError):  # a link that leads nowhere
                        paths_by_identity.setdefault(_identity(entry), entry)
    return paths_by_identity


def _identity(path: Path) -> Identity:
    status = path.stat()
    return status.st_dev, status.st_ino
