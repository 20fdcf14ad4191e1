"""Choice of the next token, most likely or drawn by transformers' own processors, and texts that end an answer."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from brim.core.options import option
from brim.errors import UsageError

_LARGEST_SEED = 2**63 - 1
# Defaults if neither the user nor the model's generation config has a value: the plain distribution.
_NEUTRAL: dict[str, float | int] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of sampling. ``temperature`` above 0, ``top_p`` in (0, 1] or ``top_k`` from 1 on draw tokens; without
    any, or with temperature 0, the most likely token is chosen.

    Omitted settings are those of the model's generation config, else 1, 1 and no limit. ``seed``: from 0 to 2^63 - 1;
    None draws a seed. The same seed gives the same text for the same prompts in the same batches on the same machine.
    """

    temperature: float | None = option(
        None, "Sample tokens; below 1, likely tokens are chosen more often. 0: greedy."
    )
    top_p: float | None = option(None, "Sample from the most likely tokens whose probabilities add up to this value.")
    top_k: int | None = option(None, "Sample from this number of most likely tokens.")
    seed: int | None = option(
        None, "Seed of the sampling: the same seed gives the same text.  [default: another each time]"
    )

    @property
    def draws(self) -> bool:
        if self.temperature is not None:
            return self.temperature > 0
        return self.top_p is not None or self.top_k is not None

    def check(self) -> None:
        """Raise UsageError for values that are not allowed, or would change nothing."""
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise _bad("--temperature", self.temperature, "It is a number from 0 on.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise _bad("--top-p", self.top_p, "It is above 0 and at most 1.")
        if self.top_k is not None and self.top_k < 1:
            raise _bad("--top-k", self.top_k, "It is a number from 1 on.")
        if self.seed is not None and not 0 <= self.seed <= _LARGEST_SEED:
            raise _bad("--seed", self.seed, "It is a number from 0 to 2^63 - 1.")
        limits = {"--top-p": self.top_p, "--top-k": self.top_k}
        limits_given = [name for name, value in limits.items() if value is not None]
        if self.temperature == 0 and limits_given:
            raise UsageError(
                f"Cannot use {limits_given[0]} with --temperature 0.",
                "At temperature 0 the most likely token is always taken.",
                f"Leave out {limits_given[0]}, or give a temperature above 0.",
            )
        if self.seed is not None and self.temperature is None and not limits_given:
            raise UsageError(
                f"Cannot use --seed {self.seed}.",
                "Nothing is sampled: the most likely token is always taken.",
                "Give --temperature, --top-p or --top-k, or leave it out.",
            )

    def with_seed(self) -> Sampling:
        """These settings with a seed; one is drawn if tokens are drawn and no seed was given."""
        return replace(self, seed=secrets.randbits(32)) if self.draws and self.seed is None else self

    def options(self, generation_config: Any) -> dict[str, Any]:
        """Arguments for transformers' ``generate``."""
        if not self.draws:
            return {"do_sample": False}
        options: dict[str, Any] = {"do_sample": True}
        for name, neutral in _NEUTRAL.items():
            value, own = getattr(self, name), getattr(generation_config, name, None)
            options[name] = value if value is not None else own if own is not None else neutral
        return options


def _bad(option: str, value: object, rule: str) -> UsageError:
    return UsageError(f"{option} {value} was given.", rule)


GREEDY = Sampling()


# -- texts that end an answer


def check_stops(stops: Sequence[str]) -> None:
    """Raise UsageError for an empty text."""
    if not all(stops):
        raise UsageError("--stop is an empty text.", todo="Give the text that ends the answer.")


def cut(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of ``stops`` in it."""
    positions = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(positions)] if positions else text


def withheld(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of ``text`` that may be the beginning of one of ``stops``."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )
