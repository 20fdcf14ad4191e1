"""Sharding: data parallelism with ZeRO by FSDP2, tensor and sequence parallelism by DTensor.

Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277. brim sends nothing itself: ``fully_shard`` and
``parallelize_module`` do, on whatever process group there is. On fake tensors and PyTorch's fake process group
(``alone``) this is the prediction.

* ZeRO-0: ``replicate``: every rank has everything, gradients are all-reduced.
* ZeRO-1: weights stay whole from the first micro-batch to the last and gradients are reduced and split after the
  last; the optimizer steps on shards.
* ZeRO-2: as 1, with gradients split after every micro-batch.
* ZeRO-3: weights are whole only where they are needed.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import _disable_current_modes

from brim.errors import UnsupportedError, UsageError
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel import context_parallel, expert_parallel, sharding_offload
from brim.techniques.parallel.pipeline import Stage
from brim.techniques.parallel.sharding_plan import split_block, split_outside, tied_weights

AXES = ("shard", "tp")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is split. ``dtype``: what weights compute in, their own type where it is None (gradients are
    reduced in float32 where it is not). ``offload`` keeps shards in RAM, with their gradients and optimizer states
    (``sharding_offload``); it needs a stage of ZeRO, and works on one data-parallel rank too. ``experts``: each rank
    of ``shard`` has some of every layer's experts, which no ZeRO splits any more. ``context``: those of ``shard``
    that share sequences with this rank; ``context_place``: where among them it works as if it were."""

    zero: int = 3
    sequence_parallel: bool = False
    dtype: torch.dtype | None = None
    offload: bool = False
    experts: bool = False
    context: DeviceMesh | None = None
    context_place: int | None = None


def mesh_of(shards: int, tensor_parallel: int, device: str) -> DeviceMesh:
    """The mesh of the ranks that hold one pipeline stage; raises UsageError where it is not the number of ranks."""
    ranks = dist.get_world_size()
    if shards * tensor_parallel != ranks:
        raise UsageError(
            f"Cannot make a mesh of {shards} x {tensor_parallel} ranks.",
            f"There are {ranks} ranks.",
            f"Start {shards * tensor_parallel}, or change the split.",
        )
    return init_device_mesh(device, (shards, tensor_parallel), mesh_dim_names=AXES)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    decision: Sharding,
    fill: Callable[[nn.Module, Sequence[nn.Module]], None] = lambda part, without: None,
) -> Sharded:
    """Split ``model`` in place over ``mesh`` (axes ``shard`` and ``tp``): block by block, tensors first, then FSDP2.

    ``fill`` is called with each part before it is split, to give its parameters their values: with each block, and
    at the end with the model and the blocks that are to be left out. So no more than one part is ever whole.
    Raises UsageError where sizes do not divide, UnsupportedError for blocks of unknown names.
    """
    layers, tensors = blocks(model), mesh["tp"].size() > 1
    splits = mesh["shard"].size() > 1 or decision.dtype is not None or decision.offload
    tied = tied_weights(model)
    parts = [model.get_submodule(path) for path in layers]
    if decision.context is not None:
        assert isinstance(model, Stage), "only stages cut their own part of a sequence"
        model.context = context_parallel.apply(model.model, decision.context, decision.context_place)
    spread: list[expert_parallel.Spread] = []
    for path, block in zip(layers, parts, strict=True):
        fill(block, ())
        if decision.experts:
            spread.append(expert_parallel.apply(block, mesh["shard"], decision.dtype))
        if tensors:
            split_block(path, block, mesh["tp"], sequence_parallel=decision.sequence_parallel)
        if splits:
            _shard(block, mesh["shard"], decision, spread, outermost=False)
    fill(model, parts)
    if tensors:
        split_outside(model, layers, tied, mesh["tp"], sequence_parallel=decision.sequence_parallel)
        if decision.sequence_parallel and isinstance(model, Stage):
            model.tokens_over = mesh["tp"]
    if splits:
        _shard(model, mesh["shard"], decision, spread, outermost=True)
    if decision.offload:
        sharding_offload.rest_in_ram(model.parameters())
    rehearses = decision.offload and mesh.device_type == "cpu"
    return Sharded(model if splits else None, decision, spread, tensors=tensors, rehearses=rehearses)


