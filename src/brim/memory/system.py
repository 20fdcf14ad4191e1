"""What moving bytes takes of the operating system beyond Python's common ground, and what stands in on macOS."""

from __future__ import annotations

import mmap
import os
import sys

from brim.errors import UnsupportedError

_NEEDED = {
    "preadv(2)": (os, "preadv"),
    "pwrite(2)": (os, "pwrite"),
    "private memory mappings": (mmap, "MAP_PRIVATE"),
}


def require() -> None:
    """Raises UnsupportedError where weights cannot be read into buffers of one's own: on Windows."""
    missing = [name for name, (module, attribute) in _NEEDED.items() if not hasattr(module, attribute)]
    if missing:
        raise UnsupportedError(
            "Cannot move a model between memory and disk.",
            f"{sys.platform} has no {' and no '.join(missing)} in Python.",
            "Use Linux, or WSL 2 on Windows. brim estimate, brim plan and brim explain work here.",
        )


def flush(descriptor: int) -> None:
    """The file's bytes are on the drive; when it was changed need not be."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def forget_cached(descriptor: int, offset: int = 0, size_bytes: int = 0) -> None:
    """The system need not keep these pages of a file any longer (all, if 0 bytes). It is free not to listen, and some
    cannot be told."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)
