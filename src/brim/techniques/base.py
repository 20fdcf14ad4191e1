"""What every technique has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from brim.errors import UsageError

HANDLE_ATTRIBUTE = "brim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One thing that a technique could do to one block ("" is the whole model): a column for the planner.

    ``saves_bytes`` is by tier, at the peak of a step; negative where it takes some. ``compute_s`` is what it adds to
    the step's compute, ``moves_bytes`` what it sends over each link, (source, target) -> bytes a step.
    """

    technique: str
    block: str
    choice: str
    saves_bytes: Mapping[str, int] = field(default_factory=dict)
    compute_s: float = 0.0
    moves_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    lossless: bool = True


class Handle(Protocol):
    """A technique in force on a module."""

    def remove(self) -> None:
        """Give the module back exactly as it was. A second call does nothing."""


def refuse_second(model: nn.Module) -> None:
    """Raise UsageError when ``model``, or any part of it, is fitted already."""
    for path, module in model.named_modules():
        if HANDLE_ATTRIBUTE in vars(module):
            where = f"its part {path!r}" if path else "it"
            raise UsageError(
                f"{type(model).__name__} was to be fitted.",
                f"{where} is fitted already.".capitalize(),
                "Call .brim.remove() on that module first.",
            )
