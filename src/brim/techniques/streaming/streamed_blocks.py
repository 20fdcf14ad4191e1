"""The blocks of one model that come and go: what is asked to bring each, and what becomes of changes to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from brim.memory.backing_store import BackingStore
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory
from brim.techniques.blocks import Block
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.ring import Ring


class Carrier(Protocol):
    """Brings blocks into slots of the compute tier, each by its index. ``forget``: copies that are not in use."""

    def acquire(self, block: int, /) -> Buffer: ...

    def release(self, block: int, /) -> None: ...

    def forget(self, blocks: Collection[int], /) -> None: ...


class StreamedBlocks:
    """All of a model's ``Streamed``, in the order of their indexes.

    ``carriers`` has, by index, what brings a block when its modules are called. Of blocks that come in another way
    ``drop_copies`` has what is to be called when their values were changed where they rest. With ``training`` only
    ``ring`` brings blocks. Once ``removed`` is set, the parameters get values of their own again.
    """

    def __init__(
        self, memory: Memory, verify: Callable[[Sequence[str], Sequence[torch.Tensor]], None], *, training: bool
    ) -> None:
        self.memory, self.training, self._verify = memory, training, verify
        self.ring: Ring | None = None
        self.carriers: dict[int, Carrier] = {}
        self.drop_copies: dict[int, Callable[[], None]] = {}
        self.removed = False
        self._blocks: list[Streamed] = []

    def __iter__(self) -> Iterator[Streamed]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Streamed:
        return self._blocks[index]

    def add(
        self, block: Block, parameters: list[nn.Parameter], store: BackingStore, *, in_pieces: bool = False
    ) -> Streamed:
        """From now on the parameters are where the block rests. ``in_pieces``: nowhere is it as a whole."""
        device = self.memory.device
        apart = in_pieces or device.type != "cpu"
        streamed = Streamed(len(self._blocks), block, parameters, store, device, apart, self.memory.fake)
        self._blocks.append(streamed)
        streamed.rest()
        return streamed

    def clear(self) -> None:
        self._blocks.clear()

    # -- coming and going

    def enter(self, streamed: Streamed) -> None:
        """Have the block in its slot until ``leave``. Calls within calls count once."""
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

    def bind(self, streamed: Streamed, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters to the block's values, which are verified the first time."""
        if not streamed.verified:
            self._verify(streamed.block.tensors, views)
            streamed.verified = True
        streamed.bind(views)

    def leave(self, streamed: Streamed, *, settle: bool = False) -> None:
        """What was changed may still be on its way when this returns, unless ``settle`` is asked."""
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
                if settle:  # code that reads or writes the parameters next does so where they rest
                    streamed.store.settle()
                saved = True
        finally:  # a full scratch disk loses the change, not the slot
            streamed.rest()
            carrier.release(streamed.index)
            if stale or (changed and not saved):
                carrier.forget({streamed.index})

    def _save(self, streamed: Streamed) -> None:
        """What the user changed while the block was in use becomes its values."""
        if not self.training:
            streamed.store.write_back([p.data for p in streamed.parameters])
        else:
            assert self.ring is not None
            self.ring.save(streamed.index)

    def let_go(self) -> None:
        """Nothing is running: what still counts as in use was interrupted."""
        for streamed in self._blocks:
            if streamed.uses:
                if streamed.is_changed():  # after the interrupt, before this
                    streamed.store.write_back([p.data for p in streamed.parameters])
                streamed.uses, streamed.stale = 0, False
                streamed.rest()

    # -- changes at rest

    def adopt_changes(self, streamed: Streamed) -> None:
        """What was written to the parameters at rest becomes the block's values; copies of the old ones go."""
        if not streamed.uses and streamed.adopt_changes():
            self.drop_copies_of(streamed)

    def drop_copies_of(self, streamed: Streamed) -> None:
        """Of a block that is not in use, and whose values change where they rest."""
        if streamed.index in self.carriers:
            self.carriers[streamed.index].forget({streamed.index})
        if streamed.index in self.drop_copies:
            self.drop_copies[streamed.index]()

    def adopt_all_changes(self) -> None:
        for streamed in self._blocks:
            self.adopt_changes(streamed)

    def settle(self) -> None:
        """Wait until everything that was changed is where it rests. Raises the TransferError that was met."""
        for streamed in self._blocks:
            streamed.store.settle()
