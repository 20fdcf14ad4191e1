"""Run a single rank of a job without the others: their answers are simulated as if they did the same.

Collectives over NCCL are simulated by the device, on which every rank holds the same values. Here are the store,
through which ranks exchange messages, and process groups of CPUs, which would connect to one another.
Source: ``torch/distributed/distributed_c10d.py`` (``_new_process_group_helper``), ``rendezvous.py``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

_NCCL_ID_BYTES = 128
_Store: Any = vars(distributed)["Store"]  # absent where PyTorch was built without distributed


class LoneStore(_Store):  # type: ignore[misc]  # its type is unknown
    """Stores this rank's values, and answers at once in place of the others."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key in self._values:
            return self._values[key]
        return str(self._counts[key]).encode() if key in self._counts else bytes([7]) * _NCCL_ID_BYTES

    def add(self, key: str, amount: int) -> int:
        """Add for all ranks at once."""
        self._counts[key] = self._counts.get(key, 0) + amount * (self._world_size if amount > 0 else 1)
        return self._counts[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key not in self._values or self._values[key] == expected.encode():
            self.set(key, desired)
        return self._values[key]

    def check(self, keys: Any) -> bool:
        """PyTorch polls it for alarms of other ranks, of which there are none."""
        return all(key in self._values or key in self._counts for key in keys)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        return None

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

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
    for name in ("broadcast_object_list", "scatter_object_list"):  # they would unpickle messages of other ranks
        for module in (groups, distributed):
            setattr(module, name, _receive_nothing)


def _receive_nothing(*_: Any, **__: Any) -> None:
    """Every rank retains its own objects."""


class _Fakes(type):
    """Keeps PyTorch's isinstance assertions true for the replaced process group."""

    def __instancecheck__(cls, instance: object) -> bool:
        from torch._C._distributed_c10d import FakeProcessGroup

        return isinstance(instance, FakeProcessGroup)


class _OnCpu(metaclass=_Fakes):
    """Replaces ``ProcessGroupGloo``: collectives of CPU tensors that succeed at once."""

    class Options:
        """Gloo's settings, which are not used."""

        def __init__(self) -> None:
            self._timeout = timedelta(minutes=30)

    def __new__(cls, store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        return FakeProcessGroup._create_internal(rank, size)
