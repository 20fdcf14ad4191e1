"""One order in which a stage's techniques are applied, for predictions of ranks and for ranks themselves.

It is torchtitan's (torchtitan/models/llama3/parallelize.py): activation checkpointing, compilation, then parts of
tensors, sequences and experts, and shares of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from brim.techniques import compiling
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.parallel import sharding


class Split(Protocol):
    """What is asked of a ``brim.estimation.ranks.split.Split``."""

    @property
    def zero(self) -> int: ...

    @property
    def sequence_parallel(self) -> bool: ...

    @property
    def offload_shards(self) -> bool: ...

    @property
    def ep(self) -> int: ...


def parallelize(
    stage: nn.Module,
    mesh: DeviceMesh,
    split: Split,
    *,
    dtype: torch.dtype | None,
    checkpointed: str | None = None,
    compiled: bool = False,
    context: DeviceMesh | None = None,
    context_place: int | None = None,
    fill: Callable[[nn.Module, Sequence[nn.Module]], None] = lambda part, without: None,
) -> sharding.Sharded:
    """Apply to ``stage``, in place, what ``split`` asks for over ``mesh`` (axes ``shard`` and ``tp``).

    Args:
        stage: The modules of one pipeline stage, or of a chunk of it.
        mesh: Of the ranks that hold this stage.
        split: How it is split.
        dtype: What weights compute in; None: their own type.
        checkpointed: ``"selective"``, ``"alternate"`` or ``"full"``, of every block; ``"none"`` or None: of none.
        compiled: Whether each block is compiled by itself.
        context: The ranks that share sequences with this one.
        context_place: Where among them it works as if it were, where that is another place than its own.
        fill: As ``sharding.apply`` has it.

    Raises:
        UsageError: Sizes that do not divide.
        UnsupportedError: Blocks of unknown names.
    """
    if checkpointed not in (None, "none"):
        checkpointing.apply(stage, dict.fromkeys(checkpointing.blocks(stage), checkpointed))
    if compiled:
        compiling.apply(stage)
    decision = sharding.Sharding(
        zero=split.zero,
        sequence_parallel=split.sequence_parallel,
        dtype=dtype,
        offload=split.offload_shards,
        experts=split.ep > 1,
        context=context,
        context_place=context_place,
    )
    return sharding.apply(stage, mesh, decision, fill)
