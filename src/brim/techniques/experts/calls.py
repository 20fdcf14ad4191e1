"""Calls of a layer whose experts are in slots, by the model's own kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brim.accelerator import CUDA
from brim.memory.pool import Buffer
from brim.techniques.base import refuse_gradients
from brim.techniques.experts.cache import ExpertCache
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.offloaded_parameter import reveal
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")  # transformers' implementations that work from slots


def implementation(module: nn.Module) -> str:
    """The name of transformers' implementation for the experts of ``module``."""
    config: Any = module.config
    return getattr(config, "_experts_implementation", None) or "eager"


class ExpertCall:
    """Replaces the forward of a module of fused experts."""

    def __init__(
        self,
        streamed_blocks: StreamedBlocks,
        module: nn.Module,
        streamed: StreamedBlock,
        cache: ExpertCache,
        slots: Buffer,
    ) -> None:
        self.module, self._streamed_blocks, self._streamed, self.cache = module, streamed_blocks, streamed, cache
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._signature = inspect.signature(type(module).forward)
        self._names = list(module._parameters)  # in the order of the slots' tensors
        self._slots, self._slot_bytes = slots, slots.bytes // cache.size

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            refuse_gradients(
                [*args, *kwargs.values(), *self._streamed.parameters],
                f"Cannot compute gradients through {self._streamed.block.name}, whose experts are cached.",
                "Cached experts are for inference only.",
                "Run the model under torch.no_grad(), or fit it for training.",
            )
        self._streamed_blocks.adopt_changes(self._streamed)
        bound = self._signature.bind(self.module, *args, **kwargs)
        hidden, index, weights = list(bound.arguments.values())[1:4]
        shares = shares_of(index, self.module.num_experts)  # type: ignore[arg-type]
        resident = self.cache.resident
        self.cache.usage.visit(shares)
        self.cache.expect(shares)
        try:
            if implementation(self.module) == "eager":
                return self._one_by_one(hidden, index, weights)
            return self._together(sorted(shares, key=lambda e: e not in resident), hidden, index, weights)
        finally:
            self.cache.end_call()

    # -- kernels that compute experts one by one

    def _one_by_one(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run the module's own loop over experts, which loads each expert when it reads its parameters."""
        lookup = _Lookup(self.cache, self._tensor)
        for position, name in enumerate(self._names):
            vars(self.module)[name] = _Rows(lookup, position, getattr(self.module, name))
        try:
            return self._forward(hidden, index, weights)
        finally:
            lookup.end()
            for name in self._names:
                vars(self.module).pop(name, None)

    def _tensor(self, slot: int, expert: int, position: int) -> torch.Tensor:
        layout = self.cache.stores[expert].layout
        return layout.views(self._slots.tensor[slot * self._slot_bytes :][: self._slot_bytes])[position]

    # -- kernels that compute many experts at once

    def _together(
        self, experts: list[int], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute with all experts in slots at once, or in groups of as many as there are slots."""
        if len(experts) <= self.cache.size:
            with self._acquired(experts) as table:
                return self._forward(hidden, _on_device(table, index.device)[index], weights)
        pairs = index.reshape(-1)  # (tokens * chosen,): each token with each of its experts
        chosen, unweighted = index.shape[-1], None
        for begin in range(0, len(experts), self.cache.size):
            with self._acquired(experts[begin : begin + self.cache.size]) as table:
                slots = _on_device(table, index.device)[pairs]
                (rows,) = torch.nonzero(slots >= 0, as_tuple=True)
                if rows.numel() == 1 and implementation(self.module) == "batched_mm":
                    rows = rows.expand(2)  # a batch of one row would run another kernel
                part = hidden[torch.div(rows, chosen, rounding_mode="floor")]
                # With weights of 1 and a sum over one expert: the result of each pair without further rounding.
                done = self._forward(part, slots[rows][:, None], torch.ones_like(part[:, :1]))
                unweighted = hidden.new_empty(pairs.numel(), done.shape[-1]) if unweighted is None else unweighted
                unweighted[rows] = done
        assert unweighted is not None
        weighted = unweighted * weights.reshape(-1)[:, None]
        return weighted.view(hidden.shape[0], chosen, -1).sum(dim=1).to(hidden.dtype)

    @contextmanager
    def _acquired(self, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """Bind the parameters to the slots within, ``num_experts`` to their number. Gives expert -> slot or -1."""
        table = torch.full((self.module.num_experts,), -1, dtype=torch.long)  # type: ignore[arg-type]
        acquired: list[int] = []
        before = self.module.num_experts
        try:
            for expert in experts:
                table[expert] = self.cache.acquire(expert)
                acquired.append(expert)
            for parameter, view in zip(self._streamed.parameters, self._over_slots(), strict=True):
                reveal(parameter, view)
            self.module.num_experts = self.cache.size  # type: ignore[assignment]
            yield table
        finally:
            self.module.num_experts = before
            self._streamed.rest()
            for expert in acquired:
                self.cache.release(expert)

    def _over_slots(self) -> list[torch.Tensor]:
        """Each parameter over all slots: [slots, ...]."""
        slots, views = self._slots.tensor, []
        with torch.inference_mode(False):
            for placed in self.cache.stores[0].layout.tensors:
                size = placed.dtype.itemsize
                flat = slots[: slots.numel() // size * size].view(placed.dtype)
                on_meta = torch.empty(placed.shape, device="meta")
                stride = (self._slot_bytes // size, *on_meta.stride())
                shape = (self.cache.size, *placed.shape)
                views.append(flat.as_strided(shape, stride, placed.offset // size))
        return views


@dataclass(eq=False)
class _Lookup:
    """The current expert of a loop, in use until the loop reads another."""

    _cache: ExpertCache
    _tensor: Callable[[int, int, int], torch.Tensor]
    _expert: int | None = None
    _slot: int = 0

    def get(self, expert: int, position: int) -> torch.Tensor:
        if expert != self._expert:
            self.end()
            self._slot = self._cache.acquire(expert)
            self._expert = expert
        return self._tensor(self._slot, expert, position)

    def end(self) -> None:
        if self._expert is not None:
            expert, self._expert = self._expert, None
            self._cache.release(expert)


class _Rows:
    """Replaces a parameter [experts, ...] whose rows are read one by one."""

    def __init__(self, lookup: _Lookup, position: int, parameter: nn.Parameter) -> None:
        self._lookup, self._position = lookup, position
        self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self._lookup.get(int(expert), self._position)


def _on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``table`` to the device from pinned memory. From pageable memory the host would wait for all queued work,
    with the loads of experts."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == CUDA else table.to(device)


def shares_of(index: torch.Tensor, count: int) -> dict[int, float]:
    """The chosen experts, in ascending order, with the share of tokens that chose each."""
    uses = torch.bincount(index.reshape(-1), minlength=count)[:count].tolist()
    tokens = max(1, index.shape[0])
    return {expert: number / tokens for expert, number in enumerate(uses) if number}
