"""Files that are files: what is read at once must end, and a pipe or a device may never."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "It is a folder"),
    (stat.S_ISFIFO, errno.EINVAL, "It is a pipe, not a file"),
    (stat.S_ISSOCK, errno.EINVAL, "It is a socket, not a file"),
    (stat.S_ISCHR, errno.EINVAL, "It is a device, not a file"),
    (stat.S_ISBLK, errno.EINVAL, "It is a device, not a file"),
)


def regular(path: str | Path) -> Path:
    """``path``, once it is known to be a file, behind whatever links. Raises OSError, as opening it would."""
    mode = Path(path).stat().st_mode
    for is_kind, number, words in _KINDS:
        if is_kind(mode):
            raise OSError(number, words, str(path))
    return Path(path)


def special_file(folder: Path) -> tuple[str, str] | None:
    """The name of an entry of ``folder`` that is neither a file nor a folder, and what it is; None without one."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        try:
            if not entry.is_dir():
                regular(entry.path)
        except FileNotFoundError:  # a link to nothing: as if it were not there
            continue
        except OSError as error:
            if error.errno == errno.EINVAL:
                return entry.name, str(error.strerror)
    return None
