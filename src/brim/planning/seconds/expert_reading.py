"""Estimate how much of a mixture of experts a pass reads: a token uses a few of them, many tokens nearly all.

With ``p`` the share of tokens that use an expert, ``n`` tokens need it with probability 1 - (1 - p)^n. All experts
are assumed equally likely, which is the upper bound. Not modelled: tokens of the same text resemble each other (and
need fewer), shared experts (always used, so not chosen), and a run's guesses of the order of use: an unexpected
expert is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def expected_experts(count: int, chosen: int, tokens: int) -> float:
    """Return the mean number of ``count`` experts that ``tokens`` tokens need, if each uses ``chosen`` of them."""
    if not 0 < chosen <= count or tokens < 0:
        raise UsageError(f"Cannot choose {chosen} of {count} experts for {tokens} tokens.")
    return float(count * (1.0 - (1.0 - chosen / count) ** tokens))


def reading(model: nn.Module, tokens: int) -> dict[str, Reading]:
    """Return the readings of experts' parameters by name; empty for a model without experts."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    asked = next((value for name in _TOP_K if isinstance(value := getattr(text, name, None), int)), 1)
    readings: dict[str, Reading] = {}
    for layer in find_experts(model):
        chosen = min(asked, layer.count)
        share = expected_experts(layer.count, chosen, tokens) / layer.count
        of_layer = Reading(share=share, per_token=chosen / layer.count)
        if not layer.modules:
            readings |= dict.fromkeys(layer.tensors, of_layer)
        for number, path in enumerate(layer.modules):
            readings |= dict.fromkeys(layer.of_module(number), replace(of_layer, expert=path))
    return readings
