"""What is known of a block's time. Apart from how it is measured: that needs transformers, and to plan does not."""

from __future__ import annotations

from dataclasses import dataclass

OUTSIDE = ""  # what is done beside the blocks: norms and sums between them, masks, the loss


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """One block in one step; ``backward_s`` is 0 where it was not asked for."""

    forward_s: float
    backward_s: float = 0.0
