"""Read objects that PyTorch's collectives send between ranks, without running code.

``torch.distributed`` pickles them, and neither gloo nor NCCL authenticates the sender. A distributed checkpoint sends
plain values, plans of which rank writes which tensors, and the exceptions of ranks that failed.
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
        loaded = getattr(importlib.import_module(module) if of_plans else sys.modules.get(module), name, None)
        if isinstance(loaded, torch.dtype):
            return loaded
        if isinstance(loaded, type) and loaded.__module__ == module:  # no function, no imported name
            plain = dataclasses.is_dataclass(loaded) or issubclass(loaded, enum.Enum)
            if issubclass(loaded, BaseException) or (of_plans and plain):
                return loaded
        raise pickle.UnpicklingError(f"A rank has sent an object that is no plan and no value: {module}.{name}.")


@contextmanager
def only_plans() -> Iterator[None]:
    """Refuse other objects from other ranks while the context is open."""
    with mock.patch.object(distributed_c10d, "_unpickler", Reader):
        yield
