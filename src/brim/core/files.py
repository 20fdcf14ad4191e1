"""Open, replace and identify regular files safely: no pipes or devices, no writing through links."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

Identity = tuple[int, int]  # device and inode: one file, whatever its names

_KINDS = (
    (stat.S_ISDIR, errno.EISDIR, "It is a folder"),
    (stat.S_ISFIFO, errno.EINVAL, "It is a pipe, not a file"),
    (stat.S_ISSOCK, errno.EINVAL, "It is a socket, not a file"),
    (stat.S_ISCHR, errno.EINVAL, "It is a device, not a file"),
    (stat.S_ISBLK, errno.EINVAL, "It is a device, not a file"),
)


def regular(path: str | Path) -> Path:
    """Return ``path`` if it is a regular file or links to one. Raises OSError otherwise."""
    mode = Path(path).stat().st_mode
    for is_kind, number, words in _KINDS:
        if is_kind(mode):
            raise OSError(number, words, str(path))
    return Path(path)


def open_to_write(path: str | Path, *, new: bool = False, append: bool = False) -> int:
    """Open the file ``path`` to read and write, create it if it is missing, and return its descriptor.

    The file is not truncated. Raises OSError for a symbolic or a hard link, which could lead to another file, for a
    folder, a pipe or a device, and with ``new`` for a file that exists.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # opening a pipe would block
    flags |= (os.O_EXCL if new else 0) | (os.O_APPEND if append else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "It is a symbolic link, which is not followed", str(path)) from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: another process has just deleted it
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EMLINK, "It is a hard link: the same file has another name", str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))


def special_file(folder: Path) -> tuple[str, str] | None:
    """Return the name and kind of an entry of ``folder`` that is neither file nor folder; None without one."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        try:
            if not entry.is_dir():
                regular(entry.path)
        except FileNotFoundError:  # a broken link
            continue
        except OSError as error:
            if error.errno == errno.EINVAL:
                return entry.name, str(error.strerror)
    return None


@contextlib.contextmanager
def replacing(path: str | Path, *, alone: bool = False) -> Iterator[Path]:
    """Replace the file ``path`` atomically by the file that the block writes; a block that fails leaves it unchanged.

    The target of a symbolic link is replaced, not the link. Another hard link keeps the old content. A pipe or a
    device is written directly. ``alone``: no other process writes into the folder, so a file that a killed process
    left is overwritten; and no user has named the file, so a link is refused. Raises OSError.
    """
    if alone and Path(path).is_symlink():
        raise OSError(errno.ELOOP, "It is a symbolic link, which is not followed", str(path))
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    process = "" if alone else f".{os.getpid()}-{secrets.token_hex(4)}"
    beside = target.with_name(f".{target.name[:50]}{process}.partial")
    if alone:
        beside.unlink(missing_ok=True)
    os.close(open_to_write(beside, new=True))
    try:
        yield beside
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, *, alone: bool = False) -> None:
    """Replace the file ``path`` atomically by ``text`` in UTF-8. Raises OSError."""
    with replacing(path, alone=alone) as partial:
        partial.write_text(text, encoding="utf-8")


def identities(paths: Iterable[Path]) -> dict[Identity, Path]:
    """Map device and inode to each path that exists, and to the entries of each folder."""
    paths_by_identity: dict[Identity, Path] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            paths_by_identity.setdefault(identity(path), path)
            if path.is_dir():
                for entry in path.iterdir():
                    with contextlib.suppress(OSError):  # a broken link
                        paths_by_identity.setdefault(identity(entry), entry)
    return paths_by_identity


def identity(path: Path) -> Identity:
    """Return the device and inode of a file or folder: faster than resolving its path."""
    status = path.stat()
    return status.st_dev, status.st_ino