class Sharded:
    """The handle. ``micro_batch`` is to be entered for every micro-batch of a step; in a pipeline, where backward
    passes come in an order of their own, ``losses`` for all of it and ``put_off`` before each of them."""

    def __init__(
        self, model: nn.Module | None, decision: Sharding, spread: Sequence[expert_parallel.Spread] = (), *,
        tensors: bool, rehearses: bool,
    ) -> None:  # fmt: skip
        self._tensors, self._rehearses, self.offloads = tensors, rehearses, decision.offload
        self._spread = spread
        self._model, self._decision = model, decision  # None: there is one data-parallel rank, and nothing to put off

    def put_off(self, *, last: bool) -> None:
        """To be called before each backward pass: what is put off to a step's last micro-batch is put off."""
        model, zero = self._model, self._decision.zero
        if isinstance(model, FSDPModule):
            if zero < 2:
                model.set_requires_gradient_sync(last)
            if zero in (1, 2):
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)

    def hold(self) -> None:
        """To be called before each half of a backward pass: nothing is reduced, and the second half needs the same
        weights as the first one, until ``reduce``."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(False)
            self._model.set_reshard_after_backward(False)
            self._model.set_is_last_backward(False)

    def reduce(self) -> None:
        """To be called after the last backward pass of a step whose passes were in halves: those run no hooks of
        FSDP2 for weights, so that PyTorch's stages reduce by hand."""
        if isinstance(self._model, FSDPModule):
            holder: Any = SimpleNamespace(submod=self._model)
            _PipelineStageBase.perform_reduce_grad(holder, 1)

    def settle(self) -> None:
        """To be called once all gradients of a step are there: those of experts on one rank are sums until then."""
        for spread in self._spread:
            spread.settle()

    @contextmanager
    def losses(self) -> Iterator[None]:
        """To be entered for forward and backward: logits stay split over the vocabulary, and a CPU plays the GPU
        that shards are copied to."""
        rehearsal = sharding_offload.rehearsing() if self._rehearses else nullcontext()
        with loss_parallel() if self._tensors else nullcontext(), rehearsal:
            yield

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """One forward and backward after the other."""
        self.put_off(last=last)
        with self.losses():
            yield

    def stepping(self) -> AbstractContextManager[None]:
        """To be entered for the optimizer's step."""
        return sharding_offload.stepping() if self.offloads else nullcontext()

    def remove(self) -> None:
        raise UnsupportedError(
            "Cannot undo the sharding of a model.",
            "FSDP2 cannot be undone.",
            "Save it and load it anew.",
        )


def group_by_kind(optimizer: torch.optim.Optimizer, *, offload: bool = False) -> None:
    """Parameters on one mesh in a group of their own, by ``foreach`` as PyTorch steps on a GPU: one call takes
    DTensors of one mesh, or plain tensors. Shards in RAM are stepped on by the CPU's fused kernel, which goes
    through them once and makes nothing beside them (DTensor has Adam's; others go one by one)."""
    way: dict[str, Any] = {"foreach": True}
    if offload:
        way = {"foreach": False, "fused": isinstance(optimizer, torch.optim.Adam)}
    apart = []
    for group in optimizer.param_groups:
        for own in of_one_kind(group["params"]):
            apart.append({**group, "params": own} | {key: value for key, value in way.items() if key in group})
    optimizer.param_groups = apart


