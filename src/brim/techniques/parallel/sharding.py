"""Sharding: data parallelism with ZeRO by FSDP2, tensor and sequence parallelism by DTensor.

Rajbhandari et al., arXiv 1910.02054; Zhao et al., arXiv 2304.11277. PyTorch does all communication: ``fully_shard``
and ``parallelize_module``, on any process group. On fake tensors and PyTorch's fake process group
(``alone``) this is the prediction.

* ZeRO-0: ``replicate``: every rank has everything, gradients are all-reduced.
* ZeRO-1: weights stay gathered from the first micro-batch to the last, after which gradients are reduced and split;
  the optimizer steps on shards.
* ZeRO-2: as 1, with gradients split after every micro-batch.
* ZeRO-3: weights are gathered only where they are needed.

With offload a rank keeps its shards of weights, their gradients and the optimizer's states in RAM (FSDP2's
``CPUOffloadPolicy``), where the CPU takes the optimizer's step (Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857).
FSDP2 copies a shard to the GPU before it is gathered and a reduced gradient back
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``all_gather_inputs``; _fsdp_collectives.py, ``foreach_reduce``).
If the device is the CPU too, as with gloo and in a trace, FSDP2 copies nothing. ``_simulating`` makes these copies
and reports each to the count of memory (``Tiers``): so a rank without a GPU takes the same memory in each tier as one
with a GPU, through the same code of PyTorch.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from brim.errors import UnsupportedError, UsageError
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel import context_parallel
from brim.techniques.parallel.pipeline import Stage
from brim.techniques.parallel.sharding_plan import (
    SpreadExperts,
    split_block,
    split_outside,
    spread_experts,
    tied_weights,
)

AXES = ("shard", "tp")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The split of a model. ``dtype`` is that of computation; None is that of the weights, otherwise gradients are
    reduced in float32. ``offload`` keeps shards in RAM, with their gradients and optimizer states; it needs a stage
    of ZeRO, and works on one data-parallel rank too. ``experts``: each rank
    of ``shard`` has some of every layer's experts, which ZeRO does not split further. ``context``: the ranks of
    ``shard`` that share sequences with this one; ``context_place``: the place among them to act for."""

    zero: int = 3
    sequence_parallel: bool = False
    dtype: torch.dtype | None = None
    offload: bool = False
    experts: bool = False
    context: DeviceMesh | None = None
    context_place: int | None = None


