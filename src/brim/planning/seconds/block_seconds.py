"""The seconds of a block. The measuring is elsewhere, as it needs transformers and planning does not."""

from __future__ import annotations

from dataclasses import dataclass

OUTSIDE = ""  # the operations outside of blocks: norms and sums between them, masks, the loss


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """A block's seconds in a step; ``backward_s`` is 0 without training."""

    forward_s: float
    backward_s: float = 0.0
