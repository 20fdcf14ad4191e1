"""One layer's call with its experts in slots: the model's own kernels, given what they would have found in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from brim.accelerator import CUDA
from brim.errors import UnsupportedError
from brim.memory.pool import Buffer
from brim.techniques.experts.cache import ExpertCache
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.offloaded_parameter import reveal
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")  # of transformers, that are known to work from slots


def implementation(module: nn.Module) -> str:
    """Which of transformers' kernels compute the experts of ``module``."""
    config: Any = module.config
    return getattr(config, "_experts_implementation", None) or "eager"


class ExpertCall:
    """Stands for the forward of one module of fused experts."""

    def __init__(
        self,
        streamed_blocks: StreamedBlocks,
        module: nn.Module,
        streamed: Streamed,
        cache: ExpertCache,
        slots: Buffer,
    ) -> None:
        self.module, self._streamed_blocks, self._streamed, self._cache = module, streamed_blocks, streamed, cache
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._signature = inspect.signature(type(module).forward)
        self._own = list(module._parameters)  # the names, in the order of the slots' tensors
        self._slots, self._slot_bytes = slots, slots.bytes // cache.size

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
        self._streamed_blocks.adopt_changes(self._streamed)
        bound = self._signature.bind(self.module, *args, **kwargs)
        hidden, index, weights = list(bound.arguments.values())[1:4]
        shares = shares_of(index, self.module.num_experts)  # type: ignore[arg-type]
        there = self._cache.held
        self._cache.usage.visit(shares)
        self._cache.expect(shares)
        try:
            if implementation(self.module) == "eager":
                return self._one_by_one(hidden, index, weights)
            return self._together(sorted(shares, key=lambda e: e not in there), hidden, index, weights)
        finally:
            self._cache.done()

    # -- kernels that take one expert after another

    def _one_by_one(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The module's own loop over experts: each is looked up when the loop comes to it."""
        lookup = _Lookup(self._cache, self._tensor)
        for position, name in enumerate(self._own):
            vars(self.module)[name] = _Rows(lookup, position, getattr(self.module, name))
        try:
            return self._forward(hidden, index, weights)
        finally:
            lookup.end()
            for name in self._own:
                vars(self.module).pop(name, None)

    def _tensor(self, slot: int, expert: int, position: int) -> torch.Tensor:
        """The expert's part of a parameter, where it is in its slot."""
        layout = self._cache.stores[expert].layout
        return layout.views(self._slots.tensor[slot * self._slot_bytes :][: self._slot_bytes])[position]

    # -- kernels that take many experts as one tensor

    def _together(
        self, experts: list[int], hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """All of them in slots at once; where they are more than the slots, as many at a time as there are."""
        if len(experts) <= self._cache.size:
            with self._acquired(experts) as table:
                return self._forward(hidden, _sent(table, index.device)[index], weights)
        pairs = index.reshape(-1)  # (tokens * chosen,): each token with each of its experts
        chosen, unweighted = index.shape[-1], None
        for begin in range(0, len(experts), self._cache.size):
            with self._acquired(experts[begin : begin + self._cache.size]) as table:
                slots = _sent(table, index.device)[pairs]
                (rows,) = torch.nonzero(slots >= 0, as_tuple=True)
                if rows.numel() == 1 and implementation(self.module) == "batched_mm":
                    rows = rows.expand(2)  # a batch of one would be another kernel
                part = hidden[torch.div(rows, chosen, rounding_mode="floor")]
                # Unweighted, and a sum over one: what the kernels made of each pair, with no rounding after it.
                done = self._forward(part, slots[rows][:, None], torch.ones_like(part[:, :1]))
                unweighted = hidden.new_empty(pairs.numel(), done.shape[-1]) if unweighted is None else unweighted
                unweighted[rows] = done
        assert unweighted is not None
        weighted = unweighted * weights.reshape(-1)[:, None]
        return weighted.view(hidden.shape[0], chosen, -1).sum(dim=1).to(hidden.dtype)

    @contextmanager
    def _acquired(self, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        """Within, the parameters are the slots, and ``num_experts`` is their number. Gives expert -> slot or -1."""
        table = torch.full((self.module.num_experts,), -1, dtype=torch.long)  # type: ignore[arg-type]
        acquired: list[int] = []
        before = self.module.num_experts
        try:
            for expert in experts:
                table[expert] = self._cache.acquire(expert)
                acquired.append(expert)
            for parameter, view in zip(self._streamed.parameters, self._as_one(), strict=True):
                reveal(parameter, view)
            self.module.num_experts = self._cache.size  # type: ignore[assignment]
            yield table
        finally:
            self.module.num_experts = before
            self._streamed.rest()
            for expert in acquired:
                self._cache.release(expert)

    def _as_one(self) -> list[torch.Tensor]:
        """Each parameter over all slots: [slots, ...]."""
        whole, views = self._slots.tensor, []
        with torch.inference_mode(False):
            for placed in self._cache.stores[0].layout.tensors:
                size = placed.dtype.itemsize
                flat = whole[: whole.numel() // size * size].view(placed.dtype)
                on_meta = torch.empty(placed.shape, device="meta")
                stride = (self._slot_bytes // size, *on_meta.stride())
                shape = (self._cache.size, *placed.shape)
                views.append(flat.as_strided(shape, stride, placed.offset // size))
        return views

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [*args, *kwargs.values(), *self._streamed.parameters]
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            raise UnsupportedError(
                f"Cannot compute gradients through {self._streamed.block.name}, whose experts are cached.",
                "Cached experts are for inference only.",
                "Run the model under torch.no_grad(), or fit it for training.",
            )


class _Lookup:
    """The expert that a loop is at: it stays in use until the loop asks for another."""

    def __init__(self, cache: ExpertCache, tensor: Callable[[int, int, int], torch.Tensor]) -> None:
        self._cache, self._tensor = cache, tensor
        self._expert: int | None = None
        self._slot = 0

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
    """Stands for a parameter [experts, ...] whose rows are taken one by one."""

    def __init__(self, lookup: _Lookup, position: int, parameter: nn.Parameter) -> None:
        self._lookup, self._position = lookup, position
        self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self._lookup.get(int(expert), self._position)


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``table`` on the device. Out of pageable memory the host would wait for all that the stream waits for first,
    and the experts that are on their way are among that."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == CUDA else table.to(device)


def shares_of(index: torch.Tensor, count: int) -> dict[int, float]:
    """Of the experts that were chosen, in ascending order: the share of tokens that chose each."""
    uses = torch.bincount(index.reshape(-1), minlength=count)[:count].tolist()
    tokens = max(1, index.shape[0])
    return {expert: number / tokens for expert, number in enumerate(uses) if number}
