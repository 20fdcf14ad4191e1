"""Times of generated tokens, recorded as a streamer of transformers' ``generate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """transformers' streamer interface: records the time of every token. ``on_tokens`` gets them, shape
    (sequences,)."""

    on_tokens: Callable[[torch.Tensor], None] = lambda tokens: None
    times_s: list[float] = field(default_factory=list)
    _prompt: bool = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # the first call has the prompt
            self._prompt = False
            return
        self.times_s.append(time.perf_counter())
        self.on_tokens(value.reshape(-1))

    def end(self) -> None:
        """Nothing is buffered."""

    def s_per_step(self) -> float | None:
        """Seconds per token after the first, which waits for the full prompt; None for a single token."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    def steady_s_per_step(self) -> float | None:
        """Mean seconds per token in the later half, without warm-up effects; None for a single token. It is a mean
        because a shared drive is fast in one second and slow in the next."""
        count = len(self.times_s) // 2  # of steps, rounded up
        return (self.times_s[-1] - self.times_s[-1 - count]) / count if count else None
