"""Training data from JSONL and text, tokenised as it is needed: first version of the signatures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

IGNORED = -100  # the label that torch's cross-entropy leaves out


@dataclass(frozen=True, kw_only=True)
class Example:
    """One sequence: token ids and, for each, the label (itself or IGNORED). The model shifts them."""

    input_ids: list[int]
    labels: list[int]


class Dataset(Protocol):
    """Examples by number. ``identity`` is a digest of the content and the settings that shape it."""

    identity: str
    truncated: int  # how many distinct examples were cut to ``seq`` so far

    def __len__(self) -> int: ...

    def example(self, index: int) -> Example: ...


def open_data(
    path: str | Path,
    tokenizer: Any,
    seq: int,
    *,
    vocab_size: int | None = None,
    too_long: Literal["truncate", "error"] = "truncate",
    pack: bool | None = None,
) -> Dataset:
    """JSONL (``messages`` or ``text`` in each line), a .txt file or a folder of them.

    seq: the most tokens of a sequence. vocab_size: rows of the model's embedding; a larger token id is an error.
    pack: sequences of exactly ``seq`` tokens, EOS between documents; None: text files are packed, JSONL is not.
    Raises UsageError (or ModelError for a tokenizer that does not fit) with file and line number.
    """
    raise NotImplementedError


class Batches:
    """An endless stream of batches of ``batch`` examples: every example once per epoch, in a seeded order.

    Batch k holds the examples at positions k*batch ... (k+1)*batch-1 of the sequence of all epochs, so a batch may
    reach into the next epoch, no example is left out and the position is all there is to remember.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        pad_id: int = 0,
        pad_to: int | None = None,
    ) -> None:
        """pad_to: every batch this long (``seq``: shapes as promised); None: as long as its longest."""
        raise NotImplementedError

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64, (batch, length), padded on the right with labels IGNORED."""
        raise NotImplementedError

    def steps(self, epochs: float) -> int:
        """Batches until each example was seen ``epochs`` times."""
        raise NotImplementedError

    @property
    def epoch(self) -> float:
        """How often the data was gone through."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises UsageError when the data or its settings are others."""
        raise NotImplementedError
