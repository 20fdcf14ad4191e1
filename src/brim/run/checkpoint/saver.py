"""Write training checkpoints so that a complete one exists at any time, even if the process is killed.

    with Checkpointer(output, keep=2) as keeper:
        ...
        keeper.save(
            step,
            [model_tensors(module), Tensors(stem="optimizer", layout=layout, values=states)],
            state={"rng": rng_state(), "data": batches.state_dict(), "optimizer": numbers},
            files=model_files(module, opened.path),
        )

    checkpoint = latest(output)  # run.checkpoint.reading
    checkpoint.read_into("model", {name: tensor})

A checkpoint is a folder ``step-000120`` that transformers (or, with ``adapter_model``, peft) reads as a model:
safetensors files, config.json and the tokenizer; ``optimizer.safetensors``; ``brim.manifest.json``, the checksums of
the weights; and ``brim.checkpoint.json``, the manifest of all files, which also has the state that is not tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from brim.errors import ModelError, TransferError, UnsupportedError, UsageError
from brim.memory.checkpoint_writing import CODES, Layout, plan_safetensors
from brim.memory.checksums import MANIFEST_NAME as WEIGHTS_MANIFEST_NAME
from brim.memory.checksums import manifest_text
from brim.memory.pool import PAGE_BYTES, HostSource, round_up
from brim.run.checkpoint.manifest import checkpoint_folder
from brim.run.checkpoint.stream import Ring
from brim.run.checkpoint.thread import WriterThread
from brim.run.checkpoint.writer import FolderWriter, PlannedFile
from brim.threads import deferred_interrupts

MODEL, ADAPTER, OPTIMIZER = "model", "adapter_model", "optimizer"
STAGING_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Content of a safetensors file ``STEM.safetensors``, or of its shards and their index.

    stem: MODEL and ADAPTER are the names that transformers and peft look for. layout: name, dtype and shape of every
    tensor, tied ones once. values: the tensors in any order, consumed once and one at a time, so it may be a
    generator that reads from disk. shard_bytes: size of the largest file; None writes a single file (peft knows no
    shards).
    """

    stem: str
    layout: Sequence[Layout]
    values: Iterable[tuple[str, torch.Tensor]]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    shard_bytes: int | None = None


