"""Run a trace through an allocator: what memory would have done."""

from __future__ import annotations

from collections.abc import Iterator

from brim.catalog.gpus import Gpu
from brim.catalog.gpus import gpu as find_gpu
from brim.core import Category, EventKind, Storage, Timeline, Trace
from brim.core.hardware import RAM, VRAM
from brim.core.trace import EMPTY_CACHE
from brim.errors import UsageError
from brim.memory.allocator import CachingAllocator
from brim.memory.allocator_config import AllocatorConfig
from brim.memory.blocks import Block
from brim.memory.out_of_memory import OutOfMemory


def simulate(trace: Trace, *, gpu: str = "", alloc_conf: str = "") -> Timeline:
    """The Timeline of ``trace``: live bytes in RAM for a CPU trace, PyTorch's caching allocator for a CUDA one.

    ``gpu`` names a GPU of the catalog: its memory is the limit, its cuBLAS workspace and CUDA context are counted;
    without it there is no limit. ``alloc_conf`` is what PYTORCH_ALLOC_CONF would hold. ``facts`` has
    ``peak_bytes.allocated``, ``peak_bytes.reserved``, ``peak_bytes.requested`` and ``peak_bytes.process`` (with a
    GPU), all in bytes. A request that does not fit ends the Timeline with an OOM event. Raises UsageError for a GPU
    or setting that is not known, or that means nothing for a CPU trace.
    """
    if trace.target == "cpu":
        if gpu or alloc_conf:
            given = "gpu" if gpu else "alloc_conf"
            raise UsageError(f"simulate() was given {given} for a trace of the CPU.", todo='Trace for target="cuda".')
        return _live_bytes(trace)
    card = find_gpu(gpu) if gpu else None
    return _through_allocator(trace, card, AllocatorConfig.parse(alloc_conf))


def _events(trace: Trace) -> Iterator[tuple[Storage | None, bool]]:
    """Storages at their birth (True) and death (False), in the order of the trace's clock; None: empty the cache."""
    ticks: list[tuple[int, Storage | None, bool]] = [(storage.born, storage, True) for storage in trace.storages]
    ticks += [(storage.died, storage, False) for storage in trace.storages if storage.died is not None]
    ticks += [(op.at, None, False) for op in trace.ops if op.name == EMPTY_CACHE]
    for _, storage, born in sorted(ticks, key=lambda tick: tick[0]):
        yield storage, born


def _live_bytes(trace: Trace) -> Timeline:
    made = Timeline(trace.model, measured=False)
    for storage, born in _events(trace):
        if storage is None:
            continue
        kind = EventKind.ALLOC if born else EventKind.FREE
        made.add(kind, RAM, storage.bytes, storage=storage.id, label=storage.module)
    made.facts["peak_bytes.allocated"] = float(made.peak_bytes(RAM))
    return made


def _through_allocator(trace: Trace, card: Gpu | None, config: AllocatorConfig) -> Timeline:
    made = Timeline(trace.model, measured=False)
    context_bytes = card.context().bytes if card is not None else 0
    usable_bytes = card.usable_bytes or card.memory_bytes if card is not None else None

    def on_segment(action: str, address: int, bytes: int, stream: int) -> None:
        grew = action in ("segment_alloc", "segment_map")
        kind = EventKind.SEGMENT_ALLOC if grew else EventKind.SEGMENT_FREE
        made.add(kind, VRAM, bytes, address=address, stream=stream)

    allocator = CachingAllocator(config, usable_bytes and usable_bytes - context_bytes, on_segment=on_segment)
    blocks: dict[int, Block] = {}
    for storage, born in _events(trace):
        if storage is None:
            allocator.empty_cache()
            continue
        if not born:
            block = blocks.pop(storage.id)
            made.add(EventKind.FREE, VRAM, block.size, address=block.address, storage=storage.id, label=storage.module)
            allocator.free(block)
            continue
        try:
            block = allocator.malloc(_bytes(storage, card))
        except OutOfMemory:
            made.add(EventKind.OOM, VRAM, _bytes(storage, card), storage=storage.id, label=storage.module)
            break
        blocks[storage.id] = block
        made.add(EventKind.ALLOC, VRAM, block.size, address=block.address, storage=storage.id, label=storage.module)
    stats = allocator.stats
    made.facts["peak_bytes.allocated"] = float(stats.allocated_peak_bytes)
    made.facts["peak_bytes.reserved"] = float(made.peak_bytes(VRAM, segments=True))
    made.facts["peak_bytes.requested"] = float(stats.requested_peak_bytes)
    if card is not None:
        made.facts["peak_bytes.process"] = made.facts["peak_bytes.reserved"] + context_bytes
    return made


def _bytes(storage: Storage, card: Gpu | None) -> int:
    """A storage's size; cuBLAS's workspace is the one of the GPU that is simulated, whichever was traced for."""
    known = card.cublas_workspace_bytes if card is not None else None
    if storage.category is Category.WORKSPACE and storage.module == "cuBLAS" and known:
        return known
    return storage.bytes
