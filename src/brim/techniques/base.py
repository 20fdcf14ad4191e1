"""What every technique has in common."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from brim.core import Plan, Timeline
from brim.errors import UsageError

HANDLE_ATTRIBUTE = "brim"


class Handle(Protocol):
    """A technique in force on a module."""

    plan: Plan

    def timeline(self) -> Timeline:
        """What memory did since ``apply``."""

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
