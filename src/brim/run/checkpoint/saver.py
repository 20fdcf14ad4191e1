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
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from brim.errors import ModelError, TransferError, UnsupportedError, UsageError
from brim.memory.checkpoint_writing import CODES, Layout, plan_safetensors
from brim.memory.checksums import MANIFEST_NAME as WEIGHTS_MANIFEST_NAME
from brim.memory.checksums import manifest_text
from brim.memory.pool import PAGE_BYTES, HostSource, round_up
from brim.run.checkpoint.manifest import checkpoint_folder
from brim.run.checkpoint.writer import FolderWriter, PlannedFile
from brim.threads import Worker, deferred_interrupts

MODEL, ADAPTER, OPTIMIZER = "model", "adapter_model", "optimizer"
STAGING_BYTES = 64 << 20
_ALIGNMENT_BYTES = 8  # the word size of the checksum
_PIECE_BYTES = 4 << 20


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
            raise UsageError(f"Cannot keep {keep} checkpoints.", "The number must be 1 or more.")
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

    def __exit__(self, *_: object) -> None:
        self.finish()


@contextlib.contextmanager
def _disk_errors(problem: str, todo: str) -> Iterator[None]:
    """Convert errors of the disk to TransferError."""
    try:
        yield
    except OSError as error:
        raise TransferError(problem, f"{error.strerror or error}.", todo) from error
    except ModelError as error:  # the bytes that were read back differ from those written
        raise TransferError(problem, error.reason, "Earlier checkpoints are intact. Check the disk.") from error


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


@dataclass(frozen=True, slots=True)
class _Piece:
    file: int
    name: str
    at: int
    window: Window


class _Abandoned(Exception):
    """The producer of the tensors has failed."""


class WriterThread:
    """Writes the tensors fed to it, then calls ``complete``; after a failure it removes the incomplete checkpoint.

    Only this thread touches the disk. It ends after ``end`` or ``abandon`` was called.
    """

    def __init__(self, writer: FolderWriter, ring: Ring, complete: Callable[[], None]) -> None:
        self._writer, self._ring, self._complete = writer, ring, complete
        self._jobs: queue.SimpleQueue[_Piece | bool] = queue.SimpleQueue()  # True: all fed; False: abandon
        self._error: BaseException | None = None
        self._failed = threading.Event()
        # Not a daemon: a program that exits without waiting for it still gets its checkpoint.
        self._thread = Worker(self._work, "brim-checkpoint", daemon=False)
        self._thread.start()

    def feed(self, first: int, plans: Sequence[PlannedFile], values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor of ``plans``, whose files begin at number ``first``; waits while the ring is full.

        Returns early when writing has failed; ``wait`` raises the error.
        """
        files = {name: first + number for number, plan in enumerate(plans) for name in plan.sources}
        for name, tensor in values:
            file = files.pop(name)
            source = plans[file - first].sources[name]
            layout = (tensor.dtype, tuple(tensor.shape))
            assert layout == (source.dtype, source.shape), f"{name}: {layout} is not what the layout announced"
            if not self._pass_on(file, name, tensor):
                return
        assert not files, f"announced but not given: {sorted(files)}"

    def _pass_on(self, file: int, name: str, tensor: torch.Tensor) -> bool:
        at = 0
        for piece in pieces(tensor, self._ring.piece_bytes):
            window = self._ring.take(piece.numel(), self._failed.is_set)
            if window is None:
                return False
            window.tensor.copy_(piece)
            self._jobs.put(_Piece(file, name, at, window))
            at += piece.numel()
        return True

    def end(self) -> None:
        """Announce that all tensors were fed."""
        self._jobs.put(True)

    def abandon(self) -> None:
        """Discard the checkpoint. Returns when its files are removed."""
        self._jobs.put(False)
        self.join()

    def join(self) -> None:
        """Wait until the thread has ended, with or without an error."""
        self._thread.join()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error of the thread."""
        self.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._writer.create()
            while isinstance(job := self._jobs.get(), _Piece):
                self._writer.write(job.file, job.name, job.at, job.window.tensor)
                self._ring.give(job.window)
            if not job:
                raise _Abandoned
            self._complete()
        except BaseException as error:  # ``wait`` raises it in the caller's thread
            self._error = error
            self._failed.set()
            self._ring.wake()
            self._writer.abandon()


def pieces(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """The bytes of ``tensor`` in row-major order as flat uint8 tensors of at most ``limit_bytes`` (8 or more).

    Views if the tensor is contiguous, otherwise copies of one piece at a time.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        yield from flat.split(limit_bytes)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > limit_bytes:
        for row in tensor:
            yield from pieces(row, limit_bytes)
        return
    for rows in tensor.split(limit_bytes // row_bytes):
        yield rows.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Window:
    """Room in a Ring: ``tensor`` is to be filled; ``cost_bytes`` are released with it."""

    tensor: torch.Tensor
    cost_bytes: int


class Ring:
    """A first-in, first-out buffer for one producer and one consumer; the producer waits for room."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._at, self._used_bytes = buffer, 0, 0
        self._given: queue.SimpleQueue[int] = queue.SimpleQueue()  # lock-free: an interrupted producer holds no lock
        # Half of the buffer: a piece that does not fit before the end starts at the beginning and wastes the rest.
        self.piece_bytes = min(_PIECE_BYTES, buffer.numel() // 2 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES)
        assert self.piece_bytes >= _ALIGNMENT_BYTES, f"{buffer.numel()} bytes are too few"

    def take(self, bytes: int, abandoned: Callable[[], bool]) -> Window | None:
        """Room for ``bytes`` (at most ``piece_bytes``), as soon as it is free; None once ``abandoned()``."""
        length, end = round_up(bytes, _ALIGNMENT_BYTES), self._buffer.numel()
        begin = self._at if self._at + length <= end else 0
        skipped = 0 if begin == self._at else end - self._at
        while self._used_bytes + skipped + length > end and not abandoned():
            self._used_bytes -= self._given.get()
        if abandoned():
            return None
        self._used_bytes += skipped + length
        self._at = begin + length
        return Window(self._buffer[begin : begin + bytes], skipped + length)

    def give(self, window: Window) -> None:
        """Release ``window``. Windows are released in the order in which they were taken."""
        self._given.put(window.cost_bytes)

    def wake(self) -> None:
        """Make a waiting producer check ``abandoned`` again."""
        self._given.put(0)
