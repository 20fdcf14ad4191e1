"""Blocks of a fitted module held in place for code that changes their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Set

import torch
from torch import nn

from brim.memory.backing_store import RamStore
from brim.techniques.cpu_compute.technique import HostCompute
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.streamed_blocks import StreamedBlocks


@contextlib.contextmanager
def updating(
    streamed_blocks: StreamedBlocks, host: HostCompute | None, parameters: Sequence[nn.Parameter]
) -> Iterator[None]:
    """Within, the blocks of ``parameters`` are where they are computed. See ``WeightStreaming.updating``."""
    ids = {id(parameter) for parameter in parameters}
    with contextlib.ExitStack() as stack:
        for streamed in [s for s in streamed_blocks if not ids.isdisjoint(id(p) for p in s.parameters)]:
            stack.enter_context(_held(streamed_blocks, host, streamed))
        try:
            yield
        finally:  # fused optimizers leave no trace in the versions
            torch.autograd.graph.increment_version([p for p in parameters if p.requires_grad])


def rests_in_ram(streamed_blocks: StreamedBlocks, host: HostCompute | None, ids: Set[int]) -> bool:
    """Whether the blocks of these parameters lie in RAM beside a GPU, as they are."""
    blocks = [s for s in streamed_blocks if any(id(p) in ids for p in s.parameters)]
    memory = streamed_blocks.memory
    apart = memory.host is not None and not memory.fake  # in a trace nothing is in RAM
    elsewhere = any((s.uses and s.is_changed()) or (host is not None and host.has(s)) for s in blocks)
    streamed = {id(p) for s in blocks for p in s.parameters}
    return apart and not elsewhere and ids <= streamed and all(isinstance(s.store, RamStore) for s in blocks)


@contextlib.contextmanager
def updating_at_rest(streamed_blocks: StreamedBlocks, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, the parameters, which ``rests_in_ram`` is true of, point to where they rest, and have no gradients.

    So what steps them in RAM changes them for good, and no weight crosses the link.
    """
    ids = {id(parameter) for parameter in parameters}
    blocks = [s for s in streamed_blocks if not ids.isdisjoint(id(p) for p in s.parameters)]
    gradients = [p.grad for p in parameters]
    with contextlib.ExitStack() as stack:
        for parameter in parameters:
            parameter.grad = None  # which must be where the parameter is
        stack.callback(_give_back, parameters, gradients)
        for streamed in blocks:
            stack.enter_context(_where_it_rests(streamed_blocks, streamed))
        try:
            yield
        finally:
            torch.autograd.graph.increment_version([p for p in parameters if p.requires_grad])


def _give_back(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@contextlib.contextmanager
def _where_it_rests(streamed_blocks: StreamedBlocks, streamed: Streamed) -> Iterator[None]:
    store = streamed.store
    assert isinstance(store, RamStore)
    in_slot = [p.data for p in streamed.parameters] if streamed.uses else None  # in a backward pass, which is over it
    if in_slot is None:
        streamed_blocks.adopt_changes(streamed)
        streamed_blocks.drop_copies_of(streamed)
    store.settle_copies()
    streamed_blocks.bind(streamed, [view for view in store.rest() if view is not None])
    streamed.uses += 1
    try:
        yield
    finally:
        streamed.uses -= 1
        store.write_back([p.data for p in streamed.parameters])
        if in_slot is None:
            streamed.rest()
        else:
            streamed.bind(in_slot)
            streamed.stale = True


def _held(
    streamed_blocks: StreamedBlocks, host: HostCompute | None, streamed: Streamed
) -> contextlib.AbstractContextManager[None]:
    if host is not None and host.has(streamed):
        return host.bound(streamed)
    carried = streamed.index in streamed_blocks.carriers
    return (_in_use if carried else _as_guest)(streamed_blocks, streamed)


@contextlib.contextmanager
def _in_use(streamed_blocks: StreamedBlocks, streamed: Streamed) -> Iterator[None]:
    streamed_blocks.enter(streamed)
    try:
        yield
    finally:
        streamed_blocks.leave(streamed)


@contextlib.contextmanager
def _as_guest(streamed_blocks: StreamedBlocks, streamed: Streamed) -> Iterator[None]:
    """A table that is only looked up from passes through no slot: a buffer of its own, for a while."""
    streamed_blocks.adopt_changes(streamed)
    memory, store, name = streamed_blocks.memory, streamed.store, streamed.block.name
    buffer = memory.compute.allocate(store.layout.bytes, f"{name}, being changed")
    try:
        store.load(buffer, name, [memory.engine.mark()]).wait()
        streamed.bind(store.layout.views(buffer.tensor))
        streamed.uses += 1
        try:
            yield
        finally:
            streamed.uses -= 1
            if streamed.is_changed():
                store.save(buffer, name, [memory.engine.mark()])
            streamed.rest()
        store.settle()
    finally:
        buffer.free()
