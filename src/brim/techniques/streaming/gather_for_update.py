"""Blocks of a fitted module held in place for code that changes their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

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
