"""A streamed block: its parameters, its backing store and the changes that users make to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.memory.backing_store import BackingStore
from brim.techniques.blocks import Block
from brim.techniques.streaming.offloaded_parameter import hollow, offload, reveal


@dataclass
class StreamedBlock:
    """A block of weights that are moved together.

    ``device`` is the compute device, ``apart`` is set where blocks rest elsewhere; ``uses`` counts the running calls
    that need the block. ``on_write`` is called when a parameter at rest was written to. ``stale``: the slot holds an
    old copy, as the block was changed at rest while in use. ``fake``: parameters have no values and stay where they
    are at rest; only their versions show a change.
    """

    index: int
    block: Block
    parameters: list[nn.Parameter]
    store: BackingStore
    device: torch.device
    apart: bool = False
    fake: bool = False
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by slot
    versions: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    uses: int = 0
    stale: bool = False
    verified: bool = False
    on_write: Callable[[StreamedBlock], None] | None = None
    _hollows: dict[int, torch.Tensor] = field(default_factory=dict)  # cached: each takes a kernel

    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters to the block in a slot."""
        for parameter, view in zip(self.parameters, views, strict=True):
            reveal(parameter, view)
        self.versions = [p._version for p in self.parameters]

    def is_changed(self) -> bool:
        """Return whether the block was written to since ``bind``."""
        return [p._version for p in self.parameters] != self.versions

    def rest(self) -> None:
        """Point the parameters to the memory in which the block rests."""
        if not self.fake:
            for index, (parameter, view) in enumerate(zip(self.parameters, self.store.rest(), strict=True)):
                # On another device a view of RAM would make the module look as if it were on the CPU.
                if view is None or self.apart:
                    offload(parameter, self._hollow(index), _ParameterAtRest(weakref.ref(self), index))
                else:
                    reveal(parameter, view)
        with torch._C.DisableTorchFunctionSubclass():
            self.addresses = [] if self.fake else [p.data_ptr() for p in self.parameters]
            self.versions = [p._version for p in self.parameters]

    def forget(self) -> None:
        """Drop all tensors on the device, even if the handle lives on."""
        self.views.clear()
        self._hollows.clear()

    def _hollow(self, index: int) -> torch.Tensor:
        if index not in self._hollows:
            self._hollows[index] = hollow(self.parameters[index], self.device)
        return self._hollows[index]

    def is_hollow(self, index: int) -> bool:
        """Return whether a parameter has no readable memory: it rests in pieces, or on another device."""
        if self.uses or self.fake:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameters[index].data_ptr() != self.addresses[index]:
                return False
        return self.apart or self.store.rest()[index] is None

    def index_at(self, byte: int) -> int | None:
        """The index of the block's tensor at offset ``byte`` of its slot, or None."""
        for index, placed in enumerate(self.store.layout.tensors):
            if placed.offset <= byte < placed.offset + placed.bytes:
                return index
        return None

    def untouched(self) -> list[bool]:
        """Return for each parameter at rest True if it is unchanged since ``rest``."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.fake:
                return [p._version == version for p, version in zip(self.parameters, self.versions, strict=True)]
            # Apart from their values they point to nothing that could be written to.
            written = [False] * len(self.parameters) if self.apart else self.store.written()
            marks = zip(self.parameters, self.versions, self.addresses, written, strict=True)
            return [p._version == v and p.data_ptr() == address and not w for p, v, address, w in marks]

    def value(self, index: int) -> torch.Tensor:
        """The present values of a tensor of the block, copied to the CPU."""
        self.store.settle()
        # Pages of a mapping that are read stay in the resident set, so what rests in a file is read from the file.
        if self.is_hollow(index) or (not self.uses and not self.fake and self.untouched()[index]):
            return self.store.value(index)
        return self.parameters[index].detach().to("cpu", copy=True)

    def values(self) -> list[torch.Tensor]:
        untouched = self.untouched()
        stored = self.store.values() if any(untouched) else self.parameters
        pairs = zip(untouched, stored, self.parameters, strict=True)
        return [value if same else p.data.clone() for same, value, p in pairs]

    def adopt_changes(self) -> bool:
        """Store what the user wrote to parameters at rest (in place, ``p.data = ...``).

        Returns whether anything was written. Raises UnsupportedError for values of another shape or dtype.
        """
        untouched = self.untouched()
        if all(untouched):
            return False
        for parameter, placed in zip(self.parameters, self.store.layout.tensors, strict=True):
            if (parameter.dtype, tuple(parameter.shape)) != (placed.dtype, placed.shape):
                raise UnsupportedError(
                    f"The data of {placed.name} was replaced by a tensor of shape {list(parameter.shape)}, "
                    f"{parameter.dtype}.",
                    f"The weight is streamed with shape {list(placed.shape)}, {placed.dtype}.",
                    "Call .brim.remove() first, change it, and fit the module again.",
                )
        self.store.write_back(
            [
                self.store.value(index) if same and self.is_hollow(index) else self.parameters[index].data
                for index, same in enumerate(untouched)
            ]
        )
        self.rest()
        return True


class _ParameterAtRest:
    """The values of a parameter at rest (``offloaded_parameter.ParameterBacking``).

    It refers to its block weakly: the garbage collector does not see what tensors hold.
    """

    def __init__(self, streamed: weakref.ref[StreamedBlock], index: int) -> None:
        self._reference, self._index = streamed, index

    @property
    def _streamed(self) -> StreamedBlock:
        streamed = self._reference()
        if streamed is None:
            raise UnsupportedError(
                "Cannot use a weight of a module that was fitted by brim.",
                "The module is gone, and with it the memory that held the weight.",
                "Keep the module, or call .brim.remove() before deleting it.",
            )
        return streamed

    def value(self) -> torch.Tensor:
        streamed = self._streamed
        return streamed.store.value(self._index).to(streamed.device)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        streamed = self._streamed
        streamed.store.settle()  # a save may be pending
        table, row_ids = streamed.store.rest()[self._index], ids.to("cpu")
        if table is None:
            table = streamed.store.value(self._index)
        return nn.functional.embedding(row_ids, table).to(streamed.device)

    def scale(self, factor: torch.Tensor) -> None:
        value = self.value()
        self.replace(value.mul_(factor.to(value.device)))

    def replace(self, value: torch.Tensor) -> None:
        streamed = self._streamed
        reveal(streamed.parameters[self._index], value)
        if streamed.on_write is not None:
            streamed.on_write(streamed)
