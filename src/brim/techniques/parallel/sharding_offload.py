"""Shards in RAM: FSDP2's ``CPUOffloadPolicy``, and a CPU that plays both of its places.

A rank keeps its shards of weights, their gradients and the optimizer's states in RAM, where the CPU takes the
optimizer's step (Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857). FSDP2 copies a shard to the GPU before it is
gathered and a reduced gradient back (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``all_gather_inputs``;
_fsdp_collectives.py, ``foreach_reduce``).

Where the device is the CPU too, as over gloo and in a trace, FSDP2 copies nothing. ``rehearsing`` makes these copies
all the same, and reports each to the count of memory (``Tiers``): so a rank without a GPU takes in each tier what one
with a GPU takes, through the same code of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@runtime_checkable
class Tiers(Protocol):
    """A dispatch mode that tells what lies in RAM from what lies on the device."""

    def crossing(self, *, to_ram: bool) -> AbstractContextManager[None]:
        """While open, what is made is a copy in RAM, or on the device."""

    def making_in_ram(self) -> AbstractContextManager[None]:
        """While open, what is made of no tensor is in RAM."""

    def rest_in_ram(self, tensor: torch.Tensor) -> None:
        """The tensor is in RAM."""


def policy(device: str) -> CPUOffloadPolicy:
    """Page-locked beside a GPU, so that copies overlap with kernels; without one there is nothing to lock for."""
    return CPUOffloadPolicy(pin_memory=device != "cpu")


def rest_in_ram(parameters: Iterable[nn.Parameter]) -> None:
    """Report to the count of memory that these parameters' shards are in RAM."""
    for parameter in parameters:
        local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        for mode in _counting():
            mode.rest_in_ram(local)


@contextmanager
def stepping() -> Iterator[None]:
    """To be entered for the optimizer's step, whose counters are in RAM as its other states are."""
    with ExitStack() as stack:
        for mode in _counting():
            stack.enter_context(mode.making_in_ram())
        yield


@contextmanager
def rehearsing() -> Iterator[None]:
    """While open, FSDP2 on CPUs copies what it would copy between RAM and a GPU."""
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
    """While open, ``tensor.to(device)`` is a copy that crosses, as it is where the devices are two."""
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
