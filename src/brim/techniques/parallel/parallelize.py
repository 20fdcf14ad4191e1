"""The composition of a stage's techniques, for predictions of ranks and for ranks themselves.

Their order is torchtitan's (torchtitan/models/llama3/parallelize.py): activation checkpointing, compilation, then
tensor, context and expert parallelism, and sharding.
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
    """The properties of a ``brim.estimation.ranks.split.Split`` that are used."""

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
    checkpointed: str | None,
    compiled: bool = False,
    context: DeviceMesh | None,
    context_place: int | None = None,
    fill: Callable[[nn.Module, Sequence[nn.Module]], None] = lambda part, without: None,
) -> sharding.Sharded:
    """Apply the techniques of ``split`` to ``stage``, in place, over ``mesh`` (axes ``shard`` and ``tp``).

    Args:
        stage: The modules of a pipeline stage, or of a chunk of it.
        mesh: The ranks of this stage.
        split: The split.
        dtype: The dtype of computation; None: that of the weights.
        checkpointed: ``"selective"``, ``"alternate"`` or ``"full"``, of every block; ``"none"`` or None: of none.
        compiled: True if each block is compiled separately.
        context: The ranks that share sequences with this one.
        context_place: The position among them to act for, if it is not this rank's own.
        fill: See ``sharding.apply``.

    Raises:
        UsageError: A size is not divisible.
        UnsupportedError: The names of blocks are unknown.
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
