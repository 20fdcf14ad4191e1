"""The record of everything that brim wrote into an output folder; nothing else there is removed or overwritten.

A file with a name like brim's may be the user's: a model of an earlier training, a copied checkpoint to preserve.
So each checkpoint and each file of the model is listed, by a digest of its content, before it gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from brim.core import codec
from brim.core.files import regular, write_text
from brim.errors import BrimError
from brim.run.checkpoint.manifest import MANIFEST_NAME, FileEntry, partial_folder, read_manifest
from brim.run.checkpoint.reading import entry_of

RECORD_NAME = "brim.output.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file written by brim; ``checksum`` is a digest of its ``FileEntry``."""

    bytes: int
    mtime_ns: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """By name: digests of the manifests of checkpoints, the versions of each file; hidden folders of unfinished
    work."""

    checkpoints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[str, tuple[WrittenFile, ...]] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()


class OutputRecord:
    """The record of the folder ``root``. Every call reads and writes it anew, as several threads and processes use
    it.

    If it is missing or damaged, nothing in the folder counts as written by brim.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._path = root, root / RECORD_NAME

    # -- hidden folders of unfinished work

    @contextmanager
    def unfinished(self, folder: Path) -> Iterator[None]:
        """List ``folder`` until it no longer exists; it stays listed if the process is killed."""
        self.begin(folder)
        try:
            yield
        finally:
            if not os.path.lexists(folder):
                with contextlib.suppress(OSError):
                    self.end(folder)

    def begin(self, folder: Path) -> None:
        """List the hidden ``folder`` before it is created."""
        content = self._read()
        self._write(replace(content, unfinished=tuple(sorted({*content.unfinished, folder.name}))))

    def end(self, folder: Path) -> None:
        """Remove the hidden ``folder`` from the list once it was deleted or renamed."""
        content = self._read()
        if folder.name in content.unfinished:
            self._write(replace(content, unfinished=tuple(n for n in content.unfinished if n != folder.name)))

    def remove_unfinished(self) -> None:
        """Delete the hidden folders of killed processes."""
        for name in self._read().unfinished:
            folder = self._root / name
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            self.end(folder)

    # -- checkpoints

    def add_checkpoint(self, name: str, content: Path) -> None:
        """List the checkpoint in the folder ``content`` before it is renamed to ``name``."""
        record, digest = self._read(), _manifest_digest(content)
        known = record.checkpoints.get(name, ())
        if digest is not None and digest not in known:
            self._write(replace(record, checkpoints={**record.checkpoints, name: (*known, digest)}))

    def has_checkpoint(self, folder: Path) -> bool:
        """True if brim wrote the checkpoint under this name and no file has been added to it."""
        if folder.is_symlink() or _manifest_digest(folder) not in self._read().checkpoints.get(folder.name, ()):
            return False
        return {entry.name for entry in folder.iterdir()} <= {*read_manifest(folder).files, MANIFEST_NAME}

    def remove_checkpoint(self, folder: Path) -> None:
        """Delete a checkpoint that has only its own files. It is hidden first: an incomplete checkpoint must not be
        visible."""
        hidden = partial_folder(folder)
        with self.unfinished(hidden):
            folder.rename(hidden)
            self.forget_checkpoint(folder.name)
            shutil.rmtree(hidden)

    def forget_checkpoint(self, name: str) -> None:
        """Remove ``name`` from the record: a later checkpoint of that name is the user's."""
        record = self._read()
        if name in record.checkpoints:
            self._write(replace(record, checkpoints={n: d for n, d in record.checkpoints.items() if n != name}))

    # -- files of the model

    def add_files(self, entries: Mapping[str, FileEntry], folder: Path) -> None:
        """List the files in ``folder`` before they are moved into the output folder."""
        record = self._read()
        files = {**record.files}
        for name, entry in entries.items():
            status = (folder / name).stat()
            written = WrittenFile(bytes=status.st_size, mtime_ns=status.st_mtime_ns, checksum=_digest(entry))
            files[name] = (*files.get(name, ()), written)
        self._write(replace(record, files=files))

    def keep_only(self, names: Mapping[str, FileEntry]) -> None:
        """Remove from the record all files but the latest version of each of ``names``."""
        record = self._read()
        self._write(replace(record, files={name: record.files[name][-1:] for name in names}))

    def file_names(self) -> list[str]:
        """Names of the listed files."""
        return list(self._read().files)

    def has_file(self, path: Path) -> bool:
        """True if the file is unchanged since brim wrote it under this name."""
        written = self._read().files.get(path.name, ())
        if path.is_symlink() or not path.is_file() or not written:
            return False
        status = path.stat()
        same_size = [file for file in written if file.bytes == status.st_size]
        if any(file.mtime_ns == status.st_mtime_ns for file in same_size):
            return True
        if not same_size:
            return False
        with contextlib.suppress(BrimError, OSError):
            digest = _digest(entry_of(path))  # it may have been copied, with the whole folder
            return any(file.checksum == digest for file in same_size)
        return False

    # -- the record itself

    def _read(self) -> _Listing:
        if self._path.is_symlink():
            return _Listing()
        try:
            text = regular(self._path).read_text(encoding="utf-8")
            content = codec.from_json(_Listing, json.loads(text), _VERSION)
        except (FileNotFoundError, ValueError, RecursionError):  # not OSError: a failing disk must raise
            return _Listing()
        names = (*content.checkpoints, *content.files, *content.unfinished)
        return content if all(Path(name).name == name for name in names) else _Listing()

    def _write(self, content: _Listing) -> None:
        if content == _Listing() and not self._path.is_symlink():
            self._path.unlink(missing_ok=True)
        else:
            text = json.dumps(codec.to_json(content, _VERSION), indent=0) + "\n"
            write_text(self._path, text, alone=True)


def remove_listed(folder: Path) -> None:
    """Delete the files of the checkpoint ``folder`` that its manifest lists, then the folder if it is empty. Without
    a manifest nothing is deleted."""
    if folder.is_symlink():
        return
    try:
        listed = set(read_manifest(folder).files)
    except BrimError:
        return
    (folder / MANIFEST_NAME).unlink()  # first: the remainder must not count as a checkpoint
    for name in listed:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the user's files are in it
        folder.rmdir()


def set_aside_foreign(path: Path) -> Path:
    """Rename ``path``, which brim did not write, to a name that no training uses."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.kept-{number}")):
        number += 1
    path.rename(aside)
    warnings.warn(f"{path} was not written by this training, so it was renamed to {aside.name}.", stacklevel=3)
    return aside


def _manifest_digest(folder: Path) -> str | None:
    """Digest of the checkpoint's manifest, which has the checksums of all files; None without a manifest."""
    try:
        return hashlib.blake2b(regular(folder / MANIFEST_NAME).read_bytes(), digest_size=8).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _digest(entry: FileEntry) -> str:
    return hashlib.blake2b(json.dumps(codec.encode(entry), sort_keys=True).encode(), digest_size=8).hexdigest()
