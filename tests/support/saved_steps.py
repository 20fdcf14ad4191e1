"""Tiny training checkpoints whose content follows from a seed, and a hook for every call that touches the disk."""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from brim.run.checkpoint.reading import Checkpoint
from brim.run.checkpoint.saver import Checkpointer, Tensors

# Every way in which a checkpoint's thread touches the disk.
CALLS = [(os, name) for name in ("mkdir", "open", "pwrite", "fsync", "preadv", "rename", "unlink", "rmdir")]
CALLS += [(os, name) for name in ("scandir", "listdir", "stat", "close")] + [(builtins, "open")]


_COPIED = Path(__file__).absolute()  # any file will do


def content(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(5, 7, generator=made),
        "b.weight": torch.randn(33, generator=made).bfloat16(),
        "steps": torch.tensor(float(seed)),
    }


def tensors_of(seed: int, stem: str = "model") -> Tensors:
    values = content(seed)
    layout = [(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    return Tensors(stem=stem, layout=layout, values=values.items())


def save(keeper: Checkpointer, step: int, seed: int) -> None:
    keeper.save(
        step,
        [tensors_of(seed), tensors_of(seed + 1, "optimizer")],
        state={"seed": seed, "step": step},
        files={"config.json": b'{"model_type": "none"}', "tokenizer.txt": _COPIED},
    )


def save_now(root: Path, step: int, seed: int) -> None:
    with Checkpointer(root, keep=2, staging_bytes=4096) as keeper:
        save(keeper, step, seed)


def is_whole(checkpoint: Checkpoint) -> bool:
    """Bit for bit what was saved under the seed that it names."""
    seed = checkpoint.state["seed"]
    return checkpoint.state["step"] == checkpoint.step and all(
        torch.equal(value, content(seed + offset)[name])
        for offset, stem in enumerate(("model", "optimizer"))
        for name, value in checkpoint.tensors(stem)
    )


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


@contextlib.contextmanager
def watched(before: Callable[[int], None]) -> Iterator[None]:
    """Call ``before`` before each of CALLS on a checkpoint's thread, with its number from 0 on."""
    number = -1

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal number
            if not threading.current_thread().name.startswith("brim-checkpoint"):
                return real(*args, **options)
            number += 1
            before(number)
            return real(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in CALLS:
            stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        yield
