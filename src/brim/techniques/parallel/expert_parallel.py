"""Experts over ranks: each data-parallel rank has some of a layer's experts, and computes them for all ranks' tokens.

Lepikhin et al., arXiv 2006.16668. Tokens go to where their experts are by an all-gather of hidden states, and what
experts make of them comes back by a reduce-scatter, as Megatron-LM's ``allgather`` token dispatcher does it
(megatron/core/transformer/moe/token_dispatcher.py). So no token is dropped and no size depends on what others have
chosen. Between the two, transformers' own forward computes a rank's experts, on the rows that are theirs only.

An expert's gradient is the sum over all ranks' tokens, where FSDP2 gives others the mean over ranks: ``settle``
divides it.
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
    """Keep of each layer of experts in ``block``, in place, those of this rank on ``mesh`` (one axis) only.

    ``dtype``: what weights compute in, their own type where it is None. Raises UsageError where experts do not
    divide, UnsupportedError for experts in a list of modules.
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
    """The handle: the experts of one block on this rank."""

    def __init__(self, experts: list[_Experts], ranks: int) -> None:
        self._experts, self._ranks = experts, ranks

    def parameters(self) -> Iterator[nn.Parameter]:
        """What no other rank has."""
        for experts in self._experts:
            yield from experts.module.parameters(recurse=False)

    def settle(self) -> None:
        """To be called once all gradients of a step are there: sums over ranks become means, as others are. Experts
        that nothing went to have gradients of zero, as where all are in one tensor."""
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().div_(self._ranks)
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class _Experts:
    """Stands in an experts module's instance for its forward."""

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
        """Of hidden states (tokens, hidden), the experts chosen for each token and their weights (tokens, k)."""
        hidden = gathered(hidden_states, self._group)
        index = _choices(top_k_index, self._group)
        weights = gathered(top_k_weights, self._group)
        with torch.no_grad():
            mine = (index >= self._first) & (index < self._first + self._count)
            token, slot = mine.nonzero(as_tuple=True)
            own = (index[token, slot] - self._first)[:, None]
        rows, shares = hidden[token], weights[token, slot][:, None]
        # No rows: nothing to compute, but what is backwards of them sends as it does on all other ranks.
        computed = self._computed(rows, own, shares) if len(token) else rows * shares
        return scattered(torch.zeros_like(hidden).index_add(0, token, computed), self._group)

    def _computed(self, *given: torch.Tensor) -> torch.Tensor:
        """transformers' forward on this rank's shares as plain tensors."""
        parameters = self.module._parameters
        whole = dict(parameters)
        try:
            for name, parameter in whole.items():
                if isinstance(parameter, DTensor):
                    share: Any = parameter.to_local()
                    parameters[name] = share if self._dtype is None else share.to(self._dtype)
            output: torch.Tensor = self._forward(*given)
            return output
        finally:
            parameters.update(whole)


def _choices(index: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' choices of experts. Ranks that are not there (``sharding.alone``) choose as this one does."""
    if dist.get_backend(group) == "fake":
        return index.repeat(group.size(), 1)
    return gathered(index, group)