class Checkpointer:
    """Writes the checkpoints of one run into ``folder``.

    keep: number of checkpoints that remain, the new one included; older ones are deleted after the new one was read
    back and verified. protected: checkpoints that are never deleted, such as one that this run streams weights from.
    staging: a flat uint8 tensor in RAM that all bytes pass through, so that a pool can count it; without one,
    ``staging_bytes`` are allocated during ``save``. A thread writes from it while the next tensor is copied into it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        staging: torch.Tensor | None = None,
        staging_bytes: int = STAGING_BYTES,
        protected: Collection[Path] = (),
    ) -> None:
        if keep < 1:
            raise UsageError(f"Cannot keep {keep} checkpoints.", "At least one must be kept.")
        if staging is None and staging_bytes < PAGE_BYTES:
            raise UsageError(
                f"{staging_bytes} bytes are too few to write checkpoints.", f"Give {PAGE_BYTES} or more."
            )
        self._root, self._keep = Path(folder).absolute(), keep
        self._staging, self._staging_bytes = staging, round_up(staging_bytes, PAGE_BYTES)
        self._protected = {Path(path).absolute() for path in protected}
        self._writing: WriterThread | None = None

    def protect(self, folder: Path) -> None:
        """Never delete this checkpoint: its files are in use."""
        self._protected.add(folder.absolute())

    def save(
        self,
        step: int,
        tensors: Sequence[Tensors],
        *,
        state: Mapping[str, Any],
        files: Mapping[str, bytes | Path] | None = None,
    ) -> Path:
        """Write the checkpoint of ``step`` and return its folder.

        state: plain JSON values. files: further files by name: their content, or the file to copy. Raises
        TransferError when the disk refuses; older checkpoints are unchanged then, and ``save`` can be called again.
        Raises UnsupportedError for a dtype that safetensors does not have. If it is interrupted (Ctrl-C) while it
        waits for the disk, writing continues; ``finish`` waits for it.
        """
        self.finish()
        document = json.loads(json.dumps(state))  # a copy: training changes it meanwhile
        extra = dict(files or {})
        groups = [_plan(file_tensors, extra) for file_tensors in tensors]
        writer = FolderWriter(self._root, step, [plan for group in groups for plan in group])
        thread: WriterThread | None = None
        try:
            ring = self._ring()
            with deferred_interrupts():
                thread = WriterThread(writer, ring, lambda: self._complete(writer, step, document, extra))
            first = 0
            for file_tensors, group in zip(tensors, groups, strict=True):
                thread.feed(first, group, file_tensors.values)
                first += len(group)
            thread.end()
            self._writing = thread
        except BaseException:
            if thread is not None:
                thread.abandon()
            raise
        self.finish()
        return checkpoint_folder(self._root, step)

    def _ring(self) -> Ring:
        return Ring(HostSource().make(self._staging_bytes) if self._staging is None else self._staging)

    def _complete(
        self, writer: FolderWriter, step: int, state: Mapping[str, Any], files: Mapping[str, bytes | Path]
    ) -> None:
        """Add the other files and commit; runs on the writer thread after all tensors were written."""
        weights = {
            name: int(tensor.checksum, 16)
            for file, entry in writer.finish_tensors().items()
            if file.startswith(MODEL)
            for name, tensor in entry.tensors.items()
        }
        if weights:  # checked when the folder is opened as a model
            writer.add(WEIGHTS_MANIFEST_NAME, manifest_text(weights).encode())
        for name, content in files.items():
            writer.add(name, content)
        writer.commit(state)
        with _disk_errors(
            f"Cannot delete the checkpoints before step {step} from {self._root}.",
            "The new checkpoint is complete. Delete the older ones by hand.",
        ):
            writer.prune(self._keep, self._protected)

    def finish(self) -> None:
        """Wait for a checkpoint whose ``save`` was interrupted. Raises TransferError if it could not be written."""
        if self._writing is not None:
            self._writing.join()  # if this is interrupted, ``_writing`` remains to be waited for
            writing, self._writing = self._writing, None
            with _disk_errors(
                f"Cannot write a checkpoint to {self._root}.",
                "Earlier checkpoints are intact. Free some disk space or choose another folder.",
            ):
                writing.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call ``finish``."""
        self.finish()


@contextlib.contextmanager
def _disk_errors(problem: str, todo: str) -> Iterator[None]:
    """Convert errors of the disk to TransferError."""
    try:
        yield
    except OSError as error:
        raise TransferError(problem, f"{error.strerror or error}.", todo) from error
    except ModelError as error:  # the bytes that were read back differ from those written
        raise TransferError(problem, error.found, "Earlier checkpoints are intact. Check the disk.") from error


def _plan(tensors: Tensors, files: MutableMapping[str, bytes | Path]) -> list[PlannedFile]:
    """The files for ``tensors``; if there are several shards, their index is added to ``files``."""
    for name, dtype, _ in tensors.layout:
        if dtype not in CODES:
            raise UnsupportedError(f"Cannot save {name}.", f"safetensors has no dtype for {dtype}.")
    shards = _shards(tensors)
    if not shards:
        return []
    if len(shards) == 1:
        return [planned_file(f"{tensors.stem}.safetensors", shards[0], tensors.metadata)]
    names = [f"{tensors.stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    weight_map = {tensor[0]: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(map(_bytes, tensors.layout))}, "weight_map": weight_map}
    files[f"{tensors.stem}.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return [planned_file(file, shard, tensors.metadata) for file, shard in zip(names, shards, strict=True)]


def _shards(tensors: Tensors) -> list[list[Layout]]:
    if not tensors.layout:
        return []
    shards: list[list[Layout]] = [[]]
    shard_bytes = 0
    for tensor in tensors.layout:
        if shards[-1] and tensors.shard_bytes is not None and shard_bytes + _bytes(tensor) > tensors.shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor)
        shard_bytes += _bytes(tensor)
    return shards


def planned_file(name: str, layout: Sequence[Layout], metadata: Mapping[str, str]) -> PlannedFile:
    """Header and offsets of a safetensors file with these tensors."""
    header, sources = plan_safetensors(Path(name), layout, dict(metadata))
    return PlannedFile(name=name, header=header, sources=sources)


def _bytes(layout: Layout) -> int:
    _, dtype, shape = layout
    return math.prod(shape) * dtype.itemsize
