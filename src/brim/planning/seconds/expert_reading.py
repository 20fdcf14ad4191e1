"""Estimate how much of a mixture of experts a pass reads: a token uses a few of them, many tokens nearly all.

With ``p`` the share of tokens that use an expert, ``n`` tokens need it with probability 1 - (1 - p)^n; the number of
experts that a pass needs is the sum over all experts. Without statistics of the router, all experts are assumed
equally likely, which is the upper bound. Not modelled: tokens of the same text resemble each other (and need fewer),
shared experts (always used, so not chosen), and a run's guesses of the order of use: an unexpected expert is waited
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from brim.errors import UsageError
from brim.techniques.experts.technique import find_experts

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k", "num_selected_experts")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The ``share`` of an experts' parameter that a pass reads on average, and that a token computes (``per_token``).

    ``expert`` is the path of the module where each expert is a module, None where all are in a single tensor.
    """

    share: float
    per_token: float
    expert: str | None = None


def expected_experts(count: int, chosen: int, tokens: int, shares: Sequence[float] | None = None) -> float:
    """Return the mean number of ``count`` experts that ``tokens`` tokens need, if each uses ``chosen`` of them.

    ``shares``: each expert's share of all uses (their sum is 1); None: all are equal.
    """
    if not 0 < chosen <= count or tokens < 0:
        raise UsageError(f"Cannot choose {chosen} of {count} experts for {tokens} tokens.")
    if shares is None:
        shares = [1 / count] * count
    if len(shares) != count or abs(sum(shares) - 1) > 1e-6 or min(shares) < 0:
        raise UsageError(
            f"{len(shares)} shares were given for {count} experts.",
            "One per expert is needed, and they must sum to 1.",
        )
    return sum(1 - (1 - min(1.0, chosen * share)) ** tokens for share in shares)


def reading(model: nn.Module, tokens: int, router: Mapping[str, Sequence[float]] | None = None) -> dict[str, Reading]:
    """Return the readings of experts' parameters by name; empty for a model without experts.

    ``router``: path of the module that holds a layer's experts -> the shares that each was asked for.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    asked = next((value for name in _TOP_K if isinstance(value := getattr(text, name, None), int)), 1)
    readings: dict[str, Reading] = {}
    for layer in find_experts(model):
        chosen, shares = min(asked, layer.count), (router or {}).get(layer.path)
        mean = expected_experts(layer.count, chosen, tokens, shares) / layer.count
        if not layer.modules:
            readings |= dict.fromkeys(layer.tensors, Reading(share=mean, per_token=chosen / layer.count))
        for number, path in enumerate(layer.modules):
            likely = min(1.0, chosen * (1 / layer.count if shares is None else shares[number]))
            of_expert = Reading(share=1 - (1 - likely) ** tokens, per_token=likely, expert=path)
            readings |= dict.fromkeys(layer.of_module(number), of_expert)
    return readings
