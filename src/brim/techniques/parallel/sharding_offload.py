"""Shards in RAM: FSDP2's ``CPUOffloadPolicy``, and its simulation on a CPU.

A rank keeps its shards of weights, their gradients and the optimizer's states in RAM, where the CPU takes the
optimizer's step (Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857). FSDP2 copies a shard to the GPU before it is
gathered and a reduced gradient back (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``all_gather_inputs``;
_fsdp_collectives.py, ``foreach_reduce``).

If the device is the CPU too, as with gloo and in a trace, FSDP2 copies nothing. ``simulating`` makes these copies
and reports each to the count of memory (``Tiers``): so a rank without a GPU takes the same memory in each tier as one
with a GPU, through the same code of PyTorch.
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
    """A dispatch mode that counts memory in RAM and on the device."""

    def crossing(self, *, to_ram: bool) -> AbstractContextManager[None]:
        """Count new tensors as copies in RAM, or on the device, within."""

    def making_in_ram(self) -> AbstractContextManager[None]:
        """Count new tensors without tensor inputs as in RAM within."""

    def rest_in_ram(self, tensor: torch.Tensor) -> None:
        """Count the tensor in RAM."""


def policy(device: str) -> CPUOffloadPolicy:
    """FSDP2's policy, page-locked beside a GPU, so that copies overlap with kernels."""
    return CPUOffloadPolicy(pin_memory=device != "cpu")


def rest_in_ram(parameters: Iterable[nn.Parameter]) -> None:
    """Report to the count of memory that these parameters' shards are in RAM."""
    for parameter in parameters:
        local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        for mode in _counting():
            mode.rest_in_ram(local)


@contextmanager
def stepping() -> Iterator[None]:
    """The context of the optimizer's step, which makes counters in RAM like its other states."""
    with ExitStack() as stack:
        for mode in _counting():
            stack.enter_context(mode.making_in_ram())
        yield


@contextmanager
def simulating() -> Iterator[None]:
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
