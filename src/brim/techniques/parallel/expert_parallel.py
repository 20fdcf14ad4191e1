"""Expert parallelism: each data-parallel rank computes some of a layer's experts for all ranks' tokens.

Lepikhin et al., arXiv 2006.16668. Hidden states are all-gathered, and the experts' outputs reduce-scattered, as in
Megatron-LM's ``allgather`` token dispatcher (megatron/core/transformer/moe/token_dispatcher.py). So no token is
dropped and no size depends on the choices of other ranks' routers. In between, transformers' own forward computes a
rank's experts on their rows only.

An expert's gradient is the sum over all ranks' tokens, where FSDP2 gives other weights the mean over ranks:
``settle`` divides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from brim.errors import UnsupportedError, UsageError
from brim.techniques.experts.technique import find_experts
from brim.techniques.parallel.collectives import gathered, scattered


def apply(block: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Spread:
    """Reduce each layer of experts in ``block``, in place, to those of this rank on ``mesh`` (one axis).

    ``dtype`` is that of computation, None for that of the weights. Raises UsageError if experts do not divide,
    UnsupportedError for experts in a list of modules.
    """
    experts = []
    for layer in find_experts(block):
        if layer.modules:
            raise UnsupportedError(
                f"Cannot spread the experts {layer.path} over {mesh.size()} ranks.",
                "They are a list of modules, not tensors of all experts.", "Leave out --ep.",
            )  # fmt: skip
        if layer.count % mesh.size():
            raise UsageError(
                f"Cannot spread the {layer.count} experts of {layer.path} over {mesh.size()} ranks.",
                "The number of experts is not a multiple of the ranks.",
            )
        experts.append(_Experts(block.get_submodule(layer.path), mesh, dtype))
    return Spread(experts, mesh.size())


class Spread:
    """The handle: the experts of a block on this rank."""

    def __init__(self, experts: list[_Experts], ranks: int) -> None:
        self._experts, self._ranks = experts, ranks

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of experts, which no other rank has."""
        for experts in self._experts:
            yield from experts.module.parameters(recurse=False)

    def settle(self) -> None:
        """Turn the complete gradients of a step from sums over ranks into means. Experts without tokens get gradients
        of zero, as if all experts were in a single tensor."""
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().div_(self._ranks)
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class _Experts:
    """Replaces the forward of an experts module's instance."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.module, self._dtype = module, dtype
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        own: Any = module
        self._count = own.num_experts // self._ranks
        self._first = mesh.get_local_rank() * self._count
        own.num_experts = self._count
        for name, parameter in module.named_parameters(recurse=False):
            share = parameter.detach()[self._first : self._first + self._count].clone()
            placed = DTensor.from_local(share, mesh, [Shard(0)], run_check=False)
            module._parameters[name] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        self._forward = module.forward
        vars(module)["forward"] = self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The output for hidden states (tokens, hidden), with each token's experts and their weights (tokens, k)."""
        hidden = gathered(hidden_states, self._group)
        index = _choices(top_k_index, self._group)
        weights = gathered(top_k_weights, self._group)
        with torch.no_grad():
            mine = (index >= self._first) & (index < self._first + self._count)
            token, slot = mine.nonzero(as_tuple=True)
            own = (index[token, slot] - self._first)[:, None]
        rows, shares = hidden[token], weights[token, slot][:, None]
        # Without rows nothing is computed, but backward must send as on all other ranks.
        computed = self._computed(rows, own, shares) if len(token) else rows * shares
        return scattered(torch.zeros_like(hidden).index_add(0, token, computed), self._group)

    def _computed(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Call transformers' forward with this rank's shares as plain tensors."""
        parameters = self.module._parameters
        sharded = dict(parameters)
        try:
            for name, parameter in sharded.items():
                if isinstance(parameter, DTensor):
                    share: Any = parameter.to_local()
                    parameters[name] = share if self._dtype is None else share.to(self._dtype)
            output: torch.Tensor = self._forward(*inputs)
            return output
        finally:
            parameters.update(sharded)


def _choices(index: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' choices of experts. In a fake process group all ranks choose the same."""
    if dist.get_backend(group) == "fake":
        return index.repeat(group.size(), 1)
    return gathered(index, group)
