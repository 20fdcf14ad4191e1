"""Convert between assignments and choices, rank them, and derive their inputs from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from brim.core import Hardware
from brim.core.hardware import VRAM
from brim.errors import UnsupportedError
from brim.planning.solver.step_profile import FULL, KEEP, OFFLOAD, SELECTIVE, Assignment, Frame
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.ladder import CHUNK_TOKENS
from brim.techniques.base import Option
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.checkpointing.technique import NONE
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.streaming.placement import RESIDENT, STAGING_SLOTS
from brim.techniques.streaming.weight_streaming import RING_SLOTS

SHARED = ("micro_batch", "in_backward", "states", "gradients")  # fields of Choice and of Frame
UNSOLVED = ("precision", "in_place", "brief_buffer")  # fields of Choice that the solver does not choose


def rank(seconds: float, assignment: Assignment) -> tuple[float, int, float]:
    """Return a sort key: seconds to four digits, then the number of techniques in use."""
    frame = assignment.frame
    used = [frame.chunked, frame.in_backward, frame.states != KEEP, frame.gradients != KEEP]
    used += [kept != KEEP for kept in assignment.activations.values()]
    used += [weights != RESIDENT for weights in assignment.weights.values()]
    return float(f"{seconds:.4g}"), sum(used), seconds


def signature(assignment: Assignment) -> tuple[Any, ...]:
    kinds = frozenset((assignment.weights[name], kept) for name, kept in assignment.activations.items())
    return (replace(assignment.frame, slots=2), kinds)


def trained_bytes(model: nn.Module, partition: Partition) -> dict[str, int]:
    """Return the trained bytes of each block."""
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
    options = chunked_loss.options(tokens, classes, hidden, hardware, dtype=layer.weight.dtype)
    return next((option for option in options if option.choice == str(CHUNK_TOKENS)), None)


def as_choice(assignment: Assignment, precision: str, compute: str) -> Choice:
    """Convert ``assignment`` to the runtime's form."""
    frame, kept = assignment.frame, assignment.activations
    streams = any(choice != RESIDENT for choice in assignment.weights.values())
    settings = {RING_SLOTS: frame.slots} if streams else {}
    if streams and compute == VRAM:
        settings[STAGING_SLOTS] = 2
    return Choice(
        precision=precision,
        chunk_tokens=CHUNK_TOKENS if frame.chunked else 0,
        checkpointing={b: c for b, c in kept.items() if c in (SELECTIVE, FULL)},
        activations=tuple(b for b, c in kept.items() if c == OFFLOAD),
        **{name: getattr(frame, name) for name in SHARED},
        streaming=dict(assignment.weights) if streams else {},
        streaming_settings=settings,
    )


def as_assignment(choice: Choice, names: Sequence[str]) -> Assignment | None:
    """Convert ``choice`` to the solver's form; None where it has other blocks than ``names``, or other chunks.

    The fields ``UNSOLVED`` are left out: they change a step's bytes, which its trace tells, and not its schedule.
    """
    blocks = {*choice.streaming, *choice.checkpointing, *choice.activations}
    if choice.chunk_tokens not in (0, CHUNK_TOKENS) or not blocks <= set(names):
        return None
    frame = Frame(
        **{name: getattr(choice, name) for name in SHARED},
        chunked=bool(choice.chunk_tokens),
        slots=choice.streaming_settings.get(RING_SLOTS, 2),
    )
    kept = dict.fromkeys(names, KEEP) | {n: c for n, c in choice.checkpointing.items() if c != NONE}
    return Assignment(
        frame=frame,
        weights={name: choice.streaming.get(name, RESIDENT) for name in names},
        activations=kept | dict.fromkeys(choice.activations, OFFLOAD),
    )
