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
FIRST_GRAPH_POOL = 1 << 16  # streams from this number on stand for the private pools of captured CUDA graphs
TO_RAM, TO_DEVICE = "brim.to_ram", "brim.to_device"  # names of Ops that copy between the device and RAM


class Category(StrEnum):
    """What a storage is for. An activation lives from the forward into the backward pass; a workspace is that of a
    library (cuBLAS, cuDNN, NCCL).
    """

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
    """The part of a step that an operation belongs to. ``BUILD`` is before the first step."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation of a step.

    Attributes:
        name: As PyTorch's dispatcher has it: ``"aten.mm.default"``.
        module: The path of the innermost module that called it.
        phase: Forward, backward, optimizer, or building.
        step: Counts from 0; -1 while the model is built.
        at: The tick at which it begins.
        flops: Floating-point operations.
        read_bytes: What it reads of memory.
        written_bytes: What it writes.
        dtype: What it computes in, as PyTorch writes it; ``""``: none.
        in_ram: Of a program that keeps some tensors in RAM: whether the CPU does it there.
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
    """A reduction whose workspace this is: its bytes go in steps, so at other sizes they follow from this shape.

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
    """One allocation and its life.

    Attributes:
        id: Its number, unique in the trace.
        bytes: Its size, before the allocator rounds it.
        category: What it is for.
        module: The path of the module that made it.
        born: The tick of its allocation.
        died: The tick of its release; None: alive at the end.
        dtype: Of its elements.
        stream: The number of the CUDA stream that it was made on (0: the default one); the allocator keeps them
            apart.
        in_ram: Of a program that keeps some tensors in RAM: whether this is one of those.
        reduction: For the workspace of a reduction, the shape that decides its bytes.
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
    """What a step does: its operations in order, and the life of every storage. No addresses and no seconds.

    One clock orders everything: each operation's start, each allocation and each release takes one tick. So the order
    of allocations inside of an operation is kept, on which the caching allocator depends.

    Attributes:
        model: The model's name.
        target: The device that it is of: ``"cuda"`` or ``"cpu"``.
        ops: The operations, in order.
        storages: Every allocation.
        step_starts: The tick at which each step begins.
        not_modelled: Names of operations whose inner allocations are not known.
        notes: What was assumed, by subject, for the reader.
    """

    model: str
    target: str  # the device that the trace speaks of: "cuda" or "cpu"
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    step_starts: tuple[int, ...] = ()
    not_modelled: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, with kind and format version."""
        return codec.to_json(self, VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Trace:
        """Back from ``to_json``. Raises FormatError for another kind or version, and for unknown or missing keys."""
        return codec.from_json(cls, document, VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read it from a JSON file. Raises FormatError for anything else, a missing file included."""
        return codec.read(cls, path, VERSION)
