"""How ways to train compare, and what is known of a model before any of them is tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from brim.core import Hardware
from brim.errors import UnsupportedError
from brim.planner.step_profile import KEEP, Way
from brim.run.training_ladder import CHUNK_TOKENS
from brim.techniques import chunked_loss
from brim.techniques.base import Option
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.placement import RESIDENT


def rank(seconds: float, way: Way) -> tuple[float, int, float]:
    """Of ways that are as fast to four digits, the one that does least comes first."""
    frame = way.frame
    used = [frame.chunked, frame.in_backward, frame.states != KEEP, frame.gradients != KEEP]
    used += [kept != KEEP for kept in way.activations.values()]
    used += [weights != RESIDENT for weights in way.weights.values()]
    return float(f"{seconds:.4g}"), sum(used), seconds


def signature(way: Way) -> tuple[Any, ...]:
    kinds = frozenset((way.weights[name], kept) for name, kept in way.activations.items())
    return (replace(way.frame, slots=2), kinds)


def trained_bytes(model: nn.Module, partition: Partition) -> dict[str, int]:
    """Of each block, the bytes that the optimizer changes."""
    parameters = dict(model.named_parameters())
    return {
        block.name: sum(tensor_bytes(parameters[n]) for n in block.tensors if parameters[n].requires_grad)
        for block in partition.blocks
    }


def head_option(model: nn.Module, tokens: int, hardware: Hardware) -> Option | None:
    try:
        layer: Any = model.get_submodule(chunked_loss.find_head(model))
    except UnsupportedError:
        return None
    classes, hidden = layer.weight.shape
    made = chunked_loss.options(tokens, classes, hidden, hardware, dtype=layer.weight.dtype)
    return next((option for option in made if option.choice == str(CHUNK_TOKENS)), None)
