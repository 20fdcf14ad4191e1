"""What a step differentiates when only the model is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output; of a model that gives none, a stand-in with gradients for all of it."""
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = output.values() if isinstance(output, Mapping) else output
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else next(iter(values))
    return first if first.dim() == 0 else first.float().mean()
