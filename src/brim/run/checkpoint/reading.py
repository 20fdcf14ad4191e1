"""Find the newest complete training checkpoint, and read it tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from brim.errors import BrimError, ModelError, TransferError
from brim.memory.checkpoint_files import TensorSource, read_safetensors_header
from brim.memory.checkpoint_writing import CODES, Layout
from brim.memory.checksums import Checksum
from brim.memory.direct_io import drop_cached
from brim.run.checkpoint.manifest import FileEntry, Manifest, TensorEntry, checkpoint_folders, read_manifest

_PIECE_BYTES = 1 << 20
_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    state: as given to ``Checkpointer.save``. files: the safetensors files by name, each with its tensors and their
    checksums. skipped: one sentence for each newer checkpoint that is damaged.
    """

    folder: Path
    step: int
    state: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    skipped: tuple[str, ...] = ()

    def layout(self, stem: str) -> list[Layout]:
        """(name, dtype, shape) of the tensors in ``STEM.safetensors`` or its shards; empty if there is no such
        file."""
        return [(source.name, source.dtype, source.shape) for source, _ in self._stored(stem).values()]

    def check(self, stem: str, wanted: Sequence[Layout]) -> None:
        """Raise ModelError naming the first tensor that is missing, unexpected, or of another dtype or shape."""
        stored = {name: (dtype, tuple(shape)) for name, dtype, shape in self.layout(stem)}
        for name, dtype, shape in wanted:
            if name not in stored:
                raise self._differs(stem, f"{name} is not in it; it holds {len(stored)} tensors.")
            if stored[name] != (dtype, tuple(shape)):
                stored_dtype, stored_shape = stored[name]
                raise self._differs(
                    stem, f"{name} is {stored_dtype} {list(stored_shape)} there, not {dtype} {list(shape)}."
                )
        expected = {name for name, _, _ in wanted}
        extra = next((name for name in stored if name not in expected), None)
        if extra is not None:
            raise self._differs(stem, f"It has {extra}, which this training does not have.")

    def tensors(self, stem: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in newly allocated RAM, one at a time, checked against its checksum. Raises ModelError."""
        for name, stored in self._stored(stem).items():
            value = torch.empty(stored[0].shape, dtype=stored[0].dtype)
            self._fill(value, stored)
            yield name, value

    def read_into(self, stem: str, targets: Mapping[str, torch.Tensor]) -> None:
        """``check``, then fill ``targets`` (on any device), each checked against its checksum.

        Takes 1 MiB of RAM beside a target that is contiguous in RAM, otherwise a second copy of that tensor.
        Raises ModelError, TransferError; the targets' values are undefined then.
        """
        self.check(stem, layout_of(targets))
        stored = self._stored(stem)
        for name, target in targets.items():
            if target.device.type == "cpu" and target.is_contiguous():
                self._fill(target.detach(), stored[name])
            else:
                value = torch.empty(target.shape, dtype=target.dtype)
                self._fill(value, stored[name])
                target.detach().copy_(value)

    def _stored(self, stem: str) -> dict[str, tuple[TensorSource, str]]:
        """(source, checksum) of each tensor by name, in the files' order."""
        tensors: dict[str, tuple[TensorSource, str]] = {}
        for file, entry in sorted(self.files.items()):
            if file == stem + _SUFFIX or file.startswith(f"{stem}-"):
                for name, source in read_safetensors_header(self.folder / file).items():
                    tensors[name] = source, entry.tensors[name].checksum
        return tensors

    def _fill(self, target: torch.Tensor, stored: tuple[TensorSource, str]) -> None:
        source, expected = stored
        path = Path(source.extents[0].path)
        with _Reader(path) as reader:
            if reader.fill(source.extents[0].offset, target.view(-1).view(torch.uint8)) != expected:
                raise _damaged(self.folder, f"The checksum of {source.name} in {path.name} does not match.")

    def _differs(self, stem: str, problem: str) -> ModelError:
        return ModelError(
            f"Cannot read {stem} of the checkpoint {self.folder}.",
            problem,
            "Resume with the model, method and optimizer that the checkpoint was written with.",
        )


def steps(folder: str | Path) -> list[int]:
    """The steps of the checkpoints in ``folder``, ascending, complete or not; empty if there is no such folder."""
    return sorted({step for step, _ in checkpoint_folders(Path(folder))})


def latest(folder: str | Path) -> Checkpoint:
    """The newest complete checkpoint in ``folder``, every byte verified. Raises ModelError when there is none."""
    root = Path(folder).absolute()
    skipped: list[str] = []
    for _, path in checkpoint_folders(root):
        try:
            return replace(read(path), skipped=tuple(skipped))
        except BrimError as error:
            skipped.append(f"{path.name} is skipped: {error.reason}")
    raise ModelError(
        f"Cannot read a training checkpoint from {root}.",
        " ".join(skipped) or "There is none.",
        "Train without --resume, or give the folder of an earlier run.",
    )


def read(folder: str | Path) -> Checkpoint:
    """The checkpoint in exactly this folder (``.../step-000120``), every byte verified.

    Raises ModelError when anything is missing or damaged.
    """
    path = Path(folder).absolute()
    manifest = read_manifest(path)
    verify(path, manifest)
    files = {name: entry for name, entry in manifest.files.items() if entry.tensors}
    return Checkpoint(folder=path, step=manifest.step, state=manifest.state, files=files)


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every byte of the files with ``manifest``. Raises ModelError naming the file and the tensor."""
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _damaged(folder, f"{name} cannot be read: {error.strerror}.") from error
        if size != entry.bytes:
            raise _damaged(folder, f"{name} is {size} bytes long, not {entry.bytes}.")
        (_verify_tensors if name.endswith(_SUFFIX) else _verify_file)(folder, path, entry)


def entry_of(path: Path) -> FileEntry:
    """The manifest's entry for a file, computed from every byte of it."""
    if not path.name.endswith(_SUFFIX):
        with _Reader(path) as reader:
            size = path.stat().st_size
            return FileEntry(bytes=size, checksum=reader.checksum(0, size), tensors={})
    sources, size = read_safetensors_header(path), path.stat().st_size
    with _Reader(path) as reader:
        header = reader.checksum(0, size - sum(source.bytes for source in sources.values()))
        tensors = {
            name: TensorEntry(
                dtype=CODES[source.dtype], shape=source.shape,
                checksum=reader.checksum(source.extents[0].offset, source.bytes),
            )
            for name, source in sources.items()
        }  # fmt: skip
    return FileEntry(bytes=size, checksum=header, tensors=tensors)


def _verify_file(folder: Path, path: Path, entry: FileEntry) -> None:
    with _Reader(path) as reader:
        if reader.checksum(0, entry.bytes) != entry.checksum:
            raise _damaged(folder, f"The checksum of {path.name} does not match.")


def _verify_tensors(folder: Path, path: Path, entry: FileEntry) -> None:
    sources = read_safetensors_header(path)
    stored = {s.name: (CODES[s.dtype], s.shape) for s in sources.values()}
    if stored != {name: (tensor.dtype, tensor.shape) for name, tensor in entry.tensors.items()}:
        raise _damaged(folder, f"{path.name} has other tensors than the manifest lists.")
    data_begins = entry.bytes - sum(source.bytes for source in sources.values())
    with _Reader(path) as reader:
        if reader.checksum(0, data_begins) != entry.checksum:
            raise _damaged(folder, f"The checksum of the header of {path.name} does not match.")
        for name, source in sources.items():
            if reader.checksum(source.extents[0].offset, source.bytes) != entry.tensors[name].checksum:
                raise _damaged(folder, f"The checksum of {name} in {path.name} does not match.")


def layout_of(tensors: Mapping[str, torch.Tensor]) -> list[Layout]:
    """Name, dtype and shape of each tensor."""
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


class _Reader:
    """An open file, read in pieces that are dropped from the page cache: a checkpoint is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise self._failed(f"{error.strerror}.") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def checksum(self, offset: int, bytes: int) -> str:
        checksum, piece = Checksum(), torch.empty(min(bytes, _PIECE_BYTES), dtype=torch.uint8)
        for at in range(0, bytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, bytes - at)]
            self._read(offset + at, part)
            checksum.update(part)
        return f"{checksum.value():016x}"

    def fill(self, offset: int, target: torch.Tensor) -> str:
        checksum = Checksum()
        for at in range(0, target.numel(), _PIECE_BYTES):
            part = target[at : at + _PIECE_BYTES]
            self._read(offset + at, part)
            checksum.update(part)
        return f"{checksum.value():016x}"

    def _read(self, offset: int, into: torch.Tensor) -> None:
        view, done = memoryview(into.numpy().data), 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise self._failed(f"{error.strerror}.") from error
            if got == 0:
                raise self._failed(f"It ends {len(view) - done} bytes too early.")
            done += got
        drop_cached(self._fd, offset, done)

    def _failed(self, problem: str) -> TransferError:
        return TransferError(f"Cannot read {self._path}.", problem, "Check the disk.")


def _damaged(folder: Path, problem: str) -> ModelError:
    asked = f"Cannot read {folder} as a training checkpoint."
    return ModelError(asked, problem, "Resume from an earlier checkpoint, or train anew.")