def mesh_of(shards: int, tensor_parallel: int, device: str) -> DeviceMesh:
    """The mesh of the ranks of a pipeline stage. Raises UsageError if there are more or fewer ranks."""
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

    ``fill`` is called to give the parameters of each part their values before it is split: with each block, and at
    the end with the model and the blocks to leave out. So only one part at a time is complete. Raises UsageError if
    sizes do not divide, UnsupportedError for blocks of unknown names.
    """
    layers, tensors = blocks(model), mesh["tp"].size() > 1
    splits = mesh["shard"].size() > 1 or decision.dtype is not None or decision.offload
    tied = tied_weights(model)
    parts = [model.get_submodule(path) for path in layers]
    if decision.context is not None:
        assert isinstance(model, Stage), "only stages cut their own part of a sequence"
        model.context = context_parallel.apply(model.model, decision.context, decision.context_place)
    spread: list[SpreadExperts] = []
    for path, block in zip(layers, parts, strict=True):
        fill(block, ())
        if decision.experts:
            spread.append(spread_experts(block, mesh["shard"], decision.dtype))
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
        for parameter in model.parameters():
            local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
            for mode in _counting():
                mode.rest_in_ram(local)
    simulates = decision.offload and mesh.device_type == "cpu"
    return Sharded(model if splits else None, decision, spread, tensors=tensors, simulates=simulates)


class Sharded:
    """The handle. Enter ``micro_batch`` for every micro-batch of a step; in a pipeline, whose backward passes have an
    order of their own, enter ``losses`` once and call ``set_last_backward`` before each of them."""

    def __init__(
        self, model: nn.Module | None, decision: Sharding, spread: Sequence[SpreadExperts] = (), *,
        tensors: bool, simulates: bool,
    ) -> None:  # fmt: skip
        self._tensors, self._simulates, self.offloads = tensors, simulates, decision.offload
        self._spread = spread
        self._model, self._decision = (
            model,
            decision,
        )  # None for a single data-parallel rank, which needs no reduction

    def set_last_backward(self, *, last: bool) -> None:
        """Prepare for a backward pass, the last one of a step or not: some stages of ZeRO reduce in the last only."""
        model, zero = self._model, self._decision.zero
        if isinstance(model, FSDPModule):
            if zero < 2:
                model.set_requires_gradient_sync(last)
            if zero in (1, 2):
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)

    def settle(self) -> None:
        """Turn the complete gradients of experts from sums over ranks into means."""
        for spread in self._spread:
            spread.settle()

    @contextmanager
    def losses(self) -> Iterator[None]:
        """The context of forward and backward: logits stay split over the vocabulary, and on a CPU the copies of
        shards to a GPU are simulated."""
        simulation = _simulating() if self._simulates else nullcontext()
        with loss_parallel() if self._tensors else nullcontext(), simulation:
            yield

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.set_last_backward(last=last)
        with self.losses():
            yield

    def stepping(self) -> ExitStack:
        """The context of the optimizer's step: with offload it makes counters in RAM like its other states."""
        stack = ExitStack()
        for mode in _counting() if self.offloads else ():
            stack.enter_context(mode.making_in_ram())
        return stack

    def remove(self) -> None:
        raise UnsupportedError(
            "Cannot undo the sharding of a model.", "FSDP2 cannot be undone.", "Save it and load it anew."
        )


def group_by_mesh(optimizer: torch.optim.Optimizer, *, offload: bool) -> None:
    """Split parameter groups by mesh, to be stepped with ``foreach`` as PyTorch does on a GPU: a call takes DTensors
    of the same mesh, or plain tensors. Shards in RAM are stepped by the CPU's fused kernel, which reads them once and
    needs no temporary memory (DTensor has Adam's; other optimizers step one by one)."""
    options: dict[str, Any] = {"foreach": True}
    if offload:
        options = {"foreach": False, "fused": isinstance(optimizer, torch.optim.Adam)}
    groups = []
    for group in optimizer.param_groups:
        for own in by_mesh(group["params"]):
            groups.append({**group, "params": own} | {key: value for key, value in options.items() if key in group})
    optimizer.param_groups = groups


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by the mesh of DTensors; plain tensors are a group."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(kinds.values())


def _shard(
    unit: nn.Module, mesh: DeviceMesh, decision: Sharding, spread: Iterable[SpreadExperts], *,
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
        # Page-locked beside a GPU, so that copies overlap with kernels.
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    fully_shard(unit, reshard_after_forward=decision.zero == 3 and not outermost, **settings)


def _of_other_dtypes(unit: nn.Module, ignored: Collection[nn.Parameter]) -> list[nn.Module]:
    """The modules in ``unit`` whose own parameters have another dtype than most of it, such as routers in float32.
    FSDP2 gathers a single dtype at a time (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""
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
    """Make this process ``rank`` of ``ranks`` in PyTorch's fake process group, whose collectives send nothing.

    Raises UsageError if the process is in a group already.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            "Cannot trace simulated ranks.", "This process is in a group of real ranks.",
            "Estimate in a separate process.",
        )  # fmt: skip
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    sys.excepthook = hook  # PyTorch's adds the rank to every traceback, and is not removed
    try:
        with ExitStack() as stack:
            for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
                # These operations compute global shapes and are not those of a rank.
                unseen = _unseen(_once_per_kind(vars(ShardingPropagator)[name]))
                stack.enter_context(mock.patch.object(ShardingPropagator, name, unseen))
            for name in ("__init__", "__getitem__", "_concatenate"):
                stack.enter_context(mock.patch.object(DeviceMesh, name, _unseen(vars(DeviceMesh)[name])))
            yield
    finally:
        dist.destroy_process_group()


