"""Where all experts of a layer rest: each in a backing store of its own, together the layer's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from brim.errors import UnsupportedError
from brim.memory.backing_store import DiskStore, RamStore
from brim.memory.checkpoint_files import TensorSource
from brim.memory.layout import packed_layout
from brim.memory.pool import Buffer
from brim.memory.transfer import Waitable


class ExpertsStore:
    """A BackingStore of parameters [experts, ...] in ``stores`` of one expert each. It is never loaded whole."""

    def __init__(self, sources: Sequence[TensorSource], tier: str) -> None:
        self.stores: list[RamStore | DiskStore] = []
        self.layout, self.tier = packed_layout(sources), tier

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise _one_by_one(label)

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise _one_by_one(label)

    def settle(self) -> None:
        for store in self.stores:
            store.settle()

    def rest(self) -> list[torch.Tensor | None]:
        return [None] * len(self.layout.tensors)

    def value(self, index: int) -> torch.Tensor:
        return torch.stack([store.value(index) for store in self.stores])

    def values(self) -> list[torch.Tensor]:
        return [self.value(index) for index in range(len(self.layout.tensors))]

    def written(self) -> list[bool]:
        return [False] * len(self.layout.tensors)  # nobody sees where they rest

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for number, store in enumerate(self.stores):
            store.write_back([tensor[number] for tensor in tensors])

    def free(self) -> None:
        for store in self.stores:
            if isinstance(store, RamStore):
                store.free()


def _one_by_one(label: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot move {label} to the compute tier as a whole.",
        "Its experts are moved one by one.",
        "Change them with load_state_dict, or call .brim.remove() first.",
    )
