"""Objects that PyTorch's collectives send between ranks, read so that none of them runs code.

``torch.distributed`` pickles them, and neither gloo nor NCCL knows who is at the other end. What a distributed
checkpoint sends are plain values, plans of what is written where, and the exceptions of ranks that failed.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed import distributed_c10d

_OF_PLANS = ("torch.distributed.checkpoint.", "brim.run.checkpoint.")  # modules of plans and of a manifest's entries
_VALUES = {
    ("builtins", "set"), ("collections", "OrderedDict"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("traceback", "FrameSummary"), ("traceback", "StackSummary"),
}  # fmt: skip


class Reader(pickle.Unpickler):
    """Reads plain values, plans and exceptions, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return super().find_class(module, name)
        of_plans = module.startswith(_OF_PLANS)
        found = getattr(importlib.import_module(module) if of_plans else sys.modules.get(module), name, None)
        if isinstance(found, torch.dtype):
            return found
        if isinstance(found, type) and found.__module__ == module:  # no function, and nothing that a module imports
            plain = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
            if issubclass(found, BaseException) or (of_plans and plain):
                return found
        raise pickle.UnpicklingError(f"A rank has sent an object that is no plan and no value: {module}.{name}.")


@contextmanager
def only_plans() -> Iterator[None]:
    """Within, this process takes no other objects from other ranks."""
    with mock.patch.object(distributed_c10d, "_unpickler", Reader):
        yield
