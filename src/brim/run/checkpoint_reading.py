"""Find and read training checkpoints: first version of the signatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from brim.memory.checkpoint_writing import Layout


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk. ``skipped``: one sentence for each newer one that did not verify."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    skipped: tuple[str, ...] = ()

    def layout(self, stem: str) -> list[Layout]:
        """What ``STEM.safetensors`` holds; empty where there is no such file."""
        raise NotImplementedError

    def check(self, stem: str, wanted: Sequence[Layout]) -> None:
        """Raises ModelError that names the first tensor that is missing, too many or of another dtype or shape."""
        raise NotImplementedError

    def tensors(self, stem: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in RAM of its own, verified, in the file's order. Raises ModelError, TransferError."""
        raise NotImplementedError

    def read_into(self, stem: str, targets: Mapping[str, torch.Tensor]) -> None:
        """``check``, then fill ``targets`` (any device). RAM taken: a few MiB where a target is contiguous in RAM."""
        raise NotImplementedError


def steps(folder: str | Path) -> list[int]:
    """The steps of the checkpoints in ``folder``, ascending, verified or not; empty where there is no such folder."""
    raise NotImplementedError


def latest(folder: str | Path) -> Checkpoint:
    """The newest checkpoint that verifies, every byte read. Raises ModelError when there is none."""
    raise NotImplementedError


def read(folder: str | Path) -> Checkpoint:
    """The checkpoint in this very folder (``.../step-000120``), verified. Raises ModelError."""
    raise NotImplementedError
