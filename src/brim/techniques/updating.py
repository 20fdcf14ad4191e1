"""Blocks of a fitted module held in place for whoever changes their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from brim.errors import UsageError
from brim.techniques.streamed import Streamed

if TYPE_CHECKING:
    from brim.techniques.weight_streaming import WeightStreaming


@contextlib.contextmanager
def updating(handle: WeightStreaming, what: str | Iterable[nn.Parameter]) -> Iterator[None]:
    """See ``WeightStreaming.updating``."""
    wanted = _wanted(handle, what)
    held = {id(parameter) for parameter in wanted}
    with contextlib.ExitStack() as stack:
        for streamed in [s for s in handle._streamed if not held.isdisjoint(id(p) for p in s.parameters)]:
            stack.enter_context(_held(handle, streamed))
        try:
            yield
        finally:  # fused optimizers leave no trace in the versions
            torch.autograd.graph.increment_version([p for p in wanted if p.requires_grad])


def _wanted(handle: WeightStreaming, what: str | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(what, str):
        named = dict(handle.blocks)
        if what not in named:
            raise UsageError(f"The block {what!r} was to be updated.", f"Known: {', '.join(named)}.")
        return named[what]
    wanted = list(what)
    strange = {id(p) for p in wanted} - {id(p) for p in handle._parameters.values()}
    if strange:
        raise UsageError(f"{len(wanted)} parameters were to be updated.", f"{len(strange)} are not the model's.")
    return wanted


def _held(handle: WeightStreaming, streamed: Streamed) -> contextlib.AbstractContextManager[None]:
    if handle._host is not None and handle._host.has(streamed):
        return handle._host.bound(streamed)
    carried = handle._listed(streamed) is not None or (
        handle._ring is not None and handle._ring.carries(streamed.index)
    )
    return _in_use(handle, streamed) if carried else _as_guest(handle, streamed)


@contextlib.contextmanager
def _in_use(handle: WeightStreaming, streamed: Streamed) -> Iterator[None]:
    handle._enter(streamed)
    try:
        yield
    finally:
        handle._leave(streamed)


@contextlib.contextmanager
def _as_guest(handle: WeightStreaming, streamed: Streamed) -> Iterator[None]:
    """A table that is only looked up from passes through no slot: a buffer of its own, for a while."""
    handle._adopt_changes(streamed)
    engine, home, name = handle.memory.engine, streamed.home, streamed.block.name
    buffer = handle.memory.compute.allocate(home.layout.bytes, f"{name}, being changed")
    try:
        home.load(buffer, name, [engine.mark()]).wait()
        streamed.bind(home.layout.views(buffer.tensor))
        streamed.uses += 1
        try:
            yield
        finally:
            streamed.uses -= 1
            if streamed.is_changed():
                home.save(buffer, name, [engine.mark()])
            streamed.rest()
        home.settle()
    finally:
        buffer.free()
