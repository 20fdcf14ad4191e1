"""One rank of a job whose other ranks do not exist: what it asks of them is answered as if they did the same.

Collectives over NCCL are the device's affair: there every rank holds what this one does. Here are the store, in which
ranks leave each other notes, and process groups of CPUs, which would connect to one another.
Source: ``torch/distributed/distributed_c10d.py`` (``_new_process_group_helper``), ``rendezvous.py``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

_NCCL_ID_BYTES = 128
_Store: Any = vars(distributed)["Store"]  # absent where PyTorch was built without distributed


class LoneStore(_Store):  # type: ignore[misc]  # its type is not known
    """Keeps what this rank writes, and answers at once what others would have written."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._kept: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        self._kept[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key in self._kept:
            return self._kept[key]
        return str(self._counts[key]).encode() if key in self._counts else bytes([7]) * _NCCL_ID_BYTES

    def add(self, key: str, amount: int) -> int:
        """All ranks do the same at once."""
        self._counts[key] = self._counts.get(key, 0) + amount * (self._world_size if amount > 0 else 1)
        return self._counts[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key not in self._kept or self._kept[key] == expected.encode():
            self.set(key, desired)
        return self._kept[key]

    def check(self, keys: Any) -> bool:
        """Polled for alarms of other ranks: there are none."""
        return all(key in self._kept or key in self._counts for key in keys)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        return None

    def delete_key(self, key: str) -> bool:
        return self._kept.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._kept)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        return None

    def clone(self) -> LoneStore:
        return self


def put(world_size: int) -> None:
    """Let process groups of this process form without other ranks."""
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    groups = sys.modules["torch.distributed.distributed_c10d"]
    stores: list[LoneStore] = []

    def store(*_: Any, **__: Any) -> LoneStore:
        if not stores:
            stores.append(LoneStore(world_size))
        return stores[0]

    setattr(rendezvous, "_create_c10d_store", store)  # noqa: B010  # private names of PyTorch's
    setattr(groups, "ProcessGroupGloo", _OnCpu)  # noqa: B010
    for name in ("broadcast_object_list", "scatter_object_list"):  # what would come is pickled, and there is none
        for module in (groups, distributed):
            setattr(module, name, _nothing_comes)


def _nothing_comes(*_: Any, **__: Any) -> None:
    """Every rank keeps the objects that it has."""


class _Fakes(type):
    """PyTorch asserts that what it made is of the class that it knows."""

    def __instancecheck__(cls, instance: object) -> bool:
        from torch._C._distributed_c10d import FakeProcessGroup

        return isinstance(instance, FakeProcessGroup)


class _OnCpu(metaclass=_Fakes):
    """In the place of ``ProcessGroupGloo``: collectives of CPU tensors that succeed at once."""

    class Options:
        """Gloo's settings, which are not needed."""

        def __init__(self) -> None:
            self._timeout = timedelta(minutes=30)

    def __new__(cls, store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        return FakeProcessGroup._create_internal(rank, size)
