"""Detect changes of weight files after their headers were read, which would mix the bytes of two models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from brim.errors import TransferError

_versions_by_path: dict[str, FileVersion] = {}  # at the last read of each header


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVersion:
    """A file's attributes that change when it is written to or replaced."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the version of the file with this status."""
        return cls(device=status.st_dev, inode=status.st_ino, bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def remember(path: str, version: FileVersion) -> None:
    """Require ``version`` of later readers of ``path``, whose header was read."""
    _versions_by_path[path] = version


def opened_version(path: str, descriptor: int) -> FileVersion:
    """Return the version of a file just opened. Raises TransferError if its header was read of another version."""
    version = _versions_by_path.get(path) or FileVersion.of(os.fstat(descriptor))
    check_version(path, descriptor, version)
    return version


def check_version(path: str, descriptor: int, version: FileVersion) -> None:
    """Raise TransferError if the open file has another version."""
    now = FileVersion.of(os.fstat(descriptor))
    if now == version:
        return
    replaced = (now.device, now.inode) != (version.device, version.inode)
    problem = "Another file has taken its place" if replaced else "It was written to"
    raise TransferError(
        f"Cannot go on with {path}.",
        f"{problem} since its header was read: the result so far may mix two models.",
        "Start again, and do not change the file while it is in use.",
    )