def of_one_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """DTensors on one mesh together, plain tensors together."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def _shard(
    unit: nn.Module, mesh: DeviceMesh, decision: Sharding, spread: Iterable[expert_parallel.Spread], *,
    outermost: bool,
) -> None:  # fmt: skip
    settings: dict[str, Any] = {"mesh": mesh}
    if spread:
        settings["ignored_params"] = {parameter for part in spread for parameter in part.parameters()}
    for part in _of_other_dtypes(unit, settings.get("ignored_params", ())):
        _shard(part, mesh, decision, spread, outermost=False)
    if decision.dtype is not None:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=decision.dtype, reduce_dtype=torch.float32)
    if decision.zero == 0:
        replicate(unit, **settings)
        return
    if decision.offload:
        settings["offload_policy"] = sharding_offload.policy(mesh.device_type)
    fully_shard(unit, reshard_after_forward=decision.zero == 3 and not outermost, **settings)


def _of_other_dtypes(unit: nn.Module, ignored: Collection[nn.Parameter]) -> list[nn.Module]:
    """The modules in ``unit`` whose own parameters are of another dtype than most of it, as of routers in float32.
    FSDP2 gathers one dtype at a time (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""
    dtypes: dict[nn.Module, torch.dtype] = {}
    counts: Counter[torch.dtype] = Counter()
    waiting = [unit]
    while waiting:
        module = waiting.pop()
        own = [
            parameter
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad and parameter not in ignored
        ]
        counts.update({parameter.dtype: parameter.numel() for parameter in own})
        if own and module is not unit:
            dtypes[module] = own[0].dtype
        waiting += [child for child in module.children() if not isinstance(child, FSDPModule)]
    most = max(counts, key=counts.__getitem__, default=None)
    return [module for module, dtype in dtypes.items() if dtype != most]


@contextmanager
def alone(ranks: int, rank: int = 0) -> Iterator[None]:
    """One process as ``rank`` of ``ranks`` that are not there: collectives send nothing and return at once.

    PyTorch's fake process group. Raises UsageError where the process is in a group already.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            "Cannot trace simulated ranks.", "This process is in a group of real ranks.",
            "Estimate in a process of its own.",
        )  # fmt: skip
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    sys.excepthook = hook  # PyTorch's tells the rank of every traceback from then on, and leaves it at that
    try:
        with ExitStack() as stack:
            for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
                # Whole shapes, which no rank works out by operations.
                unseen = _unseen(_each_kind_once(vars(ShardingPropagator)[name]))
                stack.enter_context(mock.patch.object(ShardingPropagator, name, unseen))
            for name in ("__init__", "__getitem__", "_concatenate"):
                stack.enter_context(mock.patch.object(DeviceMesh, name, _unseen(vars(DeviceMesh)[name])))
            yield
    finally:
        dist.destroy_process_group()


def _each_kind_once(propagate: Any) -> Any:
    """How an operator on lists is sharded or what shapes it gives, asked of each kind of tensor once: PyTorch asks of
    every tensor in a list (torch/distributed/tensor/_ops/single_dim_strategy.py, ``expanded_foreach_strategy``)."""

    @functools.wraps(propagate)
    def call(self: Any, schema: OpSchema) -> Any:
        lists = [arg for arg in schema.args_schema if isinstance(arg, list | tuple)]
        if not schema.op.name().startswith("aten::_foreach_") or len({len(one) for one in lists}) != 1:
            return propagate(self, schema)
        kinds: dict[Any, int] = {}  # of the tensors, or numbers, at one place of all lists
        places = [kinds.setdefault(at_place, len(kinds)) for at_place in zip(*lists, strict=True)]
        if len(kinds) == len(places):
            return propagate(self, schema)
        few = iter(zip(*kinds, strict=True))
        args = (type(arg)(next(few)) if isinstance(arg, list | tuple) else arg for arg in schema.args_schema)
        found = propagate(self, OpSchema(schema.op, tuple(args), schema.kwargs_schema, schema.schema_info))
        if not isinstance(found, OutputSharding):
            return _at(found, places)
        if found.needs_redistribute:  # which arguments are sent, and how
            return propagate(self, schema)
        return OutputSharding(_at(found.output_spec, places), None)

    return call


def _at(kinds: Any, places: Iterable[int]) -> Any:
    """The elements of a list, by the number of each one's kind; what is no list as it is."""
    return type(kinds)(kinds[place] for place in places) if isinstance(kinds, list | tuple) else kinds


def _unseen(function: Any) -> Any:
    """The same function, run beside a trace: it makes tensors only to look something up."""
    inner = function.__func__ if isinstance(function, staticmethod) else function

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return inner(*args, **kwargs)

    return staticmethod(call) if isinstance(function, staticmethod) else call
