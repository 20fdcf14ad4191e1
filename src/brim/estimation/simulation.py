"""Simulate the memory of a trace: its allocations and frees, in order, through the caching allocator."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from brim import catalog
from brim.allocator.blocks import Block, PoolId
from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import MIN_BLOCK_BYTES, AllocatorConfig
from brim.allocator.device_memory import DeviceMemory, SimulatedDevice
from brim.allocator.out_of_memory import OutOfMemory
from brim.core import Category, EventKind, Hardware, Op, Storage, Timeline, Trace
from brim.core.hardware import RAM, VRAM
from brim.core.timeline import CONTEXT_BYTES
from brim.core.trace import EMPTY_CACHE, FIRST_GRAPH_POOL, Phase
from brim.errors import UsageError
from brim.units import format_bytes, parse_bytes

_SEGMENT_KINDS = {
    "segment_alloc": EventKind.SEGMENT_ALLOC,
    "segment_map": EventKind.SEGMENT_ALLOC,
    "segment_free": EventKind.SEGMENT_FREE,
    "segment_unmap": EventKind.SEGMENT_FREE,
}


def simulate(
    trace: Trace,
    gpu: str | catalog.Gpu | Hardware | Place | None = None,
    alloc_conf: str = "",
    *,
    device: DeviceMemory | None = None,
) -> Timeline:
    """Simulate the GPU memory of a traced step.

    A trace for CUDA goes through a simulation of PyTorch's caching allocator (``c10/cuda/CUDACachingAllocator.cpp``);
    a trace for the CPU is added up. The result's ``peak_bytes.allocated`` counts blocks as
    ``torch.cuda.max_memory_allocated`` does, ``.reserved`` segments, and ``.process`` adds the CUDA context (the
    catalog's general figure for a GPU without one).

    Args:
        trace: The result of ``brim.trace``.
        gpu: A name of the catalog (``"RTX 4090"``), a ``Gpu`` of the catalog, a ``Hardware`` (its VRAM tier counts),
            or a ``Place``. None: unlimited memory. For a trace of the CPU it must be None.
        alloc_conf: Settings of the allocator in the form of ``PYTORCH_ALLOC_CONF``; ``""`` for a trace of the CPU.
        device: Replaces the simulated device, from which the allocator takes its segments.

    Returns:
        Allocations, frees and segments in order, without seconds. If a request does not fit, it is the last event and
        ``Timeline.out_of_memory``; its label names the operation, its module and its step.

    Raises:
        UsageError: The GPU or a setting is unknown, or one was given for a trace of the CPU.
    """
    if trace.target == "cpu":
        if gpu is not None or alloc_conf:
            asked = f"gpu={gpu!r}" if gpu is not None else f"alloc_conf={alloc_conf!r}"
            raise UsageError(f"{asked} was given for a trace of the CPU.", todo='Trace with target="cuda".')
        return _added_up(trace)
    config = AllocatorConfig.parse(alloc_conf)
    place = place_of(gpu)
    if device is None:
        device = SimulatedDevice(place.available_bytes, place.total_bytes)
    return _Run(trace, config, place, device).timeline


_ORDER = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.OPTIMIZER: 2}  # in a step
_SIMULATED = ("nvidia", "amd")  # whose tensors PyTorch's CUDA caching allocator serves
_OTHERS = (
    "{}: tensors are as on a CUDA device; its own allocator and context are not simulated, and a process can use "
    "only a part of its memory"
)
_BY_SIZE = (
    "only the memory of this GPU is known: no seconds are predicted, compute capability 8.0 is assumed, and all of "
    "the memory counts as free",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The GPU of a CUDA step.

    Attributes:
        name: The card's name.
        total_bytes: Its memory, including the CUDA context. None: unlimited.
        context: The CUDA context of the process.
        cublas_workspace_bytes: The size of cuBLAS's workspace; None: PyTorch's default.
        notes: Assumptions about the card, and figures that are unknown.
    """

    name: str
    total_bytes: int | None
    context: catalog.Context
    cublas_workspace_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def available_bytes(self) -> int | None:
        """Bytes left to the caching allocator."""
        return None if self.total_bytes is None else max(self.total_bytes - self.context.bytes, 0)


def place_of(gpu: str | catalog.Gpu | Hardware | Place | None, vram: str | int | None = None) -> Place:
    """The GPU by its name in the catalog, or as a Hardware (whose VRAM tier is what torch can use).

    ``vram`` without ``gpu``: the memory of a GPU that the catalog lacks, which is all that is known of it. With
    ``gpu``: how much of its memory this process may take, context included.
    """
    if vram is not None and gpu is None:
        total = parse_bytes(vram)
        name = f"a GPU of {format_bytes(total)}"
        return Place(name=name, total_bytes=total, context=catalog.general_context(), notes=_BY_SIZE)
    place = _place_of(gpu)
    if vram is None:
        return place
    assert place.total_bytes is not None, "a GPU has memory"
    limit, notes = parse_bytes(vram, place.total_bytes), place.notes
    if limit > place.total_bytes:
        notes = (*notes, f"--vram: {place.name} has {format_bytes(place.total_bytes)}, which is less, and is used")
    return replace(place, total_bytes=min(limit, place.total_bytes), notes=notes)


def _place_of(gpu: str | catalog.Gpu | Hardware | Place | None) -> Place:
    if gpu is None:
        return Place(name="", total_bytes=None, context=catalog.general_context())
    if isinstance(gpu, Place):
        return gpu
    if isinstance(gpu, Hardware):
        named = next((name for name in catalog.gpu_names() if name == gpu.name), None)
        context = catalog.gpu(named).context() if named else catalog.general_context()
        return Place(name=gpu.name, total_bytes=gpu.tier(VRAM).capacity_bytes, context=context)
    card = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    return Place(
        name=card.name,
        total_bytes=card.capacity_bytes,
        context=card.context(),
        cublas_workspace_bytes=card.cublas_workspace_bytes,
        notes=() if card.vendor in _SIMULATED else (_OTHERS.format(card.name),),
    )


def capability_of(place: Place) -> tuple[int, int]:
    """The GPU's compute capability; 8.0 without one (no GPU, or AMD's, which has the same kernels)."""
    capability = catalog.gpu(place.name).compute_capability if place.name in catalog.gpu_names() else None
    match = re.fullmatch(r"(\d+)\.(\d+)", capability or "")
    return (int(match[1]), int(match[2])) if match else (8, 0)


class _Run:
    """A single pass of a trace through the allocator."""

    def __init__(self, trace: Trace, config: AllocatorConfig, place: Place, device: DeviceMemory) -> None:
        facts = {CONTEXT_BYTES: float(place.context.bytes)}
        if place.total_bytes is not None:
            facts["total_bytes"] = float(place.total_bytes)
        self.timeline = Timeline(trace.model, measured=False, facts=facts)
        self._allocator = CachingAllocator(config, device=device, on_segment=self._segment)
        self._cublas_bytes = place.cublas_workspace_bytes
        self._label = ""
        self._blocks: dict[int, Block] = {}
        emptied = [op.at for op in trace.ops if op.name == EMPTY_CACHE]
        for storage, born, op in lives(trace):
            self._label = op.name if op is not None else ""
            while emptied and op is not None and emptied[0] <= op.at:
                self._allocator.empty_cache()
                emptied.pop(0)
            if not born:
                self._free(storage)
            elif not self._alloc(storage, op):
                return

    def _segment(self, action: str, address: int, bytes: int, stream: int) -> None:
        kind = _SEGMENT_KINDS[action]
        self.timeline.add(kind, VRAM, bytes, address=address, stream=stream, label=self._label)

    def _alloc(self, storage: Storage, op: Op | None) -> bool:
        try:
            block = self._allocator.malloc(self._bytes(storage), storage.stream, _pool_of(storage.stream))
        except OutOfMemory as failure:
            label = _where(op, str(failure))
            self.timeline.add(EventKind.OOM, VRAM, storage.bytes, storage=storage.id, label=label)
            return False
        self._blocks[storage.id] = block
        self.timeline.add(
            EventKind.ALLOC,
            VRAM,
            block.size,
            address=block.address,
            storage=storage.id,
            label=self._label,
            category=storage.category,
            stack=storage.module,
        )
        return True

    def _bytes(self, storage: Storage) -> int:
        """A storage's size; cuBLAS's workspace has the size of this GPU's, not of the traced GPU's."""
        if storage.category is Category.WORKSPACE and storage.module == "cuBLAS":
            return self._cublas_bytes or storage.bytes
        return storage.bytes

    def _free(self, storage: Storage) -> None:
        block = self._blocks.pop(storage.id)
        self.timeline.add(
            EventKind.FREE, VRAM, block.size, address=block.address, storage=storage.id, label=self._label
        )
        self._allocator.free(block)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of the caching allocator's allocated and reserved bytes; partial if ``out_of_memory``."""

    allocated_bytes: int
    reserved_bytes: int
    out_of_memory: bool = False


class Replay:
    """Replay a trace's allocations and frees through the allocator with other sizes: peaks only, no events."""

    def __init__(self, trace: Trace, alloc_conf: str = "") -> None:
        self._config = AllocatorConfig.parse(alloc_conf)
        self._sizes = [storage.bytes for storage in trace.storages]
        self._streams = [storage.stream for storage in trace.storages]
        self._cublas = [
            index for index, storage in enumerate(trace.storages)
            if storage.category is Category.WORKSPACE and storage.module == "cuBLAS"
        ]  # fmt: skip
        self._changes = list(_with_emptied(trace))
        self._signs = np.array([1 if born else -1 for index, born in self._changes if index >= 0])
        self._order = np.array([index for index, _ in self._changes if index >= 0], dtype=np.int64)

    def peaks(
        self, sizes: Sequence[int] | None, place: Place, *, ends: bool = False, device: DeviceMemory | None = None
    ) -> Peaks:
        """Peaks with ``sizes`` by the storage's position (None: the trace's). ``ends``: limit memory to the GPU's."""
        sizes = list(self._sizes if sizes is None else sizes)
        for index in self._cublas:
            sizes[index] = place.cublas_workspace_bytes or sizes[index]
        if device is None:
            device = SimulatedDevice(place.available_bytes if ends else None, place.total_bytes)
        allocator = CachingAllocator(self._config, device=device)
        blocks: dict[int, Block] = {}
        failed = False
        try:
            for index, born in self._changes:
                if index < 0:
                    allocator.empty_cache()
                elif born and sizes[index]:
                    stream = self._streams[index]
                    blocks[index] = allocator.malloc(sizes[index], stream, _pool_of(stream))
                elif not born and sizes[index]:
                    allocator.free(blocks.pop(index))
        except OutOfMemory:
            failed = True
        stats = allocator.stats
        return Peaks(
            allocated_bytes=stats.allocated_peak_bytes, reserved_bytes=stats.reserved_peak_bytes, out_of_memory=failed
        )

    def fits(self, sizes: Sequence[int] | None, place: Place) -> bool:
        return not self.peaks(sizes, place, ends=True).out_of_memory

    def least_bytes(self, sizes: Sequence[int]) -> int:
        """Allocated bytes at the peak, in blocks of the smallest size: no allocator setting takes less.

        Floating-point numbers are exact up to 9 PB, and do not overflow beyond.
        """
        blocks = np.ceil(np.array(sizes, dtype=np.float64) / MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        return int(np.cumsum(blocks[self._order] * self._signs).max(initial=0))


def _pool_of(stream: int) -> PoolId | None:
    """The private pool of a captured graph, which a trace writes as a stream."""
    return (0, stream) if stream >= FIRST_GRAPH_POOL else None


def births_and_deaths(trace: Trace) -> list[tuple[int, int, bool]]:
    """Tick and storage's position of births (True) and deaths, in order."""
    changes = [(storage.born, index, True) for index, storage in enumerate(trace.storages)]
    changes += [(s.died, index, False) for index, s in enumerate(trace.storages) if s.died is not None]
    return sorted(changes, key=lambda change: change[0])


def _with_emptied(trace: Trace) -> Iterator[tuple[int, bool]]:
    """Yield births (True) and deaths by the storage's position, in order; -1 where the program empties the cache."""
    emptied = [op.at for op in trace.ops if op.name == EMPTY_CACHE]
    for tick, index, born in births_and_deaths(trace):
        while emptied and emptied[0] <= tick:
            emptied.pop(0)
            yield -1, False
        yield index, born


def _added_up(trace: Trace) -> Timeline:
    timeline = Timeline(trace.model, measured=False)
    for storage, born, op in lives(trace):
        kind = EventKind.ALLOC if born else EventKind.FREE
        timeline.add(
            kind,
            RAM,
            storage.bytes,
            storage=storage.id,
            label=op.name if op is not None else "",
            category=storage.category,
            stack=storage.module,
        )
    return timeline


def phases(trace: Trace, timeline: Timeline) -> tuple[tuple[str, int], ...]:
    """The name and the first event's number of each part of each step, in a simulated ``timeline``.

    Parts are told by their allocations; recomputation belongs to the backward pass. Building has no name.
    """
    born, ops = {storage.id: storage.born for storage in trace.storages}, trace.ops
    begins = [op.at for op in ops]
    phase_starts: list[tuple[str, int]] = []
    last: tuple[int, Phase] | None = None
    kinds, storages = timeline.column("kind"), timeline.column("storage")
    for event, (kind, storage) in enumerate(zip(kinds, storages, strict=True)):
        at = bisect_right(begins, born.get(storage, -1)) - 1 if kind == EventKind.ALLOC else -1
        if at < 0 or ops[at].step < 0 or (ops[at].step, ops[at].phase) == last or ops[at].phase not in _ORDER:
            continue
        if last is not None and ops[at].step == last[0] and _ORDER[ops[at].phase] < _ORDER[last[1]]:
            continue
        last = (ops[at].step, ops[at].phase)
        phase_starts.append((ops[at].phase.value, event))
    return tuple(phase_starts)


def reserved_at_steps(trace: Trace, timeline: Timeline) -> list[int]:
    """Reserved bytes at the end of each step of a simulated ``timeline`` that did not run out of memory."""
    kinds, numbers, sizes = (timeline.column(name) for name in ("kind", "storage", "bytes"))
    born = {storage.id: storage.born for storage in trace.storages}
    held, ends = 0, list[int]()
    for kind, storage, size in zip(kinds, numbers, sizes, strict=True):
        if kind == EventKind.ALLOC:
            while len(ends) + 1 < len(trace.step_starts) and born[storage] >= trace.step_starts[len(ends) + 1]:
                ends.append(held)
        elif kind == EventKind.SEGMENT_ALLOC:
            held += size
        elif kind == EventKind.SEGMENT_FREE:
            held -= size
    return ends + [held] * (len(trace.step_starts) - len(ends))


def lives(trace: Trace) -> Iterator[tuple[Storage, bool, Op | None]]:
    """Yield every allocation (True) and free (False) in order, with the operation that began last."""
    ops, last = trace.ops, -1
    for tick, index, born in births_and_deaths(trace):
        while last + 1 < len(ops) and ops[last + 1].at <= tick:
            last += 1
        if (storage := trace.storages[index]).bytes:
            yield storage, born, ops[last] if last >= 0 else None


def _where(op: Op | None, failure: str) -> str:
    """``aten.mm.default in model.layers.3.mlp (forward of step 2): CUDA out of memory. ...``"""
    if op is None:
        return failure
    module = f" in {op.module}" if op.module else ""
    step = "while building" if op.step < 0 else f"{op.phase.value} of step {op.step + 1}"
    return f"{op.name}{module} ({step}): {failure}"