def _once_per_kind(propagate: Any) -> Any:
    """A sharding or shape propagation of operators on lists that is called once for each kind of tensor: PyTorch's is
    called for each tensor (torch/distributed/tensor/_ops/single_dim_strategy.py, ``expanded_foreach_strategy``)."""

    @functools.wraps(propagate)
    def call(self: Any, schema: OpSchema) -> Any:
        lists = [arg for arg in schema.args_schema if isinstance(arg, list | tuple)]
        if not schema.op.name().startswith("aten::_foreach_") or len(set(map(len, lists))) != 1:
            return propagate(self, schema)
        kinds: dict[Any, int] = {}  # of the tensors, or numbers, at the same place of all lists
        places = [kinds.setdefault(at_place, len(kinds)) for at_place in zip(*lists, strict=True)]
        if len(kinds) == len(places):
            return propagate(self, schema)
        few = iter(zip(*kinds, strict=True))
        args = (type(arg)(next(few)) if isinstance(arg, list | tuple) else arg for arg in schema.args_schema)
        result = propagate(self, OpSchema(schema.op, tuple(args), schema.kwargs_schema, schema.schema_info))
        if not isinstance(result, OutputSharding):
            return _at(result, places)
        if result.needs_redistribute:  # the result depends on the arguments to be sent
            return propagate(self, schema)
        return OutputSharding(_at(result.output_spec, places), None)

    return call


def _at(kinds: Any, places: Iterable[int]) -> Any:
    """Expand a list of kinds to the places of a list; other values are returned as they are."""
    return type(kinds)(kinds[place] for place in places) if isinstance(kinds, list | tuple) else kinds


def _unseen(function: Any) -> Any:
    """Wrap a function that makes tensors only for a look-up, so that a trace does not see them."""
    inner = function.__func__ if isinstance(function, staticmethod) else function

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return inner(*args, **kwargs)

    return staticmethod(call) if isinstance(function, staticmethod) else call


@runtime_checkable
class Tiers(Protocol):
    """A dispatch mode that counts memory in RAM and on the device."""

    def crossing(self, *, to_ram: bool) -> AbstractContextManager[None]:
        """Count new tensors as copies in RAM, or on the device, within."""

    def making_in_ram(self) -> AbstractContextManager[None]:
        """Count new tensors without tensor inputs as in RAM within."""

    def rest_in_ram(self, tensor: torch.Tensor) -> None:
        """Count the tensor in RAM."""


@contextmanager
def _simulating() -> Iterator[None]:
    """Make FSDP2 on CPUs copy between two places within, as it would between RAM and a GPU."""
    gather: Any = FSDPParam.all_gather_inputs
    reduce: Any = vars(_fsdp_param_group)["foreach_reduce"]

    def gathered(parameter: FSDPParam) -> Any:
        if not parameter.offload_to_cpu:
            return gather.fget(parameter)
        with _crossing(to_ram=False):
            return gather.fget(parameter)

    def reduced(parameters: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
        if not parameters[0].offload_to_cpu:
            return reduce(parameters, *args, **kwargs)
        with _crossing(to_ram=True):
            return reduce(parameters, *args, **kwargs)

    with mock.patch.object(FSDPParam, "all_gather_inputs", property(gathered)), \
         mock.patch.object(_fsdp_param_group, "foreach_reduce", reduced):  # fmt: skip
        yield


@contextmanager
def _crossing(*, to_ram: bool) -> Iterator[None]:
    """Make ``tensor.to(device)`` a copy within, as between two devices."""
    to: Any = torch.Tensor.to

    def crossed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (args and isinstance(args[0], torch.device)):
            return to(tensor, *args, **kwargs)
        with ExitStack() as stack:
            for mode in _counting():
                stack.enter_context(mode.crossing(to_ram=to_ram))
            return tensor.clone()

    with mock.patch.object(torch.Tensor, "to", crossed):
        yield


def _counting() -> list[Tiers]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tiers)]
