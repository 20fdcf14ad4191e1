"""Where all experts of a layer rest: each in a home of its own, together the layer's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from brim.errors import UnsupportedError
from brim.memory.backing_store import DiskHome, RamHome
from brim.memory.checkpoint_files import TensorSource
from brim.memory.layout import packed_layout
from brim.memory.pool import Buffer
from brim.memory.transfer import Waitable


class ExpertsHome:
    """A Home of parameters [experts, ...] in ``homes`` of one expert each. It is never loaded whole."""

    def __init__(self, sources: Sequence[TensorSource], tier: str) -> None:
        self.homes: list[RamHome | DiskHome] = []
        self.layout, self.tier = packed_layout(sources), tier

    def stage(self) -> bool:
        return True

    def load(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise _one_by_one(label)

    def save(self, slot: Buffer, label: str, after: Sequence[Waitable]) -> Waitable:
        raise _one_by_one(label)

    def settle(self) -> None:
        for home in self.homes:
            home.settle()

    def rest(self) -> list[torch.Tensor | None]:
        return [None] * len(self.layout.tensors)

    def value(self, index: int) -> torch.Tensor:
        return torch.stack([home.value(index) for home in self.homes])

    def values(self) -> list[torch.Tensor]:
        return [self.value(index) for index in range(len(self.layout.tensors))]

    def written(self) -> list[bool]:
        return [False] * len(self.layout.tensors)  # nobody sees where they rest

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        for number, home in enumerate(self.homes):
            home.write_back([tensor[number] for tensor in tensors])

    def free(self) -> None:
        for home in self.homes:
            if isinstance(home, RamHome):
                home.free()


def _one_by_one(label: str) -> UnsupportedError:
    return UnsupportedError(
        f"{label} was to be brought to the compute tier as a whole.",
        "Its experts come one by one.",
        "Change them with load_state_dict, or call .brim.remove() first.",
    )
