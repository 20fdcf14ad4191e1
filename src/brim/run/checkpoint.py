"""Write a training checkpoint so that whatever happens, a whole one is there: first version of the signatures.

    keeper = Checkpointer(output, keep=2, asynchronous=True, staging_bytes=64 << 20)
    keeper.save(step, [Tensors(stem="model", layout=..., values=...), Tensors(stem="optimizer", ...)],
                state={...any JSON...}, files=model_files(module, opened.path))
    keeper.finish()                                   # at the end, and before anything that must not overlap

    checkpoint = latest(output)                       # checkpoint_reading.py; checkpoint.skipped says what was damaged
    checkpoint.step, checkpoint.state, checkpoint.folder
    checkpoint.read_into("model", {name: tensor})     # verified, one at a time
    for name, tensor in checkpoint.tensors("optimizer"): offload.load_state(name, tensor)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from brim.memory.checkpoint_writing import Layout


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What one safetensors file ``STEM.safetensors`` (or its shards and their index) will hold.

    stem: ``model`` and ``adapter_model`` are what transformers and peft look for; ``optimizer`` is ours.
    layout: (name, dtype, shape) of every tensor, tied ones once, known before the first is read.
    values: the tensors, in any order, consumed once, one at a time: a generator over blocks on disk is welcome.
    shard_bytes: the largest file; None is one file (peft knows no shards).
    """

    stem: str
    layout: Sequence[Layout]
    values: Iterable[tuple[str, torch.Tensor]]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    shard_bytes: int | None = None


class Checkpointer:
    """Writes ``folder/step-000120``.

    keep: how many remain, the new one included. protected: folders that are never deleted (the one that this run
    reads its weights from). staging: a flat uint8 tensor in RAM that all bytes pass through, so that a budget can
    count it (``memory.ram.allocate(n, "checkpoint").tensor``); without one ``staging_bytes`` are allocated while
    a checkpoint is being written. asynchronous: ``save`` returns when what is left to write fits into staging.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        asynchronous: bool = True,
        staging: torch.Tensor | None = None,
        staging_bytes: int = 64 << 20,
        protected: Collection[Path] = (),
    ) -> None:
        raise NotImplementedError

    def save(
        self,
        step: int,
        tensors: Sequence[Tensors],
        *,
        state: Mapping[str, Any],
        files: Mapping[str, bytes | Path] | None = None,
    ) -> Path:
        """The folder that holds the checkpoint of ``step`` (asynchronous: once ``finish`` or the next save returns).

        state: plain JSON values (RNG, data position, optimizer numbers, scaler, plan). files: further small files by
        name (config.json, tokenizer). When it returns, the tensors may change. Raises TransferError when the disk
        refuses, for this checkpoint or for the one before; the older checkpoints are then untouched.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for what is being written. Raises TransferError when it failed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits as ``finish`` does."""
        raise NotImplementedError
