"""What a step does: its operations in order, and the life of every storage. Logical: no addresses, no seconds.

One clock orders everything. Each operation's start, each allocation and each free takes one tick, so the order of
allocations and frees *inside* an operation (workspaces, temporaries) is kept: the caching allocator depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from brim.core import codec

VERSION = 3


EMPTY_CACHE = "torch.cuda.empty_cache"  # the name of an Op by which a step gives cached memory back to the device
TO_RAM, TO_DEVICE = "brim.to_ram", "brim.to_device"  # names of Ops that copy between the device and RAM


class Category(StrEnum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"  # lives from forward into backward
    TEMPORARY = "temporary"
    KV_CACHE = "kv_cache"
    INPUT = "input"
    WORKSPACE = "workspace"  # of a library: cuBLAS, cuDNN, NCCL


class Phase(StrEnum):
    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation. ``module`` is the path of the innermost module, ``step`` counts from 0 (-1 while building).

    ``in_ram``: of a program that keeps some tensors in RAM, one that the CPU does there.
    """

    name: str
    module: str
    phase: Phase
    step: int
    at: int
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    dtype: str = ""
    in_ram: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A reduction whose workspace this is: its bytes go in steps, so at other sizes they are told by this shape.

    ``reduced`` and ``kept``: (size, stride) of the dimensions, in elements, from the smallest stride up.
    ``counters``: whether this is the counters' memory, not that of the parts.
    """

    reduced: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    part_bytes: int
    multiprocessors: int
    threads: int  # that one multiprocessor holds
    counters: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """One allocation and its life: from tick ``born`` to tick ``died`` (None: alive at the end).

    ``stream`` numbers the stream that it was made on (0: the default one): the allocator keeps their blocks apart.
    ``in_ram``: of a program that keeps some tensors in RAM, one of those.
    ``reduction``: of a reduction's workspace, which has no bytes where a reduction of its shape takes none.
    """

    id: int
    bytes: int
    category: Category
    module: str
    born: int
    died: int | None = None
    dtype: str = ""
    stream: int = 0
    in_ram: bool = False
    reduction: Reduction | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model's step(s) as operations and storages.

    ``step_starts`` holds the tick at which each step begins. ``not_modelled`` names operations whose temporaries
    are unknown. ``notes`` is free text for the reader, keyed by subject.
    """

    model: str
    target: str  # the device that the trace speaks of: "cuda" or "cpu"
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    step_starts: tuple[int, ...] = ()
    not_modelled: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return codec.to_json(self, VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Trace:
        return codec.from_json(cls, document, VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        return codec.read(cls, path, VERSION)
