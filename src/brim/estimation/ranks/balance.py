"""Balance a model's layers over pipeline stages: consecutive layers, with the slowest stage as fast as possible.

A step of 1F1B takes the slowest stage's time for each micro-batch, and the other stages' for their first and last one
(Narayanan et al., arXiv 2104.04473), whose sum is the same for every balance. So the slowest stage decides. Among
equally fast balances, the one whose fullest rank has the fewest bytes is used. If stages wait for their launches
the sum is not the same, and a search compares with even stages too.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from brim.estimation.ranks.split import Split, in_flight, stage_layers

Cost = Callable[[int, int], float]  # of stage and its layers; more layers never cost less
_FORWARD_AND_BACKWARD, _RECOMPUTED = 3, 4  # matrix products, relative to one per product of the forward pass
_UNGATED = ("gpt2", "opt", "starcoder2", "gpt_neox", "gptj", "bloom", "falcon", "phi", "gpt_bigcode", "bert")


def balanced(
    layers: int, stages: int, seconds: Cost, stage_bytes: Cost, room: float = float("inf")
) -> tuple[int, ...] | None:  # fmt: skip
    """Layers of each stage with the least ``seconds`` of the slowest stage, where no stage's ``stage_bytes`` exceed
    ``room``; then with the least bytes of the fullest stage. None where nothing fits.

    Layers are alike, so both limits give a maximum of layers for each stage, and a balance exists exactly if these
    maxima add up to enough.
    """
    counts = range(1, layers - stages + 2)
    times = [[seconds(stage, count) for count in counts] for stage in range(stages)]
    sizes = [[stage_bytes(stage, count) for count in counts] for stage in range(stages)]

    def most(slowest: float, fullest: float) -> list[int] | None:
        """The most layers of each stage within both limits; None where a stage gets none, or all together too few."""
        counts = [
            min(bisect.bisect_right(time, slowest), bisect.bisect_right(size, min(fullest, room)))
            for time, size in zip(times, sizes, strict=True)
        ]
        return None if min(counts) < 1 or sum(counts) < layers else counts

    slowest = _smallest(times, lambda limit: most(limit, room) is not None)
    if slowest is None:
        return None
    fullest = _smallest(sizes, lambda limit: most(slowest, limit) is not None)
    assert fullest is not None
    limits = most(slowest, fullest)
    assert limits is not None
    layer_counts = [1] * stages
    for _ in range(layers - stages):
        open_ones = [stage for stage in range(stages) if layer_counts[stage] < limits[stage]]
        layer_counts[min(open_ones, key=lambda stage: (times[stage][layer_counts[stage]], -stage))] += 1
    return tuple(layer_counts)


def stages_of(split: Split, config: Any, *, sequence: int, checkpointing: str | None = None) -> tuple[int, ...]:
    """Layers of each of a model's ``split.pp`` x ``split.interleave`` stages under PyTorch's engine: those of the
    split, or balanced by their products. Interleaved stages are even.

    ``config`` is transformers'. The runtime and the estimate both call this.
    """
    layers, many = int(config.num_hidden_layers), split.pp * split.interleave
    if split.stage_layers:
        return split.stage_layers
    if many == 1 or split.interleave > 1:
        return stage_layers(layers, many)
    layer, head = _products(config, sequence)
    layer *= _RECOMPUTED if checkpointing == "full" else _FORWARD_AND_BACKWARD
    head *= _FORWARD_AND_BACKWARD

    def seconds(stage: int, count: int) -> float:
        return count * layer + (head if stage == many - 1 else 0)

    counts = balanced(layers, many, seconds, lambda stage, count: in_flight(split, stage) * count)
    assert counts is not None
    return counts


def _products(config: Any, sequence: int) -> tuple[int, int]:
    """Multiplications for one token: in a layer, and in the output layer."""
    hidden, heads = int(config.hidden_size), int(getattr(config, "num_attention_heads", None) or 1)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    queries, keys = heads * width, int(getattr(config, "num_key_value_heads", None) or heads) * width
    inner = next((v for n in ("intermediate_size", "n_inner", "ffn_dim") if (v := getattr(config, n, None))), None)
    ffn = (2 if config.model_type in _UNGATED else 3) * hidden * int(inner or 4 * hidden)
    ffn *= int(getattr(config, "num_experts_per_tok", None) or 1)
    attention = 2 * hidden * (queries + keys) + sequence * queries
    return attention + ffn, hidden * int(config.vocab_size)


def _smallest(table: Sequence[Sequence[float]], works: Callable[[float], bool]) -> float | None:
    """Return the smallest number of the table for which ``works`` is true (it is monotonic)."""
    limits = sorted({number for row in table for number in row})
    at = bisect.bisect_left(limits, True, key=works)
    return limits[at] if at < len(limits) else None
