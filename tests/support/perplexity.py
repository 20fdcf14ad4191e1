"""The cost of a change to a model's weights: perplexity before and after."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from brim.errors import UsageError

_WINDOW = 256  # tokens at once: a window's logits of a large vocabulary fill the memory


def prose() -> str:
    """About 800 words of plain English prose, written for this purpose."""
    return (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8")


def perplexity(model: nn.Module, ids: torch.Tensor, *, window: int = _WINDOW) -> float:
    """exp of the mean negative log-likelihood per token of ``ids`` (1, tokens), each given those before it.

    The text is cut into windows of as many tokens, each of which begins without a past. Two models that are compared
    on the same tokens differ by far less than either would on another text. Raises UsageError for fewer than two
    tokens.
    """
    if ids.shape[-1] < 2:
        raise UsageError("Cannot compute a perplexity.", f"The text has {ids.shape[-1]} tokens.", "Give two or more.")
    device = next(buffer.device for buffer in [*model.buffers(), *model.parameters()])
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, ids.shape[-1] - 1, window):
            part = ids[:, start : start + window + 1].to(device)
            logits = model(part[:, :-1], use_cache=False).logits[0].float()
            total += float(nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum"))
            count += part.shape[1] - 1
    return math.exp(total / count)
