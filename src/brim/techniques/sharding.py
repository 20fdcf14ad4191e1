"""Sharding: data parallelism with ZeRO by FSDP2, tensor and sequence parallelism by DTensor.

Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277. brim sends nothing itself: ``fully_shard`` and
``parallelize_module`` do, on whatever process group there is. On fake tensors and PyTorch's fake process group
(``alone``) this is the prediction.

* ZeRO-0: ``replicate``: every rank has everything, gradients are all-reduced.
* ZeRO-1: weights stay whole from the first micro-batch to the last and gradients are reduced and split after the
last;
  the optimizer steps on shards.
* ZeRO-2: as 1, with gradients split after every micro-batch.
* ZeRO-3: weights are whole only where they are needed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import _disable_current_modes

from brim.errors import UnsupportedError, UsageError
from brim.techniques.checkpointing import blocks
from brim.techniques.pipeline import Stage
from brim.techniques.sharding_plan import tensor_parallel

NAME = "sharding"
AXES = ("shard", "tp")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is split. ``dtype``: what weights compute in, their own type where it is None (gradients are
    reduced in float32 where it is not). ``offload`` keeps shards in RAM."""

    zero: int = 3
    sequence_parallel: bool = False
    dtype: torch.dtype | None = None
    offload: bool = False


def mesh_of(shards: int, tensor_parallel: int, device: str) -> DeviceMesh:
    """The mesh of the ranks that hold one pipeline stage; raises UsageError where it is not the number of ranks."""
    ranks = dist.get_world_size()
    if shards * tensor_parallel != ranks:
        raise UsageError(
            f"A mesh of {shards} x {tensor_parallel} ranks was asked for.",
            f"There are {ranks}.",
            f"Start {shards * tensor_parallel}, or change the split.",
        )
    return init_device_mesh(device, (shards, tensor_parallel), mesh_dim_names=AXES)


def apply(model: nn.Module, mesh: DeviceMesh, decision: Sharding) -> Sharded:
    """Split ``model`` in place over ``mesh`` (axes ``shard`` and ``tp``): tensors first, then each block by FSDP2.

    Raises UsageError where sizes do not divide, UnsupportedError for blocks of unknown names.
    """
    layers = blocks(model)
    if mesh["tp"].size() > 1:
        tensor_parallel(model, layers, mesh["tp"], sequence_parallel=decision.sequence_parallel)
        if decision.sequence_parallel and isinstance(model, Stage):
            model.tokens_over = mesh["tp"]
    splits = mesh["shard"].size() > 1 or decision.dtype is not None
    units: list[nn.Module] = [model.get_submodule(path) for path in layers] + [model]
    for unit in units if splits else []:
        _shard(unit, mesh["shard"], decision, outermost=unit is model)
    return Sharded(model if splits else None, decision, tensors=mesh["tp"].size() > 1)


class Sharded:
    """The handle. ``micro_batch`` is to be entered for every micro-batch of a step."""

    def __init__(self, model: nn.Module | None, decision: Sharding, *, tensors: bool) -> None:
        self._tensors = tensors
        self._model, self._decision = model, decision  # None: there is one data-parallel rank, and nothing to put off

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """What is put off to a step's last micro-batch is put off."""
        model, zero = self._model, self._decision.zero
        if isinstance(model, FSDPModule):
            if zero < 2:
                model.set_requires_gradient_sync(last)
            if zero in (1, 2):
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
        with loss_parallel() if self._tensors else nullcontext():  # logits stay split over the vocabulary
            yield

    def remove(self) -> None:
        raise UnsupportedError(
            "A sharded model was to be put together again.",
            "FSDP2 does not undo itself.",
            "Save it and load it anew.",
        )


def _shard(unit: nn.Module, mesh: DeviceMesh, decision: Sharding, *, outermost: bool) -> None:
    settings: dict[str, Any] = {"mesh": mesh}
    if decision.dtype is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=decision.dtype, reduce_dtype=torch.float32)
    if decision.zero == 0:
        replicate(unit, **settings)
        return
    if decision.offload:
        policy: OffloadPolicy = CPUOffloadPolicy()
        settings["offload_policy"] = policy
    fully_shard(unit, reshard_after_forward=decision.zero == 3 and not outermost, **settings)


@contextmanager
def alone(ranks: int, rank: int = 0) -> Iterator[None]:
    """One process as ``rank`` of ``ranks`` that are not there: collectives send nothing and return at once.

    PyTorch's fake process group. Raises UsageError where the process is in a group already.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            "Ranks that are not there were to be traced.", "This process is in a group of real ones.",
            "Estimate in a process of its own.",
        )  # fmt: skip
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    sys.excepthook = hook  # PyTorch's tells the rank of every traceback from then on, and leaves it at that
    try:
        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", _propagated)
            )
            for name in ("__init__", "__getitem__", "_concatenate"):
                stack.enter_context(mock.patch.object(DeviceMesh, name, _unseen(vars(DeviceMesh)[name])))
            yield
    finally:
        dist.destroy_process_group()


def _propagated(propagator: Any, schema: Any) -> Any:
    """DTensor works out a whole result's shape with operations of its own, which no rank runs."""
    with _disable_current_modes():
        return propagator.propagate_op_sharding(schema)


def _unseen(function: Any) -> Any:
    """The same function, run beside a trace: a mesh looks its own numbers up in tensors."""
    inner = function.__func__ if isinstance(function, staticmethod) else function

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return inner(*args, **kwargs)

    return staticmethod(call) if isinstance(function, staticmethod) else call
