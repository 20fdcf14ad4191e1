"""The operations of a step in order, and the life of every storage. Logical: no addresses, no seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from brim.core.codec import Document
from brim.core.leak import Leak
from brim.printable import Readable

EMPTY_CACHE = "torch.cuda.empty_cache"  # the name of an Op by which a step gives cached memory back to the device
FIRST_GRAPH_POOL = 1 << 16  # streams from this number on stand for the private pools of captured CUDA graphs
TO_RAM, TO_DEVICE = "brim.to_ram", "brim.to_device"  # names of Ops that copy between the device and RAM


class Category(StrEnum):
    """The use of a storage. An activation lives from the forward into the backward pass; a workspace belongs to a
    library (cuBLAS, cuDNN, NCCL).
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    OPTIMIZER_TEMPORARY = "optimizer_temporary"  # in recordings: freed before the optimizer's step ends
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    KV_CACHE = "kv_cache"
    INPUT = "input"
    WORKSPACE = "workspace"


class Phase(StrEnum):
    """The part of a step that an operation belongs to. ``BUILD`` is before the first step."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operation of a step.

    Attributes:
        name: The name in PyTorch's dispatcher: ``"aten.mm.default"``.
        module: The path of the innermost module that called it.
        phase: Forward, backward, optimizer, or building.
        step: The number of the step, from 0; -1 while the model is built.
        at: The tick at which it begins.
        flops: Floating-point operations.
        read_bytes: Bytes that it reads.
        written_bytes: Bytes that it writes.
        dtype: The dtype that it computes in, as PyTorch writes it; ``""``: none.
        in_ram: True if the CPU computes it in RAM, in a program that keeps some tensors there.
        kernel: The kind of its kernel, as ``Hardware.shares`` names it; ``""``: one element after the other.
        fill: The share of a matrix product's tiles that its matrices fill.
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
    kernel: str = ""
    fill: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """The shape of a reduction, from which the bytes of its workspace follow at other sizes.

    ``reduced`` and ``outer``: (size, stride) of the dimensions, in elements, from the smallest stride up.
    ``counters``: the workspace holds the counters, not the partial results. ``threads``: of one multiprocessor.
    """

    reduced: tuple[tuple[int, int], ...]
    outer: tuple[tuple[int, int], ...]
    part_bytes: int
    multiprocessors: int
    threads: int
    counters: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """An allocation and its life.

    Attributes:
        id: Its number, unique in the trace.
        bytes: Its size, before the allocator rounds it.
        category: Its use.
        module: The path of the module that allocated it.
        born: The tick of its allocation.
        died: The tick of its release; None: alive at the end.
        dtype: The dtype of its elements.
        stream: The number of the CUDA stream that it was allocated on (0: the default stream).
        in_ram: True if it is in RAM, in a program that keeps some tensors there.
        reduction: For the workspace of a reduction, the shape that its bytes follow from.
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

    def moved(self, *, id: int, bytes: int, module: str, born: int, died: int | None) -> Storage:
        """Return a copy elsewhere in a trace, in a third of the time of ``dataclasses.replace``."""
        return Storage(
            id=id, bytes=bytes, category=self.category, module=module, born=born, died=died, dtype=self.dtype,
            stream=self.stream, in_ram=self.in_ram, reduction=self.reduction,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace(Readable, Document):
    """The operations of a step in order, and the life of every storage. No addresses and no seconds.

    The start of each operation, each allocation and each release takes one tick of one clock. This preserves the
    order of allocations inside an operation, on which the caching allocator depends.

    Attributes:
        model: The model's name.
        target: The device: ``"cuda"`` or ``"cpu"``.
        ops: The operations, in order.
        storages: Every allocation.
        step_starts: The tick at which each step begins.
        not_modelled: Names of operations whose inner allocations are not known.
        notes: Assumptions, by subject.
        leak: Memory that grows with every step; None: it does not, or too few steps were traced.
    """

    _VERSION = 5
    _PRINTER, _TITLE = "brim.cli.explain.answers:print_run", "model"

    model: str
    target: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    step_starts: tuple[int, ...] = ()
    not_modelled: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    leak: Leak | None = None
