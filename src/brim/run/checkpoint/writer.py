"""A checkpoint being written: a hidden folder that becomes visible only when it is complete.

The order makes it safe: every file is written and fsynced, then the manifest, then the folder; the files are read
back and compared; only then is the folder renamed, its parent fsynced, and only then are older checkpoints deleted.
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014: a rename is no barrier for the data of the
renamed file.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from brim.memory.checkpoint_files import TensorSource
from brim.memory.checkpoint_writing import CODES, sync_path
from brim.memory.checksums import Checksum
from brim.memory.direct_io import drop_cached, write_all
from brim.run.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    checkpoint_folder,
    checkpoint_folders,
    partial_folder,
    set_aside,
    to_text,
)
from brim.run.checkpoint.reading import verify
from brim.run.checkpoint.record import OutputRecord, set_aside_foreign
from brim.version import __version__

_SYNC_BYTES = 64 << 20  # most bytes in the page cache before an fsync
_COPY_BYTES = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A safetensors file to be written: its header, and the extent of each tensor."""

    name: str
    header: bytes
    sources: Mapping[str, TensorSource]

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(source.bytes for source in self.sources.values())


@dataclass(slots=True)
class _OpenFile:
    plan: PlannedFile
    fd: int
    unsynced_bytes: int = 0
    checksums: dict[str, Checksum] = field(default_factory=dict)

    def entry(self) -> FileEntry:
        return written_entry(self.plan, {name: checksum.value() for name, checksum in self.checksums.items()})


class FolderWriter:
    """Writes a checkpoint. After an OSError, or an error of ``verify``, from any method, call ``abandon``."""

    def __init__(self, root: Path, step: int, plans: Sequence[PlannedFile]) -> None:
        self._root, self._step, self._plans = root, step, plans
        self._target = checkpoint_folder(root, step)
        self._record = OutputRecord(root)
        self._partial = partial_folder(self._target)
        self._open: list[_OpenFile] = []
        self._entries: dict[str, FileEntry] = {}

    def create(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._record.remove_unfinished()  # of a killed run
        if os.path.lexists(self._partial):
            set_aside_foreign(self._partial)
        self._record.begin(self._partial)
        self._partial.mkdir()
        for plan in self._plans:
            file = _OpenFile(plan, os.open(self._partial / plan.name, _NEW, 0o666))
            self._open.append(file)
            file.checksums = {name: Checksum() for name in plan.sources}
            write_all(file.fd, memoryview(plan.header), 0)

    def write(self, file: int, name: str, at: int, piece: torch.Tensor) -> None:
        """Write the next bytes (flat uint8) of a tensor in the ``file``-th plan, after the ``at`` already written."""
        open_file = self._open[file]
        write_all(open_file.fd, memoryview(piece.numpy().data), open_file.plan.sources[name].extents[0].offset + at)
        open_file.checksums[name].update(piece)
        open_file.unsynced_bytes += piece.numel()
        if open_file.unsynced_bytes >= _SYNC_BYTES:
            _sync(open_file.fd)
            open_file.unsynced_bytes = 0

    def finish_tensors(self) -> dict[str, FileEntry]:
        """Sync the tensors' files to the disk and close them."""
        while self._open:
            file = self._open[0]
            _sync(file.fd)
            self._entries[file.plan.name] = file.entry()
            self._open.pop(0)
            os.close(file.fd)
        return self._entries

    def add(self, name: str, content: bytes | Path) -> None:
        """Write a small file with ``content``, or a copy of the file ``content``."""
        checksum, size = Checksum(), 0
        fd = os.open(self._partial / name, _NEW, 0o666)
        try:
            for piece in [content] if isinstance(content, bytes) else _read_pieces(content):
                write_all(fd, memoryview(piece), size)
                checksum.update(_as_tensor(piece))
                size += len(piece)
            _sync(fd)
        finally:
            os.close(fd)
        self._entries[name] = FileEntry(bytes=size, checksum=f"{checksum.value():016x}", tensors={})

    def adopt(self, name: str, entry: FileEntry) -> None:
        """Add a file that another process has written into the hidden folder, synced and read back."""
        self._entries[name] = entry

    def commit(self, state: Mapping[str, Any]) -> None:
        """Write the manifest, verify all files on the disk, and rename the folder to its final name."""
        manifest = Manifest(brim=__version__, step=self._step, files=self._entries, state=state)
        self.add(MANIFEST_NAME, to_text(manifest).encode())
        sync_path(self._partial)
        verify(self._partial, manifest)
        old, record = set_aside(self._target), self._record
        if os.path.lexists(self._target):  # this run resumed from an earlier step and reached this one again
            self._free_name(old)
            if record.has_checkpoint(self._target):
                record.add_checkpoint(old.name, self._target)
                self._target.rename(old)
            else:
                set_aside_foreign(self._target)
        record.add_checkpoint(self._target.name, self._partial)
        self._partial.rename(self._target)
        record.end(self._partial)
        sync_path(self._root)
        if record.has_checkpoint(old):
            record.remove_checkpoint(old)

    def _free_name(self, path: Path) -> None:
        """Remove brim's checkpoint under that name, or rename whatever else is there."""
        if self._record.has_checkpoint(path):
            self._record.remove_checkpoint(path)
        elif os.path.lexists(path):
            set_aside_foreign(path)

    def prune(self, keep: int, protected: Collection[Path]) -> None:
        """Delete all but the newest ``keep`` of the older checkpoints that brim wrote here. Newer ones belong to
        another run and stay."""
        older = [(step, path) for step, path in checkpoint_folders(self._root) if step <= self._step]
        older = [(step, path) for step, path in older if self._record.has_checkpoint(path)]
        newest = sorted({step for step, _ in older})[-keep:]
        for step, path in older:
            if step not in newest and path not in protected:
                self._record.remove_checkpoint(path)

    def abandon(self) -> None:
        """Close and remove the files; the next checkpoint removes what could not be removed now."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.pop().fd)
        shutil.rmtree(self._partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not os.path.lexists(self._partial):
                self._record.end(self._partial)


def written_entry(plan: PlannedFile, checksums: Mapping[str, int]) -> FileEntry:
    """The manifest's entry for a file whose tensors were written with these checksums."""
    tensors = {
        name: TensorEntry(dtype=CODES[source.dtype], shape=source.shape, checksum=f"{checksums[name]:016x}")
        for name, source in plan.sources.items()
    }
    return FileEntry(bytes=plan.bytes, checksum=_checksum(plan.header), tensors=tensors)


def _sync(fd: int) -> None:
    os.fsync(fd)
    drop_cached(fd)


def _read_pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_COPY_BYTES):
            yield piece


def _as_tensor(piece: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(piece), dtype=torch.uint8) if piece else torch.empty(0, dtype=torch.uint8)


def _checksum(content: bytes) -> str:
    checksum = Checksum()
    checksum.update(_as_tensor(content))
    return f"{checksum.value():016x}"
