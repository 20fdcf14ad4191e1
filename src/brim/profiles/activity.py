"""A profiler's recording as columns: activities of the devices, calls and operations of the host."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]

# Kinds of device activity.
COMPUTE, COLLECTIVE, MEMSET = 0, 1, 2
H2D, D2H, D2D, P2P, H2H, UNKNOWN_COPY = 3, 4, 5, 6, 7, 8
COPY_NAMES = {MEMSET: "memset", H2D: "H2D", D2H: "D2H", D2D: "D2D", P2P: "P2P", H2H: "H2H", UNKNOWN_COPY: "unknown"}
# Kinds of the host's calls.
LAUNCH, SYNCHRONIZE, ALLOCATE = 0, 1, 2

_COLLECTIVE = re.compile(r"nccl|rccl|oneccl", re.IGNORECASE)
_SYNCHRONIZE = re.compile(
    r"(cuda|cu|hip)(Device|Stream|Event|Ctx)?Synchronize|(cuda|hip)Memcpy(2D|3D|Peer|WithStream)?"
)
_SYNCHRONIZE_DRIVER = re.compile(r"cuMemcpy(HtoD|DtoH|DtoD|2D|3D|Peer)?")
_ALLOCATE = re.compile(
    r"(cuda|hip)(Malloc|Free|HostAlloc|HostRegister|HostUnregister|HostMalloc|HostFree)\w*"
    r"|cuMem(Alloc|Free|Host|Create|Map|Unmap|Release|SetAccess|Address)\w*"
)


def kernel_kind(name: str) -> int:
    return COLLECTIVE if _COLLECTIVE.search(name) else COMPUTE


def call_kind(name: str) -> int:
    """Return ``LAUNCH`` for calls that neither wait for the device nor allocate or free memory."""
    name = name.partition("_v")[0].removesuffix("_ptsz").removesuffix("_ptds")
    if _SYNCHRONIZE.fullmatch(name) or _SYNCHRONIZE_DRIVER.fullmatch(name):
        return SYNCHRONIZE
    if _ALLOCATE.fullmatch(name) and not name.endswith("Async"):
        return ALLOCATE
    return LAUNCH


class Texts:
    """Distinct texts, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        number = self.numbers.get(text)
        if number is None:
            clean = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written
            number = self.numbers.setdefault(clean, len(self.numbers))
        return number

    def all(self) -> list[str]:
        return list(self.numbers)


class Columns:
    """Arrays of one length that grow together. Times are seconds."""

    def __init__(self, **codes: str) -> None:
        self._arrays: dict[str, array[Any]] = {name: array(code) for name, code in codes.items()}
        self.appends: tuple[Callable[[Any], None], ...] = tuple(c.append for c in self._arrays.values())

    def add(self, *values: Any) -> None:
        """Add a row. Raises TypeError or OverflowError for a value that does not fit the type of its column."""
        for append, value in zip(self.appends, values, strict=True):
            append(value)

    def __len__(self) -> int:
        return min(len(column) for column in self._arrays.values())

    def __getitem__(self, name: str) -> Numbers:
        column = self._arrays[name]
        return np.frombuffer(column, dtype=column.typecode) if len(column) else np.empty(0, column.typecode)


@dataclass(kw_only=True, slots=True)
class Activity:
    """Everything that was recorded.

    ``device`` rows: a kernel, copy or memset; ``key`` joins it with the ``call`` that launched it, -1: not known.
    ``operations``: those of the host's threads.
    ``memory``: allocations (``bytes`` above 0) and frees by PyTorch, ``total`` and ``reserved`` after each, -1: not
    known; ``device`` -1 is the host. ``steps`` and ``loads``: annotated training steps and data loading.
    """

    texts: Texts = field(default_factory=Texts)
    device: Columns = field(
        default_factory=lambda: Columns(
            start="d", duration="d", kind="b", device="i", stream="q", key="q", bytes="q", name="i", unified="b"
        )
    )
    call: Columns = field(
        default_factory=lambda: Columns(start="d", duration="d", kind="b", key="q", thread="i", name="i")
    )
    operations: Columns = field(default_factory=lambda: Columns(start="d", duration="d", thread="i", name="i"))
    memory: Columns = field(
        default_factory=lambda: Columns(time="d", device="i", bytes="q", address="q", total="q", reserved="q")
    )
    steps: Columns = field(default_factory=lambda: Columns(start="d", duration="d"))
    loads: Columns = field(default_factory=lambda: Columns(start="d", duration="d"))
    device_names: dict[int, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class DeviceRows:
    """Kernels, copies and memsets of a device, by start."""

    def __init__(self, activity: Activity, device: int) -> None:
        every = activity.device
        mine, start = every["device"] == device, every["start"]
        chosen: Any = slice(None)  # sorted columns are not copied
        if not mine.all() or not (start[1:] >= start[:-1]).all():
            chosen = np.flatnonzero(mine)
            chosen = chosen[np.argsort(start[chosen], kind="stable")]
        self.start, self.duration = every["start"][chosen], every["duration"][chosen]
        self.kind, self.stream, self.key = every["kind"][chosen], every["stream"][chosen], every["key"][chosen]
        self.bytes, self.name = every["bytes"][chosen], every["name"][chosen]
        self.unified = every["unified"][chosen] != 0
        self.computing = self.kind == COMPUTE
        self.collective = self.kind == COLLECTIVE
        self.memory = self.kind >= MEMSET
