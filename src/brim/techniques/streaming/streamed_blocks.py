"""The streamed blocks of a model: they are loaded into slots, and changes of their values are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from brim.memory.backing_store import BackingStore, RamStore
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory
from brim.techniques.blocks import Block
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.ring import Ring


class Carrier(Protocol):
    """Brings blocks, by index, into slots of the compute tier; ``forget`` drops copies that are not in use."""

    def acquire(self, block: int, /) -> Buffer: ...

    def release(self, block: int, /) -> None: ...

    def forget(self, blocks: Collection[int], /) -> None: ...


class StreamedBlocks:
    """The streamed blocks of a model, by index.

    By the index of a block, ``carriers`` has the object that loads it into a slot when its modules are called. For
    blocks without a slot ``gathering`` has the context that binds the parameters to the values, and ``drop_copies``
    the function that drops copies of parts when values were changed at rest. With ``training`` only ``ring`` loads
    blocks. Once ``removed`` is set, the parameters get values of their own again.
    """

    def __init__(
        self, memory: Memory, verify: Callable[[Sequence[str], Sequence[torch.Tensor]], None], *, training: bool
    ) -> None:
        self.memory, self.training, self._verify = memory, training, verify
        self.ring: Ring | None = None
        self.carriers: dict[int, Carrier] = {}
        self.drop_copies: dict[int, Callable[[], None]] = {}
        self.gathering: dict[int, Callable[[StreamedBlock], AbstractContextManager[None]]] = {}
        self.removed = False
        self._blocks: list[StreamedBlock] = []

    def __iter__(self) -> Iterator[StreamedBlock]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> StreamedBlock:
        return self._blocks[index]

    def add(
        self, block: Block, parameters: list[nn.Parameter], store: BackingStore, *, in_pieces: bool = False
    ) -> StreamedBlock:
        """Point the parameters to ``store``. ``in_pieces``: the block is not in one place there."""
        device = self.memory.device
        apart = in_pieces or device.type != "cpu"
        streamed = StreamedBlock(len(self._blocks), block, parameters, store, device, apart, self.memory.fake)
        self._blocks.append(streamed)
        streamed.rest()
        return streamed

    def clear(self) -> None:
        self._blocks.clear()

    # -- loading and releasing

    def enter(self, streamed: StreamedBlock) -> None:
        """Bind the block to its slot until ``leave``. Nested calls count once."""
        if streamed.uses:
            streamed.uses += 1
            return
        carrier = self.carriers[streamed.index]
        self.adopt_changes(streamed)
        streamed.uses = 1
        try:
            slot = carrier.acquire(streamed.index)
        except BaseException:
            streamed.uses = 0
            raise
        try:
            views = streamed.views.get(id(slot))
            if views is None:
                views = streamed.views[id(slot)] = streamed.store.layout.views(slot.tensor)
            self.bind(streamed, views)
        except BaseException:
            streamed.uses = 0
            carrier.release(streamed.index)
            raise

    def bind(self, streamed: StreamedBlock, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters to ``views``, which are verified the first time."""
        if not streamed.verified:
            self._verify(streamed.block.tensors, views)
            streamed.verified = True
        streamed.bind(views)

    def leave(self, streamed: StreamedBlock, *, settle: bool = False) -> None:
        """Release the slot, and save what was changed in it; with ``settle`` wait until it is saved."""
        if streamed.uses == 0:
            return  # entering failed
        streamed.uses -= 1
        if streamed.uses:
            return
        carrier = self.carriers[streamed.index]
        saved = changed = streamed.is_changed()
        stale, streamed.stale = streamed.stale, False
        try:
            if changed:
                saved = False
                self._save(streamed)
                if settle:  # code after this reads or writes the parameters at rest
                    streamed.store.settle()
                saved = True
        finally:  # with a full scratch disk the change is lost, not the slot
            streamed.rest()
            carrier.release(streamed.index)
            if stale or (changed and not saved):
                carrier.forget({streamed.index})

    def _save(self, streamed: StreamedBlock) -> None:
        if not self.training:
            streamed.store.write_back([p.data for p in streamed.parameters])
        else:
            assert self.ring is not None
            self.ring.save(streamed.index)

    def recover(self) -> None:
        """Release the blocks of interrupted calls: nothing is running."""
        for streamed in self._blocks:
            if streamed.uses:
                if streamed.is_changed():  # after the interrupt, before this
                    streamed.store.write_back([p.data for p in streamed.parameters])
                streamed.uses, streamed.stale = 0, False
                streamed.rest()

    # -- changes at rest

    def adopt_changes(self, streamed: StreamedBlock) -> None:
        """Store what was written to the parameters at rest, and drop copies of the old values."""
        if not streamed.uses and streamed.adopt_changes():
            self.drop_copies_of(streamed)

    def drop_copies_of(self, streamed: StreamedBlock) -> None:
        """Drop copies of a block that is not in use, as its values change at rest."""
        if streamed.index in self.carriers:
            self.carriers[streamed.index].forget({streamed.index})
        if streamed.index in self.drop_copies:
            self.drop_copies[streamed.index]()

    def adopt_all_changes(self) -> None:
        for streamed in self._blocks:
            self.adopt_changes(streamed)

    def settle(self) -> None:
        """Wait until all changes are stored. Raises the TransferError of one that failed."""
        for streamed in self._blocks:
            streamed.store.settle()

    # -- updates

    @contextlib.contextmanager
    def updating(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Keep the blocks of ``parameters`` in the compute tier. See ``WeightStreaming.updating``."""
        ids = {id(parameter) for parameter in parameters}
        with contextlib.ExitStack() as stack:
            for streamed in [s for s in self if not ids.isdisjoint(id(p) for p in s.parameters)]:
                stack.enter_context(self._gathered(streamed))
            try:
                yield
            finally:  # fused optimizers leave no trace in the versions
                torch.autograd.graph.increment_version([p for p in parameters if p.requires_grad])

    def rests_in_ram(self, ids: Set[int]) -> bool:
        """Return whether the present values of these parameters are in RAM beside a GPU."""
        blocks = [s for s in self if any(id(p) in ids for p in s.parameters)]
        memory = self.memory
        apart = memory.host is not None and not memory.fake  # in a trace nothing is in RAM
        elsewhere = any((s.uses and s.is_changed()) or s.index in self.gathering for s in blocks)
        streamed = {id(p) for s in blocks for p in s.parameters}
        return apart and not elsewhere and ids <= streamed and all(isinstance(s.store, RamStore) for s in blocks)

    @contextlib.contextmanager
    def updating_at_rest(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Point the parameters, for which ``rests_in_ram`` is true, to RAM, without gradients.

        A step there changes their stored values, and no weight crosses the link.
        """
        ids = {id(parameter) for parameter in parameters}
        blocks = [s for s in self if not ids.isdisjoint(id(p) for p in s.parameters)]
        gradients = [p.grad for p in parameters]
        with contextlib.ExitStack() as stack:
            for parameter in parameters:
                parameter.grad = None  # it must be on the parameter's device
            stack.callback(_set_gradients, parameters, gradients)
            for streamed in blocks:
                stack.enter_context(self._bound_at_rest(streamed))
            try:
                yield
            finally:
                torch.autograd.graph.increment_version([p for p in parameters if p.requires_grad])

    @contextlib.contextmanager
    def _bound_at_rest(self, streamed: StreamedBlock) -> Iterator[None]:
        store = streamed.store
        assert isinstance(store, RamStore)
        in_slot = [p.data for p in streamed.parameters] if streamed.uses else None  # in a backward pass
        if in_slot is None:
            self.adopt_changes(streamed)
            self.drop_copies_of(streamed)
        store.settle_copies()
        self.bind(streamed, [view for view in store.rest() if view is not None])
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

    def _gathered(self, streamed: StreamedBlock) -> contextlib.AbstractContextManager[None]:
        if streamed.index in self.gathering:
            return self.gathering[streamed.index](streamed)
        carried = streamed.index in self.carriers
        return (self._in_slot if carried else self._in_temporary_buffer)(streamed)

    @contextlib.contextmanager
    def _in_slot(self, streamed: StreamedBlock) -> Iterator[None]:
        self.enter(streamed)
        try:
            yield
        finally:
            self.leave(streamed)

    @contextlib.contextmanager
    def _in_temporary_buffer(self, streamed: StreamedBlock) -> Iterator[None]:
        """Load a table that is only used for look-ups, and has no slot, into a separate buffer."""
        self.adopt_changes(streamed)
        memory, store, name = self.memory, streamed.store, streamed.block.name
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


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
